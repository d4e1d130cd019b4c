"""Checkpoints of DeepSpeed: ZeRO, pipelines, 16-bit optimizers, and universal checkpoints."""
