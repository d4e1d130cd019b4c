"""Texts for users speak the field's language: words that only this project used are retired."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
REWRITTEN = [
    "CONTRIBUTING.md",
    "README.md",
    "SECURITY.md",
    "docs/README.md",
    "docs/architecture.md",
    "docs/canonical.md",
    "docs/compatibility.md",
    "docs/cost-model.md",
    "docs/dcp.md",
    "docs/decisions.md",
    "docs/dependencies.md",
    "docs/devices.md",
    "docs/edge-cases.md",
    "docs/elastic.md",
    "docs/environment.md",
    "docs/faq.md",
    "docs/fingerprint.md",
    "docs/format.md",
    "docs/formats.md",
    "docs/glossary.md",
    "docs/incremental.md",
    "docs/integrations.md",
    "docs/live.md",
    "docs/manager.md",
    "docs/migrate/from-accelerate.md",
    "docs/migrate/from-dcp.md",
    "docs/migrate/from-deepspeed.md",
    "docs/migrate/from-orbax.md",
    "docs/monitoring.md",
    "docs/normalization.md",
    "docs/pains.md",
    "docs/reading.md",
    "docs/recipes/compare.md",
    "docs/recipes/convert.md",
    "docs/recipes/elastic.md",
    "docs/recipes/engines.md",
    "docs/recipes/hugging-face.md",
    "docs/recipes/inspect.md",
    "docs/recipes/lora.md",
    "docs/recipes/megatron.md",
    "docs/recipes/moe.md",
    "docs/recipes/pipeline.md",
    "docs/recipes/plan.md",
    "docs/recipes/resume.md",
    "docs/recipes/timeline.md",
    "docs/recipes/weight-sync.md",
    "docs/reference/checkpoints.md",
    "docs/reference/layouts.md",
    "docs/reference/live.md",
    "docs/reference/mapping.md",
    "docs/reference/plans.md",
    "docs/reference/states.md",
    "docs/scale.md",
    "docs/speed.md",
    "docs/support.md",
    "docs/testing.md",
    "docs/troubleshooting.md",
    "docs/what-ok-means.md",
    "docs/where.md",
    "docs/why-not.md",
    "docs/work-list.md",
]
"""Pages that are held to the list; a page that is rewritten is added here."""
RETIRED = {
    r"\b(the house|rooms?)\b": "architecture, package, layer",
    r"\bborders?\b(?! module)": "edge case, limit",
    r"\b(the|a|DCP) face\b": "drop-in API",
    r"\btold\b|\btells?\b": "report, print, say which",
    r"\bholes?\b": "missing region",
    r"\b(is|are|was|were|be|been) cut\b|\bcuts?\b(?! off)|\bcutting\b": "shard, split",
    r"\bwhole (tensors?|checkpoints?|state)\b": "full tensor, complete checkpoint",
    r"\b(go|goes|went|going) on\b": "continue, resume",
    r"\b(lies|lie|lay)\b": "is stored, is laid out",
    r"\balike\b": "the same",
    r"\b(nobody|somebody|whoever)\b": "no rank, a process, say who",
    r"\bunder way\b": "in progress",
    r"\bwhat there is\b|\bas it stands\b|\bby then\b": "say it directly",
    r"\bso many\b|\bas many as\b": "give the number",
}
"""What is retired, and what to write instead."""


REWRITTEN_CODE = [
    "planners/__init__.py",
    "planners/errors.py",
    "planners/findings.py",
    "planners/geometry/box.py",
    "planners/plans/codec.py",
    "planners/plans/relay.py",
    "planners/plans/rounds.py",
    "reshard/__init__.py",
    "reshard/api/manager/policies.py",
    "reshard/api/plan.py",
    "reshard/api/retention.py",
    "reshard/checkpoint.py",
    "reshard/dcp/__init__.py",
    "reshard/dcp/api.py",
    "reshard/dcp/default_planner.py",
    "reshard/dcp/engine/__init__.py",
    "reshard/dcp/engine/calls.py",
    "reshard/dcp/engine/newer_names.py",
    "reshard/dcp/engine/saving_process.py",
    "reshard/dcp/engine/states.py",
    "reshard/dcp/filesystem.py",
    "reshard/dcp/format_utils.py",
    "reshard/dcp/fsspec_filesystem.py",
    "reshard/dcp/hf_storage.py",
    "reshard/dcp/logger.py",
    "reshard/dcp/logging_handlers.py",
    "reshard/dcp/metadata.py",
    "reshard/dcp/optimizer.py",
    "reshard/dcp/planner.py",
    "reshard/dcp/planner_helpers.py",
    "reshard/dcp/protocol.py",
    "reshard/dcp/quantized_hf_storage.py",
    "reshard/dcp/resharding.py",
    "reshard/dcp/staging.py",
    "reshard/dcp/state_dict.py",
    "reshard/dcp/state_dict_loader.py",
    "reshard/dcp/state_dict_saver.py",
    "reshard/dcp/stateful.py",
    "reshard/dcp/storage.py",
    "reshard/dcp/utils.py",
    "reshard/elastic.py",
    "reshard/errors.py",
    "reshard/integrations/__init__.py",
    "reshard/integrations/accelerate.py",
    "reshard/integrations/lightning.py",
    "reshard/integrations/ray.py",
    "reshard/integrations/sglang.py",
    "reshard/integrations/torch_checkpointing.py",
    "reshard/integrations/torchft.py",
    "reshard/integrations/torchtitan.py",
    "reshard/integrations/transformers.py",
    "reshard/integrations/verl.py",
    "reshard/integrations/vllm.py",
    "reshard/live/state.py",
    "reshard/mapping/__init__.py",
    "reshard/mapping/families.py",
    "reshard/state_dict/collect.py",
    "reshard/state_dict/fqn_map.py",
    "reshard/state_dict/names.py",
    "reshard/state_dict/raw.py",
]
"""Modules whose docstrings and messages are held to the list."""


@pytest.mark.parametrize("page", REWRITTEN)
def test_no_retired_words(page: str) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    found = [
        f"{page}:{text[: match.start()].count(chr(10)) + 1}: {match[0]!r}: {instead}"
        for pattern, instead in RETIRED.items()
        for match in re.finditer(pattern, text, re.IGNORECASE)
    ]
    assert found == []


@pytest.mark.parametrize("module", REWRITTEN_CODE)
def test_no_retired_words_in_docstrings_and_messages(module: str) -> None:
    nodes = ast.walk(ast.parse((ROOT / module).read_text(encoding="utf-8")))
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    found = [
        f"{module}: {match[0]!r} in {text[:60]!r}: {instead}"
        for pattern, instead in RETIRED.items()
        for text in texts
        for match in re.finditer(pattern, re.sub(r"`[^`]*`", "", text), re.IGNORECASE)
    ]
    assert found == []
