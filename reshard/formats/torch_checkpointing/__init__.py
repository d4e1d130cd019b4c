"""Checkpoints of torch_checkpointing."""
