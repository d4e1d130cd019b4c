"""Tensors in storage, whatever the format: chunks, the bytes they lie in, how these are read and streamed."""
