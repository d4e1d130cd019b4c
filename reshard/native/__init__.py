"""The native format: safetensors files and one JSON manifest, published last (docs/format.md)."""
