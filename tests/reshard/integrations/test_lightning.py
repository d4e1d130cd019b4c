"""Lightning's strategy for sharded models with our checkpoints: saved on two ranks, resumed in another layout."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import reshard
from reshard.errors import KeyMismatchError, NormalizationError, OptionError
from tests import gloo
from tests.same import same
from tests.torch_releases import FSDP2_TRAINS_ON_CPUS, requires

pytest.importorskip("lightning", reason="lightning is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")  # of the framework: not ours to mend


def fit(
    folder: Path,
    steps: int,
    ckpt_path: Path | None,
    *,
    tensor_parallel: int = 0,
    ours: bool = True,
    managed: bool = False,
    plugins: Any = None,
    ranks: int = 2,
) -> dict[str, Any]:
    """Train to so many steps, saving at the end, or by a manager; what all of it is then."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.utils.data import DataLoader

    from reshard.integrations.lightning import ReshardCheckpoint, ReshardModelParallel

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))

        def configure_model(self) -> None:
            if tensor_parallel > 1:
                plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
                parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)
            elif tensor_parallel:
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    strategy: Any = "ddp" if ranks > 1 else "auto"
    if tensor_parallel:
        strategy = (ReshardModelParallel if ours else ModelParallelStrategy)(
            data_parallel_size=2 // tensor_parallel, tensor_parallel_size=tensor_parallel
        )
    trainer = Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, max_steps=steps, logger=False,
        enable_checkpointing=managed, plugins=plugins,
        callbacks=[ReshardCheckpoint(folder, every=reshard.Every(steps=1))] if managed else [],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Net()
    trainer.fit(module, DataLoader(torch.sin(torch.arange(256.0)).reshape(32, 8), batch_size=4), ckpt_path=ckpt_path)
    if not managed:
        trainer.save_checkpoint(folder / f"step={trainer.global_step}.ckpt")
    model, optim = reshard.get_state_dict(module, *trainer.optimizers)
    return {"step": trainer.global_step, "model": gathered(model), "optim": gathered(optim)}


def gathered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: gathered(item) for key, item in value.items()}
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def swap(text: str) -> tuple[list[bool], dict[str, Any]]:
    from reshard.integrations.lightning import ReshardIO

    folder = Path(text)
    saved = fit(folder / "ours", 2, None, tensor_parallel=1)
    resumed = fit(
        folder / "again", 2, folder / "ours", tensor_parallel=2
    )  # the newest of a run, and nothing is left to do
    fit(folder / "theirs", 2, None, tensor_parallel=1, ours=False)
    taken_over = fit(folder / "later", 2, folder / "theirs" / "step=2.ckpt", tensor_parallel=2)
    whole = fit(folder / "whole", 2, None, plugins=[ReshardIO()])
    moved = fit(folder / "moved", 2, folder / "whole", tensor_parallel=2)
    fit(folder / "managed", 2, None, tensor_parallel=1, ours=False, managed=True)
    found = [same(saved, fit(folder / "managed", 2, None, tensor_parallel=n, managed=True)) for n in (2, 0)]
    flags = [saved["step"] == 2, same(saved, resumed), same(saved, taken_over), same(whole, moved), *found]
    return flags, {"ours": saved, "whole": whole}


@pytest.mark.gloo
@requires(FSDP2_TRAINS_ON_CPUS, "trains nothing under FSDP2 on CPUs")
def test_sharded_training_resumes_in_another_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}.items():
        monkeypatch.setenv(name, value)  # as torchrun says it, so that Lightning starts no processes of its own

    (flags, wanted), (others, _) = gloo.run(swap, 2, str(tmp_path))
    assert [flags, others] == [[True] * 6] * 2

    alone = fit(tmp_path / "managed", 3, None, managed=True, ranks=1)
    assert alone["step"] == 3  # one more
    assert reshard.open(tmp_path / "managed").url.endswith("step-3")

    for name, trained in wanted.items():  # for a Lightning without us
        file = tmp_path / "file" / f"{name}.ckpt"
        reshard.convert(tmp_path / name, file, format="torch")
        assert same(fit(tmp_path / "again", 2, file, ranks=1), trained)  # nothing is left to do
        assert fit(tmp_path / "again", 3, file, ranks=1)["step"] == 3

    saved = reshard.open(tmp_path / "ours")
    assert saved.format == "native"
    assert saved.objects["global_step"] == 2


class Batches:
    """Shuffled batches, in an order of each epoch, which go on where they were."""

    def __init__(self) -> None:
        self.epoch = self.taken = 0

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self.taken == len(self):
            self.epoch, self.taken = self.epoch + 1, 0
        order = torch.randperm(24, generator=torch.Generator().manual_seed(self.epoch)).reshape(6, 4)
        while self.taken < len(self):
            self.taken += 1
            yield torch.sin(order[self.taken - 1][:, None] + torch.arange(8.0))

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.taken = state["epoch"], state["taken"]


class Killed(Exception):
    """Stands for the end of a job."""


def die() -> None:
    raise Killed


def train(
    root: Path | None,
    *,
    at: int = -1,
    do: Callable[[], object] = die,
    accumulate: int = 1,
    ckpt: Path | None = None,
    epochs: int = 3,
    steps: int = -1,
    stop: int = -1,
    schedule: Any = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5),
    **options: Any,
) -> tuple[dict[int, float], Any]:
    """Three epochs, where something happens at a batch: the losses by number of batch, and the manager."""
    from lightning.pytorch import LightningModule, Trainer

    from reshard.integrations.lightning import ReshardCheckpoint

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(), nn.Linear(16, 2))
            self.losses: dict[int, Any] = {}
            self.seen = torch.zeros(())
            self.batches = 0

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            if self.batches == at:
                do()
            self.trainer.should_stop = self.batches == stop
            self.losses[self.batches] = loss = self.net(batch).square().mean()
            self.batches += 1
            self.log("loss", loss)
            return loss

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["batches"] = self.batches

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.batches = checkpoint["batches"]

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule(optimizer), "interval": "step"}}

    options.setdefault("every", reshard.Every(steps=2))
    callback = None if root is None else ReshardCheckpoint(root, **options)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, max_steps=steps, accumulate_grad_batches=accumulate,
        logger=False, callbacks=[] if callback is None else [callback], enable_checkpointing=callback is not None,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    net = Net()
    try:
        trainer.fit(net, Batches(), ckpt_path=ckpt if ckpt and ckpt.exists() else None)
        if ckpt:
            trainer.save_checkpoint(ckpt)
    except (Killed, SystemExit):  # Lightning exits after SIGTERM
        assert at >= 0
    return {number: loss.item() for number, loss in net.losses.items()}, callback and callback.manager


@pytest.mark.parametrize(("dies_at", "accumulate"), [(4, 1), (9, 2), (12, 1), (15, 2)])
def test_a_run_that_dies_within_an_epoch_goes_on_bit_for_bit(tmp_path: Path, dies_at: int, accumulate: int) -> None:
    straight, _ = train(None, accumulate=accumulate)
    caught = signal.getsignal(signal.SIGTERM)
    first, _ = train(tmp_path, at=dies_at, accumulate=accumulate)
    assert signal.getsignal(signal.SIGTERM) == caught

    then, manager = train(tmp_path, accumulate=accumulate)

    assert sorted(straight) == list(range(18))
    assert len(first) == dies_at
    assert min(then) == dies_at // (2 * accumulate) * 2 * accumulate
    assert {**first, **then} == straight
    assert manager.latest_step() == 18 // accumulate
    assert all(reshard.verify(tmp_path / f"step-{step}").ok for step in manager.all_steps())


@pytest.mark.parametrize("by_signal", [True, False])
def test_a_run_that_is_preempted_saves_and_ends(tmp_path: Path, by_signal: bool) -> None:
    straight, _ = train(None)
    notice = tmp_path / "notice"
    do = (lambda: signal.raise_signal(signal.SIGTERM)) if by_signal else notice.touch
    options: dict[str, Any] = {"every": reshard.Every(steps=100), "preemption": reshard.Preemption(file=notice)}
    first, manager = train(tmp_path / "run", at=8, do=do, **options)
    assert sorted(first) == list(range(9))
    assert manager.all_steps() == [9]
    notice.unlink(missing_ok=True)

    then, _ = train(tmp_path / "run", **options)

    assert {**first, **then} == straight
    assert not first.keys() & then.keys()


@pytest.mark.parametrize("options", [{}, {"every": 500}, {"evry": reshard.Every(steps=1)}])
def test_a_callback_without_a_schedule_is_refused_at_once(options: Any, tmp_path: Path) -> None:
    from reshard.integrations.lightning import ReshardCheckpoint

    with pytest.raises(OptionError, match=r"ReshardCheckpoint: every must be reshard.Every\(steps=..."):
        ReshardCheckpoint(tmp_path, **options)


def test_the_best_steps_stay(tmp_path: Path) -> None:
    keep = reshard.Keep(last=1, best=1, metric="loss", mode="min")

    losses, manager = train(tmp_path / "run", every=reshard.Every(steps=1), keep=keep)

    best = min(losses, key=lambda number: losses[number]) + 1
    assert manager.all_steps() == sorted({best, 18})
    assert manager.best_step() == best


def test_the_last_step_is_saved_once_and_training_goes_on_from_it(tmp_path: Path) -> None:
    straight, _ = train(None)
    every = reshard.Every(steps=4)
    first, manager = train(tmp_path / "run", epochs=1, every=every)
    assert manager.all_steps() == [4, 6]
    saved = (tmp_path / "run" / "step-6" / "manifest.json").read_bytes()

    none, manager = train(tmp_path / "run", epochs=1, every=every)  # nothing is left to do
    assert (none, manager.all_steps()) == ({}, [4, 6])
    second, manager = train(tmp_path / "run", epochs=2, every=every)
    assert manager.all_steps() == [4, 6, 8, 12], "the last one was due"
    died, manager = train(tmp_path / "run", at=14, every=every)
    assert manager.all_steps() == [4, 6, 8, 12]
    third, manager = train(tmp_path / "run", every=every, save_last=False)
    assert manager.all_steps() == [4, 6, 8, 12, 16]

    assert {**first, **second, **died, **third} == straight
    assert [len(losses) for losses in (first, second, died, third)] == [6, 6, 2, 6]
    assert (tmp_path / "run" / "step-6" / "manifest.json").read_bytes() == saved


@pytest.mark.parametrize("end", [4, 6, 8])
@pytest.mark.parametrize("by", ["steps", "stop"])
def test_a_run_that_ends_within_an_epoch_goes_on_within_it(tmp_path: Path, by: str, end: int) -> None:
    straight, _ = train(None)
    every = reshard.Every(steps=100)
    first, manager = train(tmp_path, every=every, **{by: end if by == "steps" else end - 1})
    assert manager.all_steps() == [end]

    then, manager = train(tmp_path, every=every, steps=18 if by == "steps" else -1)

    assert manager.all_steps() == [end, 18]
    assert {**first, **then} == straight
    assert not first.keys() & then.keys()


def test_a_callback_is_used_again_for_a_fast_run(tmp_path: Path) -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    from reshard.integrations.lightning import ReshardCheckpoint

    callback = ReshardCheckpoint(tmp_path / "run", every=reshard.Every(steps=1))
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    made = partial(Trainer, accelerator="cpu", devices=1, callbacks=[callback], **quiet)
    made(max_steps=2).fit(BoringModel())
    assert callback.manager is not None

    made(fast_dev_run=True).fit(BoringModel())
    assert callback.manager is None
    assert [step.step for step in reshard.steps(tmp_path / "run")][-1] == 2


def test_a_second_place_to_resume_from_is_refused(tmp_path: Path) -> None:
    train(None, ckpt=tmp_path / "file", epochs=1)
    losses, _ = train(tmp_path / "run", ckpt=tmp_path / "file", at=8)  # as long as the root has nothing
    assert sorted(losses) == [6, 7]

    with pytest.raises(reshard.ReshardError, match=r"the root already has .*step-8: leave ckpt_path out"):
        train(tmp_path / "run", ckpt=tmp_path / "file")


def test_a_scheduler_of_another_class_is_refused(tmp_path: Path) -> None:
    train(tmp_path, at=4)

    with pytest.raises(
        KeyMismatchError,
        match=r"schedulers\.0.*the saved settings have other names",
    ):
        train(tmp_path, schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9))


def test_other_param_groups_are_refused_before_the_model_is_overwritten(tmp_path: Path) -> None:
    from reshard.integrations.lightning import ReshardModelParallel

    def groups(model: nn.Linear, *split: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW([{"params": its, "lr": 0.1 / (1 + i)} for i, its in enumerate(split)])
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return optimizer

    before, model = nn.Linear(3, 4), nn.Linear(3, 4)
    state, optim = reshard.get_state_dict(before, groups(before, [before.weight], [before.bias]))
    reshard.save({"state_dict": state, "optimizer_states": [optim]}, tmp_path / "c")
    strategy: Any = SimpleNamespace(
        model=model, lr_scheduler_configs=[], optimizers=[groups(model, [model.weight, model.bias], [])]
    )
    unchanged = model.weight.clone()
    with pytest.raises(NormalizationError, match="in one group of optimizer 0, but were saved with different"):
        ReshardModelParallel._fill(strategy, reshard.open(tmp_path / "c"), strict=True)
    assert same(model.weight, unchanged)


def _rates(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(group["params"][0])]: group["lr"] for group in optimizer.param_groups}


def _halved(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda epoch: 0.5**epoch] * 2)


def test_rates_of_the_callback_follow_groups_that_come_in_another_order(tmp_path: Path) -> None:
    """A scheduler has them by position, and groups are found by their parameters."""
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader

    from reshard.integrations.lightning import ReshardCheckpoint

    class Net(LightningModule):
        def __init__(self, order: str) -> None:
            super().__init__()
            self.net, self.order = nn.Linear(3, 4), order

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            rates = {"weight": 0.1, "bias": 0.8}
            groups = [{"params": [getattr(self.net, name)], "lr": rates[name]} for name in self.order.split()]
            optimizer = torch.optim.SGD(groups)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": _halved(optimizer), "interval": "step"}}

    def trained(order: str, steps: int) -> dict[str, float]:
        callback = ReshardCheckpoint(tmp_path, every=reshard.Every(steps=1))
        quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = Trainer(accelerator="cpu", devices=1, max_steps=steps, callbacks=[callback], **quiet)
        net = Net(order)
        trainer.fit(net, DataLoader(torch.ones(8, 3)))
        return _rates(net.net, trainer.optimizers[0])

    assert trained("weight bias", 1) == pytest.approx({"weight": 0.05, "bias": 0.4})
    assert trained("bias weight", 2) == pytest.approx({"weight": 0.025, "bias": 0.2})


def test_rates_of_the_strategy_follow_groups_that_come_in_another_order(tmp_path: Path) -> None:
    from reshard.integrations.lightning import ReshardModelParallel

    def run(order: str) -> tuple[nn.Linear, torch.optim.Optimizer, Any]:
        model, rates = nn.Linear(3, 4), {"weight": 0.1, "bias": 0.8}
        groups = [{"params": [getattr(model, name)], "lr": rates[name]} for name in order.split()]
        optimizer = torch.optim.SGD(groups, momentum=0.9)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return model, optimizer, _halved(optimizer)

    model, optimizer, schedule = run("weight bias")
    schedule.step()
    state, optim = reshard.get_state_dict(model, optimizer)
    saved = {"state_dict": state, "optimizer_states": [optim], "lr_schedulers": [schedule.state_dict()]}
    reshard.save(saved, tmp_path / "c")
    model, optimizer, schedule = run("bias weight")
    strategy: Any = SimpleNamespace(
        model=model, lr_scheduler_configs=[SimpleNamespace(scheduler=schedule)], optimizers=[optimizer]
    )
    rest = ReshardModelParallel._fill(strategy, reshard.open(tmp_path / "c"), strict=True)
    schedule.load_state_dict(rest["lr_schedulers"][0])  # as Lightning does
    schedule.step()
    assert _rates(model, optimizer) == pytest.approx({"weight": 0.025, "bias": 0.2})


def test_checkpoints_at_links_and_urls_are_removed(tmp_path: Path) -> None:
    from reshard.integrations.lightning import ReshardIO

    io, link = ReshardIO(), tmp_path / "last.ckpt"
    for path in (tmp_path / "step", "memory://lightning/step-1", "memory://lightning/step-2"):
        io.save_checkpoint({"w": torch.ones(1)}, path)
    link.symlink_to(tmp_path / "step", target_is_directory=True)
    io.remove_checkpoint(link)
    assert [path.name for path in tmp_path.iterdir()] == ["step"]
    io.remove_checkpoint(str(tmp_path / "step"))
    assert not list(tmp_path.iterdir())
    io.remove_checkpoint("memory://lightning/step-1")
    assert [step.step for step in reshard.steps("memory://lightning")] == [2]


@pytest.mark.parametrize("compiled", [False, True])
def test_what_fabric_set_up_has_the_names_of_the_bare_model(compiled: bool, tmp_path: Path) -> None:
    """Fabric's wrapper gives its state dict without its own segment, and has its model under two names."""
    from lightning.fabric import Fabric

    def built() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        return model, torch.optim.AdamW(model.parameters())

    fabric = Fabric(accelerator="cpu", devices=1)
    bare, optimizer = built()
    whole = torch.compile(bare, backend="eager") if compiled else bare
    wrapped, wrapped_optimizer = fabric.setup(whole, optimizer)
    fabric.backward(wrapped(torch.randn(5, 3)).square().mean())
    wrapped_optimizer.step()

    reshard.save({"model": wrapped, "optim": wrapped_optimizer}, tmp_path / "wrapped")
    reshard.save({"model": bare, "optim": optimizer}, tmp_path / "bare")
    assert reshard.compare(tmp_path / "wrapped", tmp_path / "bare").ok

    fresh, fresh_optimizer = fabric.setup(*built())
    assert reshard.load({"model": fresh, "optim": fresh_optimizer}, tmp_path / "bare").ok
    assert same(reshard.get_state_dict(fresh, fresh_optimizer), reshard.get_state_dict(bare, optimizer))
