"""torchtitan's checkpoint manager and ours, each resuming from what the other saved, in another layout."""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import reshard
from reshard.mapping.families import ready
from tests import gloo
from tests.same import same

pytest.importorskip(
    "torchtitan.components.checkpoint",
    reason="torchtitan is not installed, or not for this torch",
    exc_type=ImportError,
)

pytestmark = [pytest.mark.gloo, pytest.mark.filterwarnings("ignore")]  # of the framework: not ours to mend


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class TrainState:
    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


class Data:
    """As torchtitan's loader: a key for each data parallel rank, and bytes."""

    batch = 0

    def state_dict(self) -> dict[str, Any]:
        return {f"dp_rank_{dist.get_rank()}": pickle.dumps([self.batch, dist.get_rank()]), "world_size": 2}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["world_size"] == 2
        self.batch, rank = pickle.loads(state[f"dp_rank_{dist.get_rank()}"])
        assert rank == dist.get_rank()


class Job:
    """What torchtitan's trainer is made of, as far as it is saved: its own manager, optimizers and schedules."""

    def __init__(self, kind: str, seed: int, manager: Any, folder: str, **options: Any) -> None:
        torch.manual_seed(seed)
        model = Net()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(kind,))
        if kind == "fsdp":
            fully_shard(model, mesh=mesh)
        else:
            parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        options = {"interval": 1, "last_save_model_only": False, "keep_latest_k": 0, **options}
        config = manager.Config(enable=True, **options)
        self._build(model, config, folder, None)

    def _build(self, model: nn.Module, config: Any, folder: str, adapter: Any) -> None:
        from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

        adamw = default_adamw()
        adamw.implementation = "for-loop"
        self.model, self.optimizers = model, adamw.build(model_parts=[model])
        self.schedules = LRSchedulersContainer.Config(warmup_steps=2).build(
            optimizers=self.optimizers, training_steps=10
        )
        self.state, self.data = TrainState(), Data()
        self.manager = config.build(
            dataloader=self.data,
            model_parts=[model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedules,
            states={"train_state": self.state},
            sd_adapter=adapter,
            base_folder=folder,
        )

    def train(self) -> None:
        self.model(torch.ones(4, 6)).square().sum().backward()
        self.optimizers.step()
        self.optimizers.zero_grad()
        self.schedules.step()
        self.state.step += 1
        self.data.batch += 1

    def whole(self) -> dict[str, Any]:
        state = {
            "model": self.model.state_dict(),
            "optim": self.optimizers.state_dict(),
            "schedules": self.schedules.state_dict(),
        }
        return {**gathered(state), "step": self.state.step, "batch": self.data.batch}


def gathered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: gathered(item) for key, item in value.items()}
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.clone() if isinstance(value, torch.Tensor) else value


def swap(folder: str) -> list[tuple[str, bool, bool]]:
    """For each pair of managers: whether all came back, and that there was something to bring back."""
    from torchtitan.components.checkpoint import CheckpointManager as Theirs

    from reshard.integrations.torchtitan import CheckpointManager as Ours

    found = []
    for name, saver, loader, mode in (
        ("ours, then torchtitan's", Ours, Theirs, "disabled"),
        ("torchtitan's, then ours", Theirs, Ours, "disabled"),
        ("ours in the background", Ours, Ours, "async"),
    ):
        first = Job("fsdp", 0, saver, f"{folder}/{name}", async_mode=mode)
        first.train()
        first.manager.save(1)
        first.manager.maybe_wait_for_saving()
        second = Job("tp", 1, loader, f"{folder}/{name}")
        before = second.whole()
        second.manager.load()
        dist.barrier()
        found.append((name, same(first.whole(), second.whole()), same(before, second.whole())))
    if dist.get_rank() == 0:
        reshard.convert(
            f"{folder}/{name}/checkpoint/step-1", f"{folder}/x/checkpoint/step-9", format="native", alone=True
        )
    dist.barrier()
    third = Job("tp", 2, Ours, f"{folder}/x")
    before = third.whole()
    third.manager.load()
    found.append(("converted", same(first.whole(), third.whole()), same(before, third.whole())))
    return found


def test_either_manager_resumes_from_the_other_s_save(tmp_path: Path) -> None:
    names = ["ours, then torchtitan's", "torchtitan's, then ours", "ours in the background", "converted"]
    assert gloo.run(swap, 2, str(tmp_path)) == [[(name, True, False) for name in names]] * 2

    run = reshard.open(tmp_path / names[0])
    assert run.url.endswith("checkpoint/step-1")
    assert run.format == "dcp"


def steps_in(folder: str) -> list[str]:
    dist.barrier()
    return sorted(path.name for path in Path(folder, "checkpoint").glob("step-*"))


def run_by_a_manager(folder: str) -> dict[str, Any]:
    """A run that torchtitan's manager begins and ours goes on with, by torchtitan's options."""
    from torchtitan.components.checkpoint import CheckpointManager as Theirs

    from reshard.integrations.torchtitan import ReshardManager

    found: dict[str, Any] = {}
    old = Job("fsdp", 0, Theirs, folder)
    old.train()
    old.manager.save(1)
    old.train()
    old.manager.save(2)
    job = Job("tp", 1, ReshardManager, folder)
    try:
        job.manager.load(1)
    except reshard.errors.CheckpointError as error:
        found["refused"] = str(error)
    job.manager.close()

    options: dict[str, Any] = {"interval": 2, "keep_latest_k": 2, "async_mode": "async"}
    fresh = Job("tp", 1, ReshardManager, f"{folder}/fresh", **options, enable_first_step_checkpoint=True)
    found["fresh"] = fresh.manager.load(), fresh.manager.save(1)
    fresh.manager.close()
    nothing = Job("tp", 1, ReshardManager, f"{folder}/nothing", load_only=True)
    came, without = nothing.manager.load(), Job("tp", 1, Theirs, f"{folder}/without")
    nothing.train()
    without.train()
    found["nothing"] = came, same(nothing.whole(), without.whole())
    job = Job("tp", 1, ReshardManager, folder, **options)
    found["began"] = job.manager.load(), same(old.whole(), job.whole())
    states = {}
    found["saved"] = []
    while job.state.step < 8:
        job.train()
        found["saved"].append(job.manager.save(job.state.step))
        states[job.state.step] = job.whole()
    job.manager.maybe_wait_for_saving()
    found["kept"] = steps_in(folder)
    job.manager.close()

    again = Job("fsdp", 2, ReshardManager, folder, exclude_from_loading=["dataloader"], load_only=True)
    found["read only"] = again.manager.load(), again.manager.save(10), same({**states[8], "batch": 0}, again.whole())
    again.manager.close()

    back = Job("fsdp", 3, ReshardManager, folder, **options)
    found["went back"] = back.manager.load(6), same(states[6], back.whole())
    back.manager.close()
    back = Job("tp", 3, ReshardManager, folder, **options)
    found["stayed back"] = back.manager.load(), same(states[6], back.whole())
    back.train()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    try:
        back.manager.save(7)
    except SystemExit as end:
        found["ended"] = str(end)
    found["kept then"] = steps_in(folder)

    last = Job("fsdp", 4, ReshardManager, folder, last_save_model_only=True, export_dtype="bfloat16", keep_latest_k=2)
    last.manager.load()
    found["went on"] = same(back.whole(), last.whole())
    last.manager.save(8, last_step=True)
    last.manager.close()
    return found


def test_a_manager_of_ours_does_what_torchtitan_s_options_say(tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    assert (
        gloo.run(run_by_a_manager, 2, str(tmp_path))
        == [
            {
                "fresh": (False, True),
                "nothing": (False, True),
                "began": (True, True),
                "refused": f"load_step=1: {root}/step-2 is newer and of another format. The run cannot save there: "
                "move it away, or choose another checkpoint.folder",
                "saved": [False, True, False, True, False, True],
                "kept": ["step-1", "step-2", "step-6", "step-8"],
                "read only": (True, False, True),
                "went back": (True, True),
                "stayed back": (True, True),
                "ended": f"step 7 is saved in {root}; SIGTERM asked the job to end",
                "kept then": ["step-1", "step-2", "step-6", "step-7"],
                "went on": True,
            }
        ]
        * 2
    )

    final = reshard.open(root / "step-8")
    assert sorted(final) == ["down.bias", "down.weight", "up.bias", "up.weight"]
    assert final["up.weight"].dtype == torch.bfloat16


class Weights(nn.Module):
    """A model of torchtitan's names, of which nothing but its weights counts; torchtitan's own needs triton."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            module: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, nn.Parameter(torch.randn(shape)))


class Adapter:
    """As much of torchtitan's as our manager asks for; to use the rest is an error."""

    fqn_to_index_mapping = None

    def __init__(self, folder: str) -> None:
        self.hf_assets_path = folder


LAYOUTS = {"fsdp4": True, "fsdp2 tp2": False, "pp2 fsdp2": False}
"""And whether the output is tied to the embedding."""


def through_all(folder: str) -> dict[str, list[str]]:
    return {layout: through(f"{folder}/{layout}", layout, tied) for layout, tied in LAYOUTS.items()}


def through(folder: str, layout: str, tied: bool) -> list[str]:
    """Hugging Face's files into a model, and out of it: the names of tensors that came in wrong, or of none."""
    from reshard.integrations.torchtitan import CheckpointManager

    truth = ready(f"{folder}/hf", "huggingface", "torchtitan").apply(reshard.open(f"{folder}/hf"))
    shapes = {name: tuple(truth[name].shape) for name in truth}
    if tied:
        shapes["lm_head.weight"] = shapes["tok_embeddings.weight"]
    rank = dist.get_rank()
    if layout == "pp2 fsdp2":
        last = "norm.", "lm_head.", "layers.1."
        shapes = {name: shape for name, shape in shapes.items() if name.startswith(last) == (rank >= 2)}
    torch.manual_seed(rank // 2)
    model = Weights(shapes)
    if tied:
        model.lm_head.weight = model.tok_embeddings.weight
    if layout == "fsdp4":
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    else:
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        mesh = both["inner" if layout == "pp2 fsdp2" else "outer"]
    if layout == "fsdp2 tp2":
        for name, module in model.named_modules():
            if name.endswith((".wq", ".wk", ".wv", ".w1", ".w3")):
                module.weight = nn.Parameter(distribute_tensor(module.weight.data, both["inner"], [Shard(0)]))
    fully_shard(model, mesh=mesh)
    job = Job.__new__(Job)
    options = {"initial_load_in_hf": True, "last_save_in_hf": True, "last_save_model_only": True}
    config = CheckpointManager.Config(
        enable=True, interval=1, keep_latest_k=0, initial_load_model_only=True, export_dtype="float32", **options
    )
    job._build(model, config, f"{folder}/run", Adapter(f"{folder}/hf"))
    job.manager.load()
    came = gathered(model.state_dict())
    names = {name: "tok_embeddings.weight" if tied and "lm_head" in name else name for name in came}
    wrong = [name for name in came if not torch.equal(came[name], truth[names[name]][...])]
    job.manager.save(1, last_step=True)
    return wrong if len(came) == len(shapes) else ["names"]


def test_hugging_face_s_files_come_in_and_go_out_however_the_model_is_cut(tmp_path: Path) -> None:
    """Also where shards end within a head."""
    transformers = pytest.importorskip("transformers")
    made = {}
    for layout, tied in LAYOUTS.items():
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=tied,
        )  # fmt: skip
        made[layout] = transformers.LlamaForCausalLM(config).eval()
        made[layout].save_pretrained(tmp_path / layout / "hf")

    assert gloo.run(through_all, 4, str(tmp_path)) == [{layout: [] for layout in LAYOUTS}] * 4

    for layout, model in made.items():
        out = tmp_path / layout / "run" / "checkpoint" / "step-1"
        assert [path.name for path in out.iterdir()] == ["model.safetensors"]
        model.config.save_pretrained(out)
        with torch.no_grad():
            again = transformers.LlamaForCausalLM.from_pretrained(out).eval()
            ids = torch.arange(12)[None]
            assert torch.equal(again(ids).logits, model(ids).logits)
