"""What is said of each ready mapping is what was checked.

python -m tests.reshard.mapping.test_checked      # prints the table
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from reshard.mapping.architectures import ARCHITECTURES
from tests.stories.tiny_models import DECODERS, DENSE, MIXTURES, SEEING

PAGE = Path(__file__).parents[3] / "docs" / "recipes" / "hugging-face.md"
BLOCK = ("<!-- ready mappings -->\n", "<!-- end of ready mappings -->")
TINY = {*DECODERS, *SEEING}
BY_HAND = ("gemma3n",)
COMPUTED = {*MIXTURES, *DENSE}
TRANSFORMERS = (
    "All tensors that transformers 5.24 saves of a tiny model, as a round trip, bit by bit, and the names in memory"
)
MEGATRON = "Loaded and saved by Megatron-core 0.16, with the logits of transformers within 2e-6"
BY_NAME = "Not loaded there: a round trip of all tensors, with its converters' names"
TITAN = "Llama and Qwen3-MoE: checkpoints of torchtitan; the others: a round trip of all tensors"
ENGINE = "Not run: follows the weight loaders of vLLM 0.33 and SGLang 0.5.23"


def rows() -> Iterator[tuple[str, str, list[str]]]:
    """Naming scheme, what was checked, and the architectures."""
    known = {
        naming: [family for family, it in ARCHITECTURES.items() if naming in it.namings]
        for naming in ("megatron", "torchtitan", "vllm", "sglang", "gguf", "transformer_engine")
    }
    yield "`transformers`, `plain`", TRANSFORMERS, [family for family in ARCHITECTURES if family in TINY]
    yield (
        "the same",
        "Same code and names as DeepSeek-V3",
        [family for family in ARCHITECTURES if family not in (*TINY, *BY_HAND)],
    )
    yield "the same", "As the first row, by hand: its vision tower needs timm", list(BY_HAND)
    yield "`megatron`", MEGATRON, [family for family in known["megatron"] if family in COMPUTED]
    yield "`megatron`", BY_NAME, [family for family in known["megatron"] if family not in COMPUTED]
    yield "`torchtitan`", TITAN, known["torchtitan"]
    assert known["vllm"] == known["sglang"]
    yield "`vllm`, `sglang`", ENGINE, known["vllm"]
    yield "`gguf`", "Not run: follows llama.cpp's names and row order", known["gguf"]
    yield "`transformer_engine`", "Not run: follows its documentation", known["transformer_engine"]


def table() -> str:
    """The table of the page."""
    lines = ["| Naming scheme | What was checked | `model_type` |", "|---|---|---|"]
    lines += [f"| {naming} | {checked} | {', '.join(families)} |" for naming, checked, families in rows()]
    return "\n".join(lines) + "\n"


def test_the_page_says_what_was_checked() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.partition(BLOCK[0])[2].partition(BLOCK[1])[0] == table()


def test_every_architecture_is_in_the_table() -> None:
    """But for one with DeepSeek's code, each is tried with transformers."""
    assert [family for family in ARCHITECTURES if family not in TINY] == ["kimi_k2", *BY_HAND]
    assert {family for family, it in ARCHITECTURES.items() if "megatron" in it.namings} >= COMPUTED


if __name__ == "__main__":
    print(table())
