"""The examples under accelerate and Lightning, run with the real packages where they are installed."""

from __future__ import annotations

import importlib.util
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import reshard
from reshard.errors import NormalizationError
from tests import gloo
from tests.same import same
from tests.torch_releases import FSDP2_TRAINS_ON_CPUS, requires

pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks: their warnings are not ours to mend

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str, needs: str) -> ModuleType:
    """An example as a module; skips the test where the package that it needs is not installed."""
    pytest.importorskip(needs, reason=f"{needs} is not installed")
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def state_of(model: Any, optimizer: Any) -> Any:
    return reshard.get_state_dict(model, optimizer.optimizer)


def test_a_run_under_accelerate_goes_on_as_if_never_interrupted(tmp_path: Path) -> None:
    loop = example("accelerate_loop", "accelerate")
    _, model, optimizer, _ = loop.train(tmp_path / "straight", 10)

    assert loop.train(tmp_path / "cut", 5)[0] == 0
    first, again, again_optimizer, _ = loop.train(tmp_path / "cut", 10)

    assert first == 5
    assert same(state_of(model, optimizer), state_of(again, again_optimizer))
    assert reshard.compare(tmp_path / "straight" / "step-10", tmp_path / "cut" / "step-10").ok


def on_a_rank(folder: str, steps: int) -> tuple[int, list[str], int]:
    """Train under DDP; where it began, under which names, and on how many processes."""
    loop = example("accelerate_loop", "accelerate")
    first, model, optimizer, accelerator = loop.train(Path(folder), steps)
    assert "DistributedDataParallel" in type(model).__name__
    return first, list(state_of(model, optimizer)[0]), accelerator.num_processes


@pytest.mark.gloo
def test_accelerate_resumes_on_other_numbers_of_processes(tmp_path: Path) -> None:
    loop = example("accelerate_loop", "accelerate")
    loop.train(tmp_path, 5)

    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert gloo.run(on_a_rank, 2, str(tmp_path), 10) == [(5, names, 2)] * 2
    assert loop.train(tmp_path, 15)[0] == 10


def test_what_accelerate_saved_before_is_read(tmp_path: Path) -> None:
    loop = example("accelerate_loop", "accelerate")
    _, model, optimizer, accelerator = loop.train(tmp_path / "any", 3)
    accelerator.save_state(str(tmp_path / "old"))

    accelerator.free_memory()  # as in a new job: it has prepared nothing
    fresh, fresh_optimizer, _ = loop.build(accelerator)
    loop.read_old(tmp_path / "old", accelerator, tmp_path / "converted")

    assert same(state_of(model, optimizer), state_of(fresh, fresh_optimizer))
    with pytest.raises(NormalizationError, match="param_names"):  # it cannot know, and says what it wants to be told
        reshard.open(tmp_path / "old").normalized()


def test_a_run_under_lightning_goes_on_as_if_never_interrupted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = example("lightning_plugin", "lightning")
    straight = plugin.fit(tmp_path / "straight", 3, [plugin.ReshardIO()])
    plugin.fit(tmp_path / "first", 2, [plugin.ReshardIO()])

    again = plugin.fit(tmp_path / "then", 3, [plugin.ReshardIO()], tmp_path / "first" / "last.ckpt")

    assert "becomes a folder" not in caplog.text, "Lightning chooses the names"
    assert "saved by parameter number" not in caplog.text, "and what is saved"
    reshard.save({"w": torch.ones(1)}, tmp_path / "mine.ckpt")
    assert "mine.ckpt becomes a folder" in caplog.text, "others are told as before"
    assert same(straight.state_dict(), again.state_dict())
    last = reshard.open(tmp_path / "then" / "last.ckpt")
    assert last.format == "native"
    assert last.objects["global_step"] == 24
    assert reshard.verify(last).ok
    assert len(list((tmp_path / "straight").iterdir())) == 3  # two kept, and the last: the plugin removes the others


def test_what_lightning_saved_before_is_read(tmp_path: Path) -> None:
    plugin = example("lightning_plugin", "lightning")
    straight = plugin.fit(tmp_path / "straight", 3, [])
    plugin.fit(tmp_path / "old", 2, [])  # a file of Lightning's own
    assert (tmp_path / "old" / "last.ckpt").is_file()

    again = plugin.fit(tmp_path / "new", 3, [plugin.ReshardIO()], tmp_path / "old" / "last.ckpt")

    assert same(straight.state_dict(), again.state_dict())
    theirs = reshard.open(tmp_path / "straight" / "last.ckpt").normalized(
        hints={"param_names": [name for name, _ in straight.named_parameters()], "prefix": "net."}
    )
    assert same({name: lazy[...] for name, lazy in theirs["model"].items()}, straight.net.state_dict())
    assert list(theirs["optim"]["state"]) == list(straight.net.state_dict())


def on_a_rank_of_lightning(folder: str) -> dict[str, torch.Tensor]:
    plugin = example("lightning_plugin", "lightning")
    resume = Path(folder) / "one" / "last.ckpt"
    return dict(plugin.fit(Path(folder) / "two", 2, [plugin.ReshardIO()], resume, devices=2).state_dict())


@pytest.mark.gloo
def test_lightning_resumes_on_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = example("lightning_plugin", "lightning")
    plugin.fit(tmp_path / "one", 1, [plugin.ReshardIO()])
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}.items():
        monkeypatch.setenv(name, value)  # as torchrun says it, so that Lightning starts no processes of its own

    first, second = gloo.run(on_a_rank_of_lightning, 2, str(tmp_path))

    assert same(first, second)
    assert reshard.open(tmp_path / "two" / "last.ckpt").objects["epoch"] == 1


def swap_engines(folder: str) -> list[bool]:
    """Saved under FSDP by one engine and loaded under tensor parallelism by the other: whether all values are equal."""
    program = example("one_import", "torch")
    found = []
    for first, second in (("torch", "reshard"), ("reshard", "torch")):
        place = Path(folder) / first
        saved = program.run(first, place, {"fsdp": 2}, 2)
        loaded = program.run(second, place, {"tp": 2}, 0)
        states = [gathered(reshard.get_state_dict(app.model, app.optimizer)) for app in (saved, loaded)]
        found += [loaded.step == 2, same(*states)]
    return found


def gathered(value: Any) -> Any:
    if isinstance(value, dict):  # an optimizer that was empty has its state in the order of the checkpoint
        return {key: gathered(value[key]) for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return type(value)(map(gathered, value))
    return value.full_tensor() if hasattr(value, "full_tensor") else value


@requires(FSDP2_TRAINS_ON_CPUS, "trains nothing under FSDP2 on CPUs")
@pytest.mark.gloo
def test_a_program_for_torch_s_dcp_goes_on_with_one_changed_import_and_back(tmp_path: Path) -> None:
    assert gloo.run(swap_engines, 2, str(tmp_path)) == [[True] * 4] * 2


def with_changed_import(framework: str, engine: str, jobs: list[tuple[str, str, int]]) -> list[Any]:
    """(folder, axis of two ranks, steps) each: steps done, the whole state, and which verbs of ours were called.

    Where no step is to be done, the other engine saves there, perhaps at this moment.
    """
    import reshard.dcp as ours

    called: list[str] = []

    def counted(verb: str, do: Any) -> Any:
        return lambda *args, **options: (called.append(verb), do(*args, **options))[1]

    for verb in ("save", "load"):
        setattr(ours, verb, counted(verb, getattr(ours, verb)))
    program, found = example("changed_import", "torch"), []
    for folder, axis, steps in jobs:
        while not steps and not Path(folder, "saved").exists():
            time.sleep(0.05)
        done, model, optimizer = program.run(framework, engine, Path(folder), {axis: 2}, steps)
        dist.barrier()
        Path(folder, "saved").touch()
        found.append((done, gathered(reshard.get_state_dict(model, optimizer)), sorted(set(called))))
        called.clear()
    return found


@pytest.mark.gloo
@requires(FSDP2_TRAINS_ON_CPUS, "trains nothing under FSDP2 on CPUs, as the program does")
@pytest.mark.parametrize("framework", ["torchtitan", "accelerate", "lightning"])
def test_a_framework_with_one_changed_import_goes_on_from_torch_s_saves_and_back(
    framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example("changed_import", framework)
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}.items():
        monkeypatch.setenv(name, value)  # as torchrun says it, so that Lightning starts no processes of its own
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    jobs = {"torch": [(a, "fsdp", 2), (b, "tp", 0)], "reshard": [(b, "fsdp", 2), (a, "tp", 0)]}

    with ThreadPoolExecutor() as pool:
        ends = pool.map(lambda engine: gloo.run(with_changed_import, 2, framework, engine, jobs[engine]), jobs)
        (saved_by_torch, taken_back), (saved_by_us, taken_over) = (first for first, _ in ends)

    all_four = (saved_by_torch, taken_back, saved_by_us, taken_over)
    assert [(done, called) for done, _, called in all_four] == [(2, []), (2, []), (2, ["save"]), (2, ["load"])]
    assert same(saved_by_torch[1], taken_over[1])
    assert same(saved_by_us[1], taken_back[1])


def test_examples_without_their_package_are_skipped() -> None:
    with pytest.raises(pytest.skip.Exception, match="no_such_package is not installed"):
        example("accelerate_loop", "no_such_package")
