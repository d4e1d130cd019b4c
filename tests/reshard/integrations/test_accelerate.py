"""What an Accelerator prepared, saved by one process, gone on with by two under FSDP2, and by one again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import reshard
from reshard.errors import KeyMismatchError, ReshardError
from tests import gloo
from tests.same import same
from tests.torch_releases import FSDP2_TRAINS_ON_CPUS, requires

pytest.importorskip("accelerate", reason="accelerate is not installed")

pytestmark = [pytest.mark.gloo, pytest.mark.filterwarnings("ignore")]  # of the framework: not ours to mend


def prepared(*, sharded: bool = False) -> Any:
    from accelerate import Accelerator

    # else a step on two processes is two of the schedule
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    if sharded:  # accelerate itself shards nothing on CPUs
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)
    accelerator.prepare_model(model, evaluation_mode=sharded)  # which leaves the model as it is
    accelerator.prepare(optimizer, schedule)
    return accelerator


def train(accelerator: Any, first: int, last: int) -> None:
    (model,), (optimizer,), (schedule,) = accelerator._models, accelerator._optimizers, accelerator._schedulers
    for step in range(first, last):
        batch = torch.sin(torch.arange(32.0).reshape(4, 8) * (step + 1))
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def go_on(folder: str) -> tuple[int, list[str]]:
    from reshard.integrations.accelerate import state_of

    accelerator = prepared(sharded=True)
    with reshard.CheckpointManager(folder, every=reshard.Every(steps=4)) as manager:
        state = state_of(accelerator, {"step": -1})
        manager.restore(state)
        first = state["extra"]["step"]
        train(accelerator, first, 4)
        manager.save(4, state_of(accelerator, {"step": 4, "more": torch.ones(2)}))
    return first, [type(parameter).__name__ for parameter in accelerator._models[0].parameters()]


@requires(FSDP2_TRAINS_ON_CPUS, "trains nothing under FSDP2 on CPUs")
def test_a_run_goes_on_on_other_numbers_of_processes(tmp_path: Path) -> None:
    from reshard.integrations.accelerate import load_state, save_state

    straight = prepared()
    train(straight, 0, 4)
    cut = prepared()
    train(cut, 0, 2)
    save_state(cut, tmp_path / "run" / "step-2", {"step": 2})

    assert gloo.run(go_on, 2, str(tmp_path / "run")) == [(2, ["DTensor"] * 4)] * 2

    again = prepared()
    assert same(load_state(again, tmp_path / "run"), {"step": 4, "more": torch.ones(2)})
    states = [reshard.get_state_dict(of._models[0], of._optimizers[0].optimizer) for of in (straight, again)]
    assert same(*states)
    assert same(*(of._schedulers[0].state_dict() for of in (straight, again)))


def scheduled(folder: str, kind: str, steps: int) -> int:
    """Two more steps with a schedule of some kind; how often the schedule has advanced then."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from reshard.integrations.accelerate import load_state, save_state

    loaders = DataLoaderConfiguration(split_batches=kind == "split_batches")
    of_its_own = kind == "step_scheduler_with_optimizer=False"
    accelerator = Accelerator(cpu=True, dataloader_config=loaders, step_scheduler_with_optimizer=not of_its_own)
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    if kind == "registered":
        accelerator.register_for_checkpointing(schedule)
    else:
        schedule = accelerator.prepare(schedule)
    if steps:
        assert load_state(accelerator, folder)["step"] == steps
    for _ in range(2):
        accelerator.backward(wrapped(torch.ones(4, 8)).square().mean())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    save_state(accelerator, Path(folder) / f"step-{steps + 2}", {"step": steps + 2})
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.1 ** (schedule.state_dict()["last_epoch"] // 3))
    return int(schedule.state_dict()["last_epoch"])


def test_what_a_schedule_counts_on_other_numbers_of_processes(tmp_path: Path) -> None:
    """A prepared one counts processes, as accelerate means it to; with the ways round that the page names, steps."""
    ways = "step_scheduler_with_optimizer=False", "split_batches", "registered"
    for kind, counts in {"prepared": (2, 6, 8), **dict.fromkeys(ways, (2, 4, 6))}.items():
        folder = str(tmp_path / kind)
        found = [gloo.run(scheduled, n, folder, kind, steps) for n, steps in ((1, 0), (2, 2), (1, 4))]
        assert found == [[count] * n for count, n in zip(counts, (1, 2, 1))], kind


def test_a_scheduler_of_another_class_is_refused(tmp_path: Path) -> None:
    from reshard.integrations.accelerate import load_state, save_state

    save_state(prepared(), tmp_path)
    other = prepared()
    other._schedulers[0].scheduler = torch.optim.lr_scheduler.ExponentialLR(other._optimizers[0].optimizer, 0.5)
    torch.nn.init.zeros_(other._models[0][0].weight)

    with pytest.raises(KeyMismatchError, match=r"schedules\.0: the saved settings have other names"):
        load_state(other, tmp_path)
    assert not other._models[0][0].weight.any()


def running(folder: str, broadcast: bool) -> list[Any]:
    """A step of a model with batch norm, saved and loaded again: what this rank's first buffer was, is, and was saved
    as."""
    from accelerate import Accelerator, DistributedDataParallelKwargs

    from reshard.integrations.accelerate import load_state, save_state

    made = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=broadcast)])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    wrapped, optimizer = made.prepare(model, torch.optim.AdamW(model.parameters()))
    made.backward(wrapped(torch.arange(32.0).reshape(4, 8) * (1 + made.process_index)).square().sum())
    optimizer.step()
    before = model[1].running_mean.clone()
    save_state(made, folder, {"step": 1})
    with torch.no_grad():
        model[1].running_mean.zero_()
    assert load_state(made, folder) == {"step": 1}
    return [before, model[1].running_mean.clone(), reshard.open(folder)["model.1.running_mean"][:]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_buffers_are_those_of_the_first_rank_under_ddp(ranks: int, tmp_path: Path) -> None:
    """accelerate keeps the model without its wrapper."""
    found = gloo.run(running, ranks, str(tmp_path / "c"), True)
    assert len({before.sum().item() for before, _, _ in found}) == ranks
    for _, after, saved in found:
        assert same(after, found[0][0])
        assert same(saved, found[0][0])


def test_buffers_that_ddp_leaves_to_each_rank_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"values differ between ranks under the same key: .*'model\.1\.running_mean'"):
        gloo.run(running, 2, str(tmp_path / "c"), False)


def test_two_models_are_refused(tmp_path: Path) -> None:
    from reshard.integrations.accelerate import save_state

    accelerator = prepared()
    accelerator.prepare(nn.Linear(1, 1))

    with pytest.raises(ReshardError, match="prepared 2 models"):
        save_state(accelerator, tmp_path)


def test_extra_values_are_read_however_deep_they_are(tmp_path: Path) -> None:
    from reshard.integrations.accelerate import load_state, save_state

    accelerator = prepared()
    extra = {"a": {"b": torch.ones(2), "c": [torch.zeros(1), 3]}}
    save_state(accelerator, tmp_path, extra)
    assert same(load_state(accelerator, tmp_path), extra)


def test_a_checkpoint_without_extra_is_loaded_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from reshard.integrations.accelerate import load_state, save_state

    accelerator = prepared()
    for extra in (None, {}, {"step": 3}):
        save_state(accelerator, tmp_path, extra)
        assert load_state(accelerator, tmp_path) == (extra or {})
    assert caplog.messages == []


def test_first_mistakes_are_told_what_to_write(tmp_path: Path) -> None:
    from accelerate import Accelerator

    from reshard.integrations.accelerate import load_state, save_state

    accelerator = prepared()
    for call in (save_state, load_state):
        with pytest.raises(ReshardError, match=r"^the accelerator is the first argument, got '.*run'$"):
            call(str(tmp_path / "run"), accelerator)
        with pytest.raises(ReshardError, match=r"0 models.*: call prepare\(model, optimizer\) first"):
            call(Accelerator(cpu=True), tmp_path / "run")
    accelerator.save_state(str(tmp_path / "old"))
    words = "was written by Accelerate: convert it once, see docs/migrate/from-accelerate.md$"
    with pytest.raises(ReshardError, match=words):
        load_state(accelerator, tmp_path / "old")
