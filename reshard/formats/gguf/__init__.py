"""GGUF: the files of llama.cpp, with their metadata and their quantized tensors."""
