"""The formats: where the bytes of a checkpoint's tensors are, one reader each, and a writer for some."""
