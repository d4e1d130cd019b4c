"""Writes universal checkpoints of DeepSpeed: a file for every parameter and state, which ZeRO stages 1 to 3 read."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from reshard.errors import FormatError
from reshard.formats.canonical import Canonical, Groups, Hints, Tensors, listed_in, settings_of, ties
from reshard.formats.dcp.writer import object_to_bytes
from reshard.formats.deepspeed.files import OWN, is_state
from reshard.formats.format import Widen, Writing, at_top
from reshard.formats.megatron.names import tp_dim
from reshard.formats.torch_save.writer import ArchivesWriter, TensorStub
from reshard.live.tree import unflatten
from reshard.state import KeyPath
from reshard.storage.base import Listing
from reshard.stored.contents import Contents, Facts
from reshard.stored.streaming import FilePlan, Publication, Target
from reshard.stored.tensor import StoredTensor, read_value

#     latest_universal                                              names the folder, published last
#     <tag>/zero/<parameter>/{fp32, exp_avg, exp_avg_sq, step}.pt   full tensors
#     <tag>/zero/optimizer_state.pt                                 param groups
#     <tag>/mp_rank_00_model_states.pt                              shapes by group, buffers, frozen parameters,
#                                                                   and client state
#     <tag>/zero_pp_rank_0_mp_rank_00_model_states.pt               the same without tensors, for stage 3


_LATEST = "latest_universal"
_VERSION = "0.19.8"
"""The DeepSpeed version whose files these are."""


@dataclass(frozen=True)
class DeepSpeedState(Facts):
    """All values other than tensors."""

    groups: tuple[Mapping[str, Any], ...]
    """Settings, and the names of the trained parameters in "params"."""
    steps: Mapping[str, float | None]
    shapes: Mapping[str, tuple[int, ...]]
    cut_dims: Mapping[str, int]
    """By parameter: the dim that tensor parallelism shards, from the hint. DeepSpeed loads a part
    of it if ranks have fewer elements."""
    tied: Mapping[str, str]
    """Second names of parameters, and the first ones."""
    client: Mapping[str, Any]

    @property
    def step(self) -> int:
        """Number of steps of the first parameter that has one."""
        return int(next((step for step in self.steps.values() if step is not None), 0))


class DeepSpeedWriter(ArchivesWriter):
    """Writes a file for each tensor of the optimizer, and one for everything that is in no optimizer."""

    def __init__(self, contents: Contents, target: Target) -> None:
        super().__init__(contents, target)
        facts = self.facts = contents.known(DeepSpeedState)
        self.tag = f"global_step{facts.step}_universal"
        self._head = f"{self.tag}/mp_rank_00_model_states.pt"
        alone = [self.whole(name) for name in self.names]
        ours = [part for part in alone if "/" in part.spec.fqn]
        self.files = (
            *(FilePlan(f"{self.tag}/zero/{part.spec.fqn}.pt", (part,)) for part in ours),
            FilePlan(self._head, tuple(part for part in alone if "/" not in part.spec.fqn)),
        )

    def value(self, file: FilePlan, numbers: Mapping[str, int]) -> Any:
        """Return a tensor of the optimizer, or all model states."""
        stubs = {part.spec.fqn: TensorStub(part.spec, numbers[part.spec.fqn]) for part in file.parts}
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
        """Return the settings by group. Stages 1 and 2 have them at the top, stage 3 one level below."""
        facts = self.facts
        settings = [{**settings_of(group), "params": [number]} for number, group in enumerate(facts.groups)]
        firsts = [next((facts.steps[fqn] for fqn in group["params"]), None) for group in facts.groups]
        state = {n: {} if step is None else {"step": torch.tensor(step, device="cpu")} for n, step in enumerate(firsts)}
        inner = {"state": state, "param_groups": settings}
        return {"param_groups": settings, "optimizer_state_dict": inner, "overflow": False, "ds_version": _VERSION}

    def finish(self, out: Publication) -> None:
        """Write the small files, rename all files, then write the file that names their folder.

        If these replace other files, there are no model states until all files are new. Without
        model states, readers refuse the folder.
        """
        heads = self._head, f"{self.tag}/zero_pp_rank_0_mp_rank_00_model_states.pt"
        there = out.storage.list(f"{self.tag}/")
        if not there.keys().isdisjoint(out.done):
            for name in (_LATEST, *heads):
                out.retract(name)
        small: dict[str, Any] = {f"{self.tag}/zero/optimizer_state.pt": self._optimizer_state()}
        for fqn, step in self.facts.steps.items():
            if step is not None:
                small[f"{self.tag}/zero/{fqn}/step.pt"] = torch.tensor(step, device="cpu")
        for name in there:  # leftovers of the replaced checkpoint
            if is_state(name, f"{self.tag}/") and name not in out.done and name not in small:
                out.check()
                out.storage.delete(name)
        for name, value in small.items():
            out.publish(name, object_to_bytes(value))
        out.name_files()
        out.publish(heads[1], object_to_bytes(self._model_states({})))
        out.publish(_LATEST, self.tag.encode())

    def occupied(self, names: Listing) -> str | None:
        """Return the file that names a folder, if there is one.

        Raises FormatError in a tag's folder, which such a file would not replace.
        """
        old = fnmatch.filter(at_top(names, "_states.pt"), "*rank_*")
        if old:
            raise FormatError(f"the target contains {old[0]}, of another checkpoint: choose an empty folder")
        return next((name for name in (_LATEST, "latest") if name in names), None)


# A canonical state in the form of DeepSpeed's universal checkpoints:
#
#     fp32, exp_avg, ...   a file for each state of a parameter: a full tensor in float32
#     module               what has no states: buffers and frozen parameters
#     client state         plain objects beside model and optimizer


_MASTERS = ("fp32_param", "fp32", "master_param")
_NOT_STATES = (*_MASTERS, "step")


def deepspeed_form(
    found: Canonical, contents: Contents, hints: Mapping[str, Any] | None, widen: Widen, what: str
) -> Contents:
    """Return `contents`, which normalizes to `found`, with keys by file: "<fqn>/<state>", and
    "<fqn>" for tensors of the module.

    Raises FormatError if the format cannot store the state: there is no optimizer, only some
    parameters have a state, or steps differ within a group.
    """
    trained = [fqn for fqn, states in found.state.items() if states and fqn in found.model]
    groups = [{**group, "params": [p for p in group.get("params", ()) if p in trained]} for group in found.groups]
    _check(found, trained, groups, what)
    tied = ties(found.model, trained)
    tensors: Tensors = {}
    elsewhere = (fqn for fqn in found.state if fqn not in found.model)  # saved under other names
    lost = [f"optim.state.{fqn}.{name}" for fqn in elsewhere for name in found.state[fqn]]
    for fqn in trained:
        states, parameter = found.state[fqn], found.model[fqn]
        master = next((states[name] for name in _MASTERS if name in states), parameter)
        tensors[f"{fqn}/fp32"] = widen(master, f"{fqn}/fp32")
        for name, value in states.items():
            if isinstance(value, StoredTensor) and value.spec.shape == parameter.spec.shape and name not in _NOT_STATES:
                tensors[f"{fqn}/{name}"] = value.renamed(f"{fqn}/{name}")
            elif name not in _NOT_STATES:
                lost.append(f"optim.state.{fqn}.{name}")
    still = [fqn for fqn in found.model if fqn not in trained and fqn not in tied]
    tensors.update((fqn, found.model[fqn]) for fqn in still)
    client, unplaced = _client(contents)
    listed = set(listed_in(found.groups))
    notes = [f"{fqn!r} is in a param group and has no state: written as frozen" for fqn in still if fqn in listed]
    facts = DeepSpeedState(
        groups=tuple(groups),
        steps={fqn: _step(found, fqn) for fqn in trained},
        shapes={fqn: found.model[fqn].spec.shape for fqn in trained},
        cut_dims={fqn: tp_dim(fqn, Hints(hints), 1) or 0 for fqn in trained},
        tied=tied,
        client=client,
    )
    return Contents(
        tensors,
        format="deepspeed",
        facts=facts,
        warnings=(*contents.warnings, *found.notes, *notes),
        left_out=(*contents.left_out, *contents.per_rank, *lost, *unplaced),
    )


def _check(found: Canonical, trained: list[str], groups: Groups, what: str) -> None:
    """Raise FormatError for what DeepSpeed would miss, or silently ignore."""
    if not trained or not any(group["params"] for group in groups):
        raise FormatError(
            f"{what}: a universal checkpoint needs optimizer states and param groups, because DeepSpeed reads the "
            "parameters through them. For a model without an optimizer, write safetensors"
        )
    kinds = {name for fqn in trained for name in found.state[fqn] if name not in _NOT_STATES}
    placed = {fqn for group in groups for fqn in group["params"]}
    for fqn in trained:
        lacks = min(kinds - set(found.state[fqn]), default=None)
        if lacks is not None:
            raise FormatError(
                f"{what}: {fqn!r} has no {lacks}, which others have: DeepSpeed needs it for all parameters"
            )
        if fqn not in placed:
            raise FormatError(f"{what}: {fqn!r} has states but no param group: the hint 'param_groups' gives them")
    # also frozen parameters, because a slash marks files of states
    for fqn in found.model:
        if "/" in fqn:
            raise FormatError(f"{what}: {fqn!r} cannot be the name of a folder, because it contains '/'")
    for number, group in enumerate(groups):
        _check_steps(found, number, group["params"])


def _check_steps(found: Canonical, number: int, names: list[str]) -> None:
    steps = {fqn: _step(found, fqn) for fqn in names}
    other = next((fqn for fqn, step in steps.items() if step != steps[names[0]]), None)
    if other is not None:
        raise FormatError(
            f"DeepSpeed stores one step count per param group, but in group {number}, {names[0]!r} has taken "
            f"{steps[names[0]]} and {other!r} {steps[other]}"
        )


def _step(found: Canonical, fqn: str) -> float | None:
    value = found.state[fqn].get("step")
    return None if value is None else float(read_value(value))


def _client(contents: Contents) -> tuple[dict[str, Any], list[str]]:
    """Return plain objects nested as before, and the keys of those that cannot be stored."""
    found: dict[KeyPath, Any] = {}
    lost: list[str] = []
    for key, value in contents.objects.items():
        path = contents.path_of(key)
        if path[0] in ("optim", "model"):
            continue
        inner = _below_file(path)
        if not inner or inner[0] in OWN:
            lost.append(key)
        else:
            found[inner] = value
    above = {path[:i] for path in found for i in range(1, len(path) + 1)}
    kinds = {_below_file(path): kind for path, kind in contents.containers.items() if _below_file(path) in above}
    return dict(unflatten(found, kinds)), lost


def _below_file(path: KeyPath) -> KeyPath:
    return path[1:] if path and str(path[0]).endswith("mp_rank_00_model_states") else path


WRITING = Writing(DeepSpeedWriter, form=deepspeed_form)
