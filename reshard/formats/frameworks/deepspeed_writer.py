"""Writes universal checkpoints of DeepSpeed: a file for every parameter and state, which any ZeRO stage reads.

latest_universal                                              names the folder, published last
<tag>/zero/<parameter>/{fp32, exp_avg, exp_avg_sq, step}.pt   whole tensors
<tag>/zero/optimizer_state.pt                                 param groups
<tag>/mp_rank_00_model_states.pt                              shapes by group, buffers, frozen parameters, client state
<tag>/zero_pp_rank_0_mp_rank_00_model_states.pt               the same without tensors: stage 3 asks for it by this name
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from planners.geometry.box import Box
from reshard.formats.dcp.metadata import object_to_bytes
from reshard.formats.stored.contents import Contents, Facts
from reshard.formats.stored.writer import Done, FilePlan, FormatWriter, Part
from reshard.formats.torch_save.writer import write_archive
from reshard.formats.torch_save.zip_writer import TensorStub
from reshard.storage.base import Storage

__all__ = ["RESERVED", "DeepSpeedWriter", "ToSave"]

_LATEST = "latest_universal"
_VERSION = "0.19.8"
"""The version whose files these are."""
RESERVED = frozenset(
    ("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "ds_version")
    + ("frozen_param_fragments", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config")
)
"""What DeepSpeed itself keeps beside a program's client state."""


@dataclass(frozen=True)
class ToSave(Facts):
    """What there is beside tensors."""

    groups: tuple[Mapping[str, Any], ...] = ()
    """Settings, and the names of the trained parameters in "params"."""
    steps: Mapping[str, float | None] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    cut_dims: Mapping[str, int] = field(default_factory=dict)
    """The dim that tensor parallelism cuts, by parameter."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Second names of parameters, and the first ones."""
    client: Mapping[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The number of steps of the first parameter that has one."""
        return int(next((step for step in self.steps.values() if step is not None), 0))


class DeepSpeedWriter(FormatWriter):
    """A file for each tensor of the optimizer, and one for what is in no optimizer."""

    format = "deepspeed"

    def __init__(self, contents: Contents, job_id: str) -> None:
        super().__init__(contents, job_id)
        facts = contents.facts_of(ToSave)
        assert facts is not None
        self.facts = facts
        self.tag = f"global_step{facts.step}_universal"
        self._head = f"{self.tag}/mp_rank_00_model_states.pt"
        alone = [Part(self.stored(name).spec, Box.full(self.stored(name).spec.shape)) for name in self.names]
        ours = [part for part in alone if "/" in part.spec.fqn]
        self.files = (
            FilePlan(self._head, tuple(part for part in alone if "/" not in part.spec.fqn)),
            *(FilePlan(f"{self.tag}/zero/{part.spec.fqn}.pt", (part,)) for part in ours),
        )

    def write(self, storage: Storage, file: FilePlan, on_bytes: Callable[[int], None]) -> Done:
        """Stream one file."""
        name = storage.staged(file.name, self.job_id)
        regions = [self.region(part) for part in file.parts]
        return self.done(*write_archive(storage, name, self._value(file), regions, self.feed(regions), on_bytes))

    def _value(self, file: FilePlan) -> Any:
        """What the file holds, with a stub for each tensor."""
        stubs = {part.spec.fqn: TensorStub(part.spec, number) for number, part in enumerate(file.parts)}
        if file.name == self._head:
            return self._model_states(stubs)
        ((name, stub),) = stubs.items()
        return {"cat_dim": self.facts.cut_dims[name.rpartition("/")[0]], "param": stub}

    def _model_states(self, module: Mapping[str, Any]) -> dict[str, Any]:
        facts = self.facts
        shapes = [{fqn: torch.Size(facts.shapes[fqn]) for fqn in group["params"]} for group in facts.groups]
        program: dict[str, Any] = {"lr_scheduler": None, "data_sampler": None, "random_ltd": None, "skipped_steps": 0}
        program |= {"global_steps": facts.step, "global_samples": 0, **facts.client}
        return program | {
            "module": dict(module),
            "buffer_names": [],
            "optimizer": None,
            "param_shapes": shapes,
            "frozen_param_shapes": None,
            "shared_params": dict(facts.tied),
            "frozen_param_fragments": None,
            "dp_world_size": 1,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "ds_config": {},
            "ds_version": _VERSION,
        }

    def _optimizer_state(self) -> dict[str, Any]:
        """Settings by group; stages 1 and 2 have them at the top, stage 3 within."""
        facts = self.facts
        settings = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": [number]}
            for number, group in enumerate(facts.groups)
        ]
        firsts = [next((facts.steps[fqn] for fqn in group["params"]), None) for group in facts.groups]
        state = {n: {} if step is None else {"step": torch.tensor(step, device="cpu")} for n, step in enumerate(firsts)}
        inner = {"state": state, "param_groups": settings}
        return {"param_groups": settings, "optimizer_state_dict": inner, "overflow": False, "ds_version": _VERSION}

    def finish(self, storage: Storage, done: Mapping[str, Done]) -> None:
        """Give all files their names, write the small ones, then the one that names their folder."""
        for name, written in done.items():
            storage.unstage(written.name, name)
        small: dict[str, Any] = {f"{self.tag}/zero/optimizer_state.pt": self._optimizer_state()}
        small[f"{self.tag}/zero_pp_rank_0_mp_rank_00_model_states.pt"] = self._model_states({})
        for fqn, step in self.facts.steps.items():
            if step is not None:
                small[f"{self.tag}/zero/{fqn}/step.pt"] = torch.tensor(step, device="cpu")
        for name, value in small.items():
            storage.publish(name, object_to_bytes(value))
        storage.publish(_LATEST, self.tag.encode())
        for name in storage.list(f"{self.tag}/"):  # of what was there before
            if name not in done and name not in small:
                storage.delete(name)

    def occupied(self, names: Mapping[str, int]) -> str | None:
        """The files that name a folder."""
        return next((name for name in (_LATEST, "latest") if name in names), None)
