"""Files of Hugging Face safetensors."""
