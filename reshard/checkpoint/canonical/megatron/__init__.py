"""Checkpoints of Megatron by canonical names."""
