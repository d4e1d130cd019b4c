"""Tensors in storage, whatever the format: chunks, their bytes, and how these are read and streamed."""
