"""Stored tensors of any format: their chunks, the bytes of these, and how they are read and streamed."""
