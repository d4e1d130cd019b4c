"""Every Python block of the README and of the recipes runs as it stands."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import reshard
from tests import gloo

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "recipes").glob("*.md"))]
BLOCKS = [
    pytest.param(match[1], page, text[: match.start()].count("\n") + 1, id=f"{page.stem}:{i}")
    for page in PAGES
    for text in [page.read_text(encoding="utf-8")]
    for i, match in enumerate(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
]

IMPORTS = """from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch.compile uses what torch deprecates
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # torch's DCP says so in one process
@pytest.mark.parametrize(("source", "page", "line"), BLOCKS)
def test_blocks_run(source: str, page: Path, line: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracebacks show the line of the page. Samples are where they are in the repository."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "data").symlink_to(ROOT / "tests" / "data")
    monkeypatch.chdir(tmp_path)

    exec(compile("\n" * line + source, str(page), "exec"), {"__name__": "__main__"})


def _on_this_rank(source: str, folder: str) -> None:
    os.chdir(folder)
    exec(compile(source, "recipe", "exec"), {"__name__": "__main__"})


@pytest.mark.gloo
def test_the_recipe_for_resuming_runs_on_several_ranks(tmp_path: Path) -> None:
    """It begins on 3 ranks; a copy that expects a save resumes on 2."""
    [source] = [block.values[0] for block in BLOCKS if block.id == "resume:0"]
    begin, resume = (
        source,
        source.replace("train(steps=10) == 0", "train(steps=30) == 20").replace(
            "train(steps=20) == 10", "train(steps=40) == 30"
        ),
    )
    assert begin != resume

    gloo.run(_on_this_rank, 3, begin, str(tmp_path))
    gloo.run(_on_this_rank, 2, resume, str(tmp_path))


@pytest.mark.gloo
def test_the_recipe_for_pipelines_runs_on_other_numbers_of_stages(tmp_path: Path) -> None:
    """Each run resumes what the one before saved: 2 stages, 1, 4; all steps were counted in the end."""
    [source] = [block.values[0] for block in BLOCKS if block.id == "pipeline:0"]

    for stages in (2, 1, 4):
        gloo.run(_on_this_rank, stages, source, str(tmp_path))

    saved = reshard.open(tmp_path / "checkpoints" / "pipeline").nested()
    names = [f"layers.{i}.{name}" for i in range(4) for name in ("bias", "weight")]
    assert sorted(saved["model"]) == names
    assert {float(saved["optim"][f"state.{name}.step"][...]) for name in names} == {3.0}
    assert [saved["optim"][f"param_groups.layers.{i}.bias.lr"] for i in range(4)] == [0.1, 0.1, 0.01, 0.01]


@pytest.mark.gloo
def test_the_recipe_for_adapters_runs_under_fsdp2(tmp_path: Path) -> None:
    """As it stands, but for a model that is cut over the ranks."""
    [source] = [block.values[0] for block in BLOCKS if block.id == "lora:0"]
    cut = "    fully_shard(model, mesh=init_device_mesh('cpu', (2,)))\n"
    changed = (
        source.replace("    return model, ", cut + "    return model, ")
        .replace("torch.equal(a, b)", "torch.equal(a.to_local(), b.to_local())")
        .replace("import reshard\n", f"import reshard\n{IMPORTS}", 1)
    )
    assert changed.count("fully_shard(") == changed.count("to_local(), ") == 1

    gloo.run(_on_this_rank, 2, changed, str(tmp_path))


@pytest.mark.gloo
def test_the_recipe_for_deepspeed_fills_fsdp2(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "data").symlink_to(ROOT / "tests" / "data")
    [source] = [block.values[0] for block in BLOCKS if block.id == "from-deepspeed:0"]

    gloo.run(_on_this_rank, 2, source, str(tmp_path))

    assert reshard.verify(tmp_path / "ours").ok


ENGINE_CHECK = """
whole = {n: p.full_tensor() for n, p in model.named_parameters()} if rank in training else {}
whole = [{n: t.detach() for n, t in whole.items()}]
dist.broadcast_object_list(whole, src=0)
if rank in serving:
    t, rows = (rank - serving[0]) % tp, lambda *names: torch.cat([whole[0][n].chunk(tp)[t] for n in names]).bfloat16()
    for i in range(LAYERS):
        at, held = f"layers.{i}.", {n.removeprefix(f"layers.{i}."): w for n, w in weights["model"].items()}
        fused = rows(*(f"{at}attn.{p}_proj.weight" for p in "qkv"))
        assert torch.equal(held["attn.qkv_proj.weight"], fused)
        assert torch.equal(held["gate_up_proj.weight"], rows(f"{at}gate_proj.weight", f"{at}up_proj.weight"))
        assert torch.equal(held["down_proj.weight"], whole[0][f"{at}down_proj.weight"].chunk(tp, 1)[t].bfloat16())
        assert torch.equal(held["norm.weight"], whole[0][f"{at}norm.weight"].bfloat16())
"""


@pytest.mark.gloo
def test_the_recipe_for_an_engine_fills_two_replicas_of_fused_tensor_parallel_weights(tmp_path: Path) -> None:
    """What the engine holds in the end is cut out of the trainer's gathered weights by hand."""
    [source] = [block.values[0] for block in BLOCKS if block.id == "weight-sync:0"]

    gloo.run(_on_this_rank, 6, source + ENGINE_CHECK, str(tmp_path))


def test_there_is_a_block_for_each_job() -> None:
    assert len([block for block in BLOCKS if block.id.startswith("README")]) == 3
