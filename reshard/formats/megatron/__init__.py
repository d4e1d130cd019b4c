"""Checkpoints of Megatron: `torch_dist`, and the older ones of one file per model parallel rank."""
