"""Ready mappings between Hugging Face, torchtitan, Megatron, vLLM and SGLang, for Llama, Mistral, Qwen, Phi-3, Gemma
and mixtures of experts: Qwen, Mixtral, DeepSeek-V2 and V3, gpt-oss.

    mapping = ready("config.json", "torchtitan", "huggingface")
    reshard.convert(checkpoint, "out", format="safetensors", model_only=True, mapping=mapping)

They are for canonical names and whole tensors, as `Checkpoint.normalized` and `convert(..., normalized=True)` have
them: of Megatron's files, layers are unstacked and padding is cut off before. Optimizer states go along.
"""

from reshard.mapping.families.catalogue import FAMILIES, NAMINGS, ready
from reshard.mapping.families.config import Decoder
from reshard.mapping.families.experts import in_memory_to_disk

__all__ = ["FAMILIES", "NAMINGS", "Decoder", "in_memory_to_disk", "ready"]
