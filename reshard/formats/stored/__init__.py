"""Tensors in storage, whatever the format: chunks, the bytes they lie in, and how these are read."""
