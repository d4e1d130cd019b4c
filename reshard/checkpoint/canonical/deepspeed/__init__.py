"""Checkpoints of DeepSpeed by canonical names."""
