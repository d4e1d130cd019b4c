"""FSDP1: flat parameters, whole ones in a state and those that every rank saved by itself."""
