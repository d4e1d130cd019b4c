"""Every Python block of the README, the recipes, and the reference runs unchanged, and so do their commands."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed.checkpoint as dcp
import typer

import planners
import reshard
from docs import command_output
from reshard import errors, mapping
from reshard.cli.app import app, run
from tests import gloo
from tests.torch_releases import FSDP2_TRAINS_ON_CPUS, requires

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    *(DOCS / f"{name}.md" for name in ("README", "cost-model", "elastic", "fingerprint", "incremental", "live")),
    *(DOCS / f"{name}.md" for name in ("manager", "normalization")),
    *sorted(DOCS.glob("migrate/*.md")),
    *sorted(DOCS.glob("recipes/*.md")),
]
NEEDS = {"from-dcp:0": requires("no_dist" in inspect.signature(dcp.load).parameters, "takes no `no_dist`")}
BLOCKS = [
    pytest.param(
        *(match[1], page, text[: match.start()].count("\n") + 1),
        id=f"{'docs/' * (page.parent == DOCS)}{page.stem}:{i}",
        marks=NEEDS.get(f"{page.stem}:{i}", ()),
    )
    for page in PAGES
    for text in [page.read_text(encoding="utf-8")]
    for i, match in enumerate(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
]

_NEED_CLUSTERS = ("cluster",)
"""Pages whose programs use a cluster, which tests of executors start. They are only compiled."""

MODULES = ("elastic", "errors", "mapping")
"""Modules of `reshard` with public names of their own."""
REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))
COMMANDS = [
    pytest.param(line, id=f"{page.stem}:{line[:60]}")
    for page in PAGES
    for block in re.findall(
        r"^```(?:console|text)\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    for line in re.findall(r"^\$ (reshard .*)$", block, re.MULTILINE)
]

IMPORTS = """from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch.compile uses what torch deprecates
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # torch's DCP says so in one process
@pytest.mark.parametrize(("source", "page", "line"), BLOCKS)
def test_blocks_run(source: str, page: Path, line: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracebacks show the line of the page. Samples are those of the repository."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "data").symlink_to(ROOT / "tests" / "data")
    monkeypatch.chdir(tmp_path)

    program = compile("\n" * line + source, str(page), "exec")
    if page.stem not in _NEED_CLUSTERS:
        exec(program, {"__name__": "__main__"})


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # nn.DataParallel
@pytest.mark.parametrize("page", REFERENCE, ids=lambda page: page.stem)
def test_the_examples_of_the_reference_run_as_one_program(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": "__main__"}
    for match in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        exec(compile("\n" * (text[: match.start()].count("\n") + 1) + match[1], str(page), "exec"), names)


@pytest.mark.parametrize("package", [reshard, planners])
def test_the_reference_has_every_public_name_with_an_example_that_uses_it(package: ModuleType) -> None:
    found = {}
    for page in REFERENCE:
        entries = re.split(rf"^::: {package.__name__}\.", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
        entries = [entry for entry in entries if re.split(r"[.\s]", entry)[0] not in MODULES]
        found |= {
            entry.split()[0]: "".join(re.findall(r"^```python\n(.*?)^```", entry, re.M | re.S)) for entry in entries
        }

    no_star = {"open"} if package is reshard else set()  # which a star import leaves builtin
    assert sorted(found) == sorted({*package.__all__, *no_star})
    assert [name for name, example in found.items() if not re.search(rf"\b{name}\b", example)] == []


def test_the_reference_has_every_rule_and_every_error() -> None:
    text = (ROOT / "docs" / "reference" / "mapping.md").read_text(encoding="utf-8")
    rules = [name for name, value in vars(mapping).items() if isinstance(value, type)]

    assert sorted(re.findall(r"^::: reshard\.mapping\.(\w+)$", text, re.M)) == sorted(rules)
    assert [name for name in rules if not re.search(rf"\bm\.{name}\b", text)] == []
    listed = re.findall(
        r"\w+Error", (REFERENCE[0].parent / "errors.md").read_text(encoding="utf-8").partition("members:")[2]
    )
    of_planners = planners.errors.__all__
    assert sorted(listed) == sorted({*errors.__all__} - {*of_planners})
    assert [name for name in of_planners if name.endswith("Error") and name not in errors.__all__] == []


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what the commands of the pages name."""
    folder = tmp_path_factory.mktemp("commands")
    model = {"model.embed_tokens.weight": torch.ones(16, 8), "layers.0.moe.experts.w1": torch.ones(4, 8, 8)}
    model |= {"layers.0.attention.wq.weight": torch.ones(8, 8), "layers.0.wo.weight": torch.ones(8, 8)}
    model["norm.bias"] = torch.ones(8)
    for name in (
        "CHECKPOINT",
        "BEFORE",
        "AFTER",
        "OURS",
        "THEIRS",
        "OTHER_CHECKPOINT",
        "demo-out/checkpoint",
        "run/step-1",
    ):
        reshard.save({"model": model, "step": 1}, folder / name)
    for name in ("ep4.topology", "new.topology"):
        (folder / name).write_text(str(planners.fsdp(2)))
    return folder


_OF_FRAMEWORKS = {"MEGATRON_FOLDER", "OLD_MEGATRON_FOLDER", "FSDP_CHECKPOINT", "DEEPSEEK_OR_GPT_OSS"}


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_run(line: str, stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that need a framework's model or an engine, or install something, are only parsed: their options
    exist."""
    monkeypatch.chdir(stand_ins)
    words = shlex.split(line.split(" && ")[0].replace("NAME", "model.layers.0.wo.weight"), comments=True)[1:]
    if {"--names", "--on"} & set(words) or words[0].startswith("-") or _OF_FRAMEWORKS & set(words):
        command = typer.main.get_command(app)
        with command.make_context("reshard", words[:], resilient_parsing=True) as context:
            name, sub, rest = command.resolve_command(context, words) if words[0][0] != "-" else ("", command, words)
            assert sub is not None
            sub.make_context(name, rest, parent=context, resilient_parsing=words[0][0] == "-")
        return
    if words[0] == "convert":
        words[2] = str(tmp_path / words[2])  # of several commands that name the same target
    if words[0] == "demo":
        words += ["--steps", "6"]  # `make demo` trains in full

    with pytest.raises(SystemExit) as end:
        run(words)

    assert not end.value.code


@pytest.mark.parametrize("page", command_output.PAGES, ids=lambda page: page.stem)
def test_pages_show_what_commands_print_today(page: Path) -> None:
    """Otherwise, update them: `python -m docs.command_output`."""
    text = page.read_text(encoding="utf-8")

    assert command_output.filled(text) == text
    assert command_output.filled(text.replace(" 4.5 MiB", " 5 MiB")) == text != text.replace(" 4.5 MiB", " 5 MiB")


def test_the_figures_of_the_great_plan_are_what_its_program_says() -> None:
    text = (DOCS / "recipes" / "plan.md").read_text(encoding="utf-8")
    [block] = re.findall(r"^\$ python (examples/plan_405b.py) page.html\n(.*?)^```", text, re.M | re.S)

    done = subprocess.run([sys.executable, str(ROOT / block[0])], capture_output=True, text=True, check=True)

    seconds = r"in [\d.]+ s$"
    assert re.sub(seconds, "", done.stdout, flags=re.M) == re.sub(seconds, "", block[1], flags=re.M)


def _on_this_rank(source: str, folder: str) -> object:
    """Return the step after which a recipe resumed."""
    os.chdir(folder)
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(source, "recipe", "exec"), names)
    return names.get("begin")


@requires(FSDP2_TRAINS_ON_CPUS, "trains nothing under FSDP2 on CPUs")
@pytest.mark.gloo
def test_the_recipe_for_resuming_runs_on_several_ranks(tmp_path: Path) -> None:
    [source] = [block.values[0] for block in BLOCKS if block.id == "resume:0"]

    assert gloo.run(_on_this_rank, 3, source, str(tmp_path)) == [0] * 3
    assert gloo.run(_on_this_rank, 2, source, str(tmp_path)) == [10] * 2
    assert reshard.open(tmp_path / "checkpoints" / "newest").objects["step"] == 20


@requires(FSDP2_TRAINS_ON_CPUS, "trains nothing under FSDP2 on CPUs")
@pytest.mark.gloo
def test_the_recipe_for_lost_hosts_resumes_from_memory_on_another_number_of_ranks(tmp_path: Path) -> None:
    """The first job ends after 14 steps, as if killed. Storage has step 10, and memory has step 14."""
    [source] = [block.values[0] for block in BLOCKS if block.id == "elastic:0"]
    killed = source.replace("STEPS = 30", "STEPS = 14").replace("tier.clear()", "tier")
    assert "STEPS = 14" in killed
    assert "tier.clear()" not in killed

    assert gloo.run(_on_this_rank, 2, killed, str(tmp_path)) == [0] * 2
    assert gloo.run(_on_this_rank, 1, source, str(tmp_path)) == [14]
    assert reshard.open(tmp_path / "checkpoints").objects["step"] == 30


PIPELINE_CHECK = """
again, again_optimizer = build()
for group in again_optimizer.param_groups:
    group["lr"] = 9.0
resume(again, again_optimizer)
assert [g["lr"] for g in again_optimizer.param_groups] == [g["lr"] for g in optimizer.param_groups]
for a, b in zip(stages[0].module.parameters(), again[0].module.parameters(), strict=True):
    assert torch.equal(a, b)
    assert torch.equal(optimizer.state[a]["exp_avg"], again_optimizer.state[b]["exp_avg"])
"""


@pytest.mark.gloo
def test_the_recipe_for_pipelines_runs_on_other_numbers_of_stages(tmp_path: Path) -> None:
    """Each run resumes from the previous one, with 2, 1, and 4 stages. In the end, all steps were counted."""
    [source] = [block.values[0] for block in BLOCKS if block.id == "pipeline:0"]

    for stages in (2, 1, 4):
        gloo.run(_on_this_rank, stages, source + PIPELINE_CHECK, str(tmp_path))

    saved = reshard.open(tmp_path / "checkpoints" / "pipeline").nested()
    names = [f"layers.{i}.{name}" for i in range(4) for name in ("bias", "weight")]
    assert sorted(saved["model"]) == names
    assert {float(saved["optim"][f"state.{name}.step"][...]) for name in names} == {3.0}
    assert [saved["optim"][f"param_groups.layers.{i}.bias.lr"] for i in range(4)] == [0.1, 0.1, 0.01, 0.01]


ADAPTERS_CHECK = """
assert list(model_state) == [f"{i}.lora_{x}.weight" for i in (0, 2) for x in "ab"]
for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True):
    assert torch.equal(a.to_local(), b.to_local())
"""


@requires(FSDP2_TRAINS_ON_CPUS, "trains nothing under FSDP2 on CPUs")
@pytest.mark.gloo
def test_the_recipe_for_adapters_runs_under_fsdp2(tmp_path: Path) -> None:
    """Unchanged, except that the model is sharded over the ranks."""
    [source] = [block.values[0] for block in BLOCKS if block.id == "lora:0"]
    cut = "    fully_shard(model, mesh=init_device_mesh('cpu', (2,)))\n"
    changed = source.replace("    return model, ", cut + "    return model, ")
    changed = changed.replace("import reshard\n", f"import reshard\n{IMPORTS}", 1)
    assert changed.count("fully_shard(") == 1

    gloo.run(_on_this_rank, 2, changed + ADAPTERS_CHECK, str(tmp_path))


DEEPSPEED_MODEL = """
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import reshard

saved = reshard.open(SOURCE).normalized()


def build():
    model = nn.Module()
    for name, tensor in saved["model"].items():
        path, _, last = name.rpartition(".")
        module = model
        for part in path.split(".") if path else []:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        value = torch.zeros(tensor.shape, dtype=tensor.dtype)
        if value.is_floating_point():
            module.register_parameter(last, nn.Parameter(value))
        else:
            module.register_buffer(last, value)
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
"""

DEEPSPEED_CHECK = """
assert [g["weight_decay"] for g in optimizer.param_groups] == [g["weight_decay"] for g in groups]
full = reshard.get_optimizer_state_dict(model, optimizer, options=reshard.StateDictOptions(full_state_dict=True))
assert reshard.compare({"it": full["state"]}, {"it": saved["optim"]["state"]}).ok
"""


@pytest.mark.gloo
def test_the_recipe_for_deepspeed_fills_fsdp2_from_a_checkpoint_of_zero_3(tmp_path: Path) -> None:
    """Unchanged, except for the model and the checkpoint."""
    [source] = [block.values[0] for block in BLOCKS if block.id == "from-deepspeed:0"]
    recipe = source.partition("# convert once")[2].replace('"deepspeed"', "SOURCE")
    assert recipe.count("SOURCE") == recipe.count("build()") == 1

    path = f"SOURCE = {str(ROOT / 'tests' / 'data' / 'ds_z3_w2' / 'ckpt')!r}"
    gloo.run(_on_this_rank, 2, f"{path}\n{DEEPSPEED_MODEL}\n#{recipe}{DEEPSPEED_CHECK}", str(tmp_path))

    assert reshard.verify(tmp_path / "converted").ok


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


@requires(FSDP2_TRAINS_ON_CPUS, "trains nothing under FSDP2 on CPUs")
@pytest.mark.gloo
def test_the_example_for_an_engine_fills_two_replicas_of_fused_tensor_parallel_weights(tmp_path: Path) -> None:
    """The engine's tensors are compared with slices of the trainer's gathered weights."""
    source = (ROOT / "examples" / "weight_sync.py").read_text(encoding="utf-8")

    exec(compile(source, "weight_sync.py", "exec"), {"__name__": "__main__"})
    gloo.run(_on_this_rank, 6, source + ENGINE_CHECK, str(tmp_path))


def test_the_readme_has_programs_for_the_first_checkpoint_for_ranks_and_for_a_job() -> None:
    assert len([block for block in BLOCKS if block.values[1] == ROOT / "README.md"]) == 3


def _as_torchrun_starts_it(source: str, folder: str) -> object:
    os.environ.update(TORCHELASTIC_RUN_ID="readme", TORCHELASTIC_USE_AGENT_STORE="True")
    return _on_this_rank(source, folder)


@pytest.mark.gloo
def test_the_readme_s_program_for_ranks_runs_under_torchrun(tmp_path: Path) -> None:
    [source] = [block.values[0] for block in BLOCKS if block.id == "README:1"]

    gloo.run(_as_torchrun_starts_it, 2, source, str(tmp_path), init=False)

    weight = reshard.open(tmp_path / "training").layout["model.weight"]
    assert [str(one) for one in weight.placements] == ["S(0)"]
    assert reshard.verify(tmp_path / "training").ok
