"""Tensors in storage, in any format: chunks, their bytes, and how these are read and streamed."""
