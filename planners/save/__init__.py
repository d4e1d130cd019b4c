"""Who writes what, once: save plans, their proof, and how replicas share the writing."""
