"""What is said of each ready mapping is what was checked.

python -m tests.reshard.mapping.test_checked      # prints the lists
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from reshard.mapping.architectures import ARCHITECTURES
from tests.stories.tiny_models import DECODERS, DENSE, MIXTURES, SEEING

PAGE = Path(__file__).parents[3] / "docs" / "recipes" / "hugging-face.md"
BLOCK = ("<!-- ready mappings -->\n", "<!-- end of ready mappings -->")
TINY = {*DECODERS, *SEEING}
BY_HAND = ("gemma3n",)
COMPUTED = {*MIXTURES, *DENSE}
TRANSFORMERS = (
    "transformers 5.24 saved a tiny model of each. A round trip returned all its tensors bit by bit, with the names "
    "that transformers uses in memory"
)
SHARED = "Not tested separately. It has the same code and names as DeepSeek-V3, so the same rules apply"
SEEN_BY_HAND = "Checked like the first list, but by hand, because its vision tower needs timm"
MEGATRON = (
    "Megatron-core 0.16 loaded and saved a tiny model of each. Its logits were within 2e-6 of those of transformers"
)
BY_NAME = (
    "Not loaded in Megatron. A round trip returned all tensors, and the names are those of Megatron's own converters"
)
TITAN = "A round trip returned all tensors. For Llama and Qwen3-MoE, checkpoints of torchtitan were converted, too"
ENGINE = "The engines were not run. The names follow the weight loaders of vLLM 0.33 and SGLang 0.5.23"
GGUF = "llama.cpp was not run. The names and the order of rows are llama.cpp's"
LONG = 30
TE = "TransformerEngine was not run. The names follow its documentation"


def rows() -> Iterator[tuple[str, str, list[str]]]:
    """Naming scheme, what was checked, and the architectures."""
    known = {
        naming: [family for family, it in ARCHITECTURES.items() if naming in it.namings]
        for naming in ("megatron", "torchtitan", "vllm", "sglang", "gguf", "transformer_engine")
    }
    yield "`transformers`, `plain`", TRANSFORMERS, [family for family in ARCHITECTURES if family in TINY]
    yield (
        "`transformers`, `plain`",
        SHARED,
        [family for family in ARCHITECTURES if family not in (*TINY, *BY_HAND)],
    )
    yield "`transformers`, `plain`", SEEN_BY_HAND, list(BY_HAND)
    yield "`megatron`", MEGATRON, [family for family in known["megatron"] if family in COMPUTED]
    yield "`megatron`", BY_NAME, [family for family in known["megatron"] if family not in COMPUTED]
    yield "`torchtitan`", TITAN, known["torchtitan"]
    assert known["vllm"] == known["sglang"]
    yield "`vllm`, `sglang`", ENGINE, known["vllm"]
    yield "`gguf`", GGUF, known["gguf"]
    yield "`transformer_engine`", TE, known["transformer_engine"]


def lists() -> str:
    """The lists of the page, each in alphabetical order, and long ones as a list with an item for each letter."""
    return "\n".join(
        f"**{naming}**: {checked}:\n\n{listed(sorted(families))}\n" for naming, checked, families in rows()
    )


def listed(families: list[str]) -> str:
    if len(families) <= LONG:
        return ", ".join(families)
    letters = groupby(families, key=lambda family: family[0].upper())
    return "\n".join(f"- {', '.join(its)}" for _, its in letters)


def test_the_page_says_what_was_checked() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.partition(BLOCK[0])[2].partition(BLOCK[1])[0] == lists()


def test_every_architecture_is_in_the_table() -> None:
    """But for one with DeepSeek's code, each is tried with transformers."""
    assert [family for family in ARCHITECTURES if family not in TINY] == ["kimi_k2", *BY_HAND]
    assert {family for family, it in ARCHITECTURES.items() if "megatron" in it.namings} >= COMPUTED


if __name__ == "__main__":
    print(lists())
