"""Normalizes DeepSpeed checkpoints: the model's values are the fp32 masters if there are any, or
else the weights of the module.

Frozen parameters and buffers come from the module. Names are those of the module; those of a
pipeline module are `<layer>.<name>`, which the hint "names" maps to others: {"0": "embed", "1":
"layers.0", ...}.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from planners.geometry.arrays import grouped
from planners.geometry.box import Shape
from reshard.errors import CorruptCheckpointError, FormatError, NormalizationError
from reshard.formats.canonical import (
    Canonical,
    Hints,
    NameMap,
    Shapes,
    States,
    StoredOptimizer,
    Value,
    Values,
    check_names,
    name_ids,
    note_unjoined,
    settings_of,
    take_optimizer,
)
from reshard.formats.deepspeed.files import DeepSpeedFacts
from reshard.formats.deepspeed.zero import (
    MASTER,
    Rank,
    cut_stage3,
    cut_stage12,
    experts_shifts,
    read_rank,
    shifted,
)
from reshard.formats.megatron.names import join_by_name
from reshard.formats.torch_save.pickles import TensorRef
from reshard.formats.torch_save.reader import TorchFile, saved_groups, stored_or_plain, stored_tensor, stored_values
from reshard.stored.contents import Contents
from reshard.stored.tensor import StoredTensor
from reshard.stored.views import concat, cut, narrow, unflatten

_MODEL = re.compile(r"(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_model_states")
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_?optim_states")
_LAYER = re.compile(r"layer_(?P<layer>\d+)(?:-model_(?P<tp>\d+))?-model_states")
_EXPERT = re.compile(r"layer_\d+_expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states")
_UNIVERSAL = re.compile(r"zero/(?P<fqn>[^/]+)/(?P<state>[^/]+)")


@dataclass
class _ModelParallelRank:
    """The files of one model parallel rank. Without pipelines and tensor parallelism, there is only one."""

    models: dict[int, TorchFile] = field(default_factory=dict)
    """Files by data-parallel rank. Only rank 0 has one, except in ZeRO-3."""
    optims: dict[int, tuple[str, TorchFile]] = field(default_factory=dict)

    @property
    def first(self) -> TorchFile:
        """The first model file."""
        return self.models[min(self.models)]

    @property
    def head(self) -> dict[str, Any]:
        """The contents of the first model file."""
        return self.first.entries if self.models else {}

    def shapes(self) -> list[Shapes]:
        """Return the shapes of the trainable parameters of each group, or [] if ZeRO is off."""
        given = self.head.get("param_shapes") or []
        groups = [given] if isinstance(given, dict) else list(given)
        return [{str(k): tuple(map(int, v)) for k, v in group.items()} for group in groups]


def normalize(contents: Contents, hints: Hints, what: str) -> Canonical:
    """Return the state under canonical names.

    Raises:
        CorruptCheckpointError: a rank's file is missing, or pieces do not make up the parameters.
        NormalizationError: a hint is missing.
    """
    facts = contents.known(DeepSpeedFacts)
    files = facts.files
    stages = _stages(files)
    is_bare = any(map(_UNIVERSAL.fullmatch, files)) and not any(stage.models for stage in stages.values())
    if lost := [problem for problem in facts.missing if is_bare or "zero/" in problem]:
        raise CorruptCheckpointError(lost[0])
    parts = Parts()
    _add_universal(parts, files, stages, hints)
    if _is_tensor_parallel(files, stages):
        ranks = [Parts() for _ in stages]
        for part, (mp, stage) in zip(ranks, sorted(stages.items())):
            _add_stage(part, stage, mp, hints)
        parts = joined(ranks, hints)
    else:
        for mp, stage in sorted(stages.items()):
            _add_stage(parts, stage, mp, hints)
    for stem, file in files.items():
        _add_layer(parts, stem, file)
    if not parts.model:
        raise FormatError(f"{what}: none of its DeepSpeed files holds a parameter")
    rename = NameMap(parts.model, hints)
    result = Canonical()
    named = None if parts.by_id is None else name_ids(parts.by_id, hints, None, what)
    masters = {} if named is None else {rename(n): of.pop(MASTER) for n, of in named.state.items() if MASTER in of}
    for alias, source in parts.tied.items():
        if rename(source) in masters:
            masters.setdefault(rename(alias), masters[rename(source)])
    for fqn, tensor in parts.model.items():
        result.add_model(rename(fqn), _master(fqn, tensor, masters.get(rename(fqn))), fqn)
    unread = next((stem for stem in files if stem.startswith("expp_rank_")), None)
    result.notes += [f"the optimizer states of experts, such as those in {unread}.pt, are not read"] if unread else []
    result.notes += parts.notes
    if named is not None:
        take_optimizer(result, named, rename)
        check_names(result)
    take_optimizer(result, StoredOptimizer(parts.state, parts.groups), rename)
    return result


def _master(fqn: str, tensor: StoredTensor, master: Value) -> StoredTensor:
    """Return the fp32 master of a parameter, if it has one."""
    if not isinstance(master, StoredTensor):
        return tensor
    if master.spec.shape != tensor.spec.shape:
        raise NormalizationError(
            f"the fp32 master of {fqn!r} has shape {list(master.spec.shape)}, but the parameter has "
            f"{list(tensor.spec.shape)}; so the given names are in another order than the ids"
        )
    return master.renamed(fqn)


def _stages(files: Mapping[str, TorchFile]) -> dict[int, _ModelParallelRank]:
    stages = defaultdict[int, _ModelParallelRank](_ModelParallelRank)
    for stem, file in files.items():
        if match := _MODEL.fullmatch(stem):
            # reshard writes the file of rank 0 under two names, the second time without tensors
            stages[int(match["mp"])].models.setdefault(int(match["dp"] or 0), file)
        elif match := _OPTIM.fullmatch(stem):
            stages[int(match["mp"])].optims[int(match["dp"])] = (stem, file)
    return stages


def _is_tensor_parallel(files: Mapping[str, TorchFile], stages: Mapping[int, _ModelParallelRank]) -> bool:
    """Return True if each of the model parallel ranks has a part of every parameter, rather than a
    stage of a pipeline.

    Raises FormatError for a pipeline whose stages are tensor parallel.
    """
    if any(map(_UNIVERSAL.fullmatch, files)):
        return False
    layers = [m for stem in files if (m := _LAYER.fullmatch(stem))]
    if len({m["tp"] for m in layers if m["tp"] is not None}) > 1:
        raise FormatError(
            "this is a pipeline of a tensor-parallel model, whose files do not say which of them belong "
            "together: first convert it to a universal checkpoint with ds_to_universal"
        )
    return not layers and len(stages) > 1


def _add_stage(parts: Parts, stage: _ModelParallelRank, mp: int, hints: Hints) -> None:
    head, shapes = stage.head, stage.shapes()
    if not stage.models:
        raise CorruptCheckpointError(f"mp_rank_{mp:02d}_model_states.pt is missing, which lists the parameters")
    if stage.optims:
        _add_zero(parts, stage, shapes)
    _add_module(parts, stage, head)
    optimizer, file = head.get("optimizer"), stage.first
    if isinstance(optimizer, dict) and "state" in optimizer:
        state = {str(i): stored_values(i, of, file) for i, of in optimizer["state"].items()}
        parts.by_id = StoredOptimizer(state, saved_groups(optimizer, file))
    elif isinstance(optimizer, dict) and isinstance(optimizer.get("optimizer_state_dict"), dict):
        # a 16-bit model
        shapes_of = {str(k): v.size for k, v in (head.get("module") or {}).items() if isinstance(v, TensorRef)}
        parts.by_id = read_mixed(optimizer, file, shapes_of, hints)
        parts.tied.update(_same_storage(head["module"]))
    for alias, source in (head.get("shared_params") or {}).items():
        parts.tied[str(alias)] = str(source)
        if source in parts.model:
            parts.model[str(alias)] = parts.model[source]


def _same_storage(module: Mapping[str, Any]) -> dict[str, str]:
    """Return tensors that share memory, because they are tied: each name with another name of the
    same tensor."""
    refs = ((ref, str(name)) for name, ref in module.items() if isinstance(ref, TensorRef) and 0 not in ref.size)
    return {a: b for names in grouped(refs).values() for a in names for b in names if a != b}


def _add_zero(parts: Parts, stage: _ModelParallelRank, shapes: list[Shapes]) -> None:
    """Add masters, states, and groups from the flat pieces of all data parallel ranks."""
    ordered = sorted(stage.optims)
    if ordered != list(range(len(ordered))):
        missing = next(r for r in range(len(ordered)) if r not in stage.optims)
        name = stage.optims[ordered[0]][0].replace(f"pp_rank_{ordered[0]}", f"pp_rank_{missing}")
        raise CorruptCheckpointError(f"{name}.pt is missing: there are files of the ranks {ordered}")
    if not shapes:
        raise CorruptCheckpointError(
            f"{stage.first.source.label}: it has no param_shapes, which list the parameters in the pieces"
        )
    ranks = [read_rank(*stage.optims[r], r) for r in ordered]
    parts.notes += note_unjoined(sorted({name for rank in ranks for name in rank.unread}))
    cut = cut_stage3 if ranks[0].stage == 3 else cut_stage12
    for fqn, states in cut(ranks, shapes).items():
        master = states.pop(MASTER)
        if isinstance(master, StoredTensor):
            parts.model[fqn] = master
        parts.state[fqn] = states
    _add_groups(parts, ranks, shapes)


def _add_groups(parts: Parts, ranks: Sequence[Rank], shapes: list[Shapes]) -> None:
    """Add the groups of a stage. Further stages have the same settings, and parameters of their own."""
    before, rank = len(parts.groups), ranks[0]
    for g, group in enumerate(shapes):
        names = [shifted(name, by) for by in experts_shifts(ranks, g, group) for name in group]
        bare = settings_of(rank.groups[g] if g < len(rank.groups) else {})
        if g < before and bare == settings_of(parts.groups[g]):
            parts.groups[g]["params"] += [name for name in names if name not in parts.groups[g]["params"]]
        else:
            parts.groups.append({**bare, "params": list(names)})


def _add_module(parts: Parts, stage: _ModelParallelRank, head: Mapping[str, Any]) -> None:
    """Add weights without a master: buffers, frozen parameters, and, without ZeRO, all weights."""
    file = stage.first
    frozen = {str(k): tuple(map(int, v)) for k, v in (head.get("frozen_param_shapes") or {}).items()}
    trained = {fqn: shape for group in stage.shapes() for fqn, shape in group.items()}
    tied = head.get("shared_params") or {}
    for fqn, ref in (head.get("module") or {}).items():
        if not isinstance(ref, TensorRef) or str(fqn).endswith("_extra_state"):
            continue
        if fqn in parts.model and fqn in trained:
            continue
        if fqn in frozen and ref.size != frozen[fqn]:
            parts.model[fqn] = _frozen(stage, fqn, frozen[fqn])
        elif ref.size == (0,) and fqn in trained and math.prod(trained[fqn]) > 0:
            raise CorruptCheckpointError(
                f"{file.source.label}: ZeRO-3 keeps {fqn!r} in the files of optimizer states, which are missing"
            )
        elif ref.size == (0,) and fqn in tied:
            continue
        else:
            parts.model[fqn] = stored_tensor(str(fqn), file, ref)


def _frozen(stage: _ModelParallelRank, fqn: str, shape: Shape) -> StoredTensor:
    """Return a frozen parameter of ZeRO-3, joined from the slices of all ranks."""
    for rank in range(max([*stage.models, *stage.optims]) + 1):
        if rank not in stage.models:
            name = re.sub(r"zero_pp_rank_\d+", f"zero_pp_rank_{rank}", stage.first.source.label)
            raise CorruptCheckpointError(f"{name} is missing, which holds a part of the frozen parameter {fqn!r}")
    pieces, left = [], math.prod(shape)
    for rank, file in sorted(stage.models.items()):
        ref = (file.value.get("frozen_param_fragments") or {}).get(fqn)
        if not isinstance(ref, TensorRef):
            raise CorruptCheckpointError(f"{file.source.label}: it has no part of the frozen parameter {fqn!r}")
        length = min(math.prod(ref.size), left)
        pieces.append(narrow(stored_tensor(f"{fqn} of rank {rank}", file, ref, rank), 0, 0, length))
        left -= length
    return unflatten(concat(pieces, 0, fqn), shape, fqn)


def _add_layer(parts: Parts, stem: str, file: TorchFile) -> None:
    """Add the weights of a pipeline's layer, or of an expert."""
    layer, expert = _LAYER.fullmatch(stem), _EXPERT.fullmatch(stem)
    if layer is None and expert is None:
        return
    front = "" if layer is None else f"{int(layer['layer'])}."
    for fqn, ref in file.entries.items():
        if isinstance(ref, TensorRef) and front + str(fqn) not in parts.model:
            parts.model[front + str(fqn)] = stored_tensor(front + str(fqn), file, ref)


def _add_universal(
    parts: Parts, files: Mapping[str, TorchFile], stages: Mapping[int, _ModelParallelRank], hints: Hints
) -> None:
    """Add parameters and states that have a file each."""
    shapes = {fqn: shape for stage in stages.values() for group in stage.shapes() for fqn, shape in group.items()}
    found = False
    for stem, file in files.items():
        match = _UNIVERSAL.fullmatch(stem)
        if match is None:
            continue
        fqn, state = match["fqn"], match["state"]
        value = file.value.get("param") if isinstance(file.value, dict) else file.value
        stored = stored_or_plain(f"{fqn}.{state}", value, file)
        bare = isinstance(file.value, TensorRef) and state != "step"
        if isinstance(stored, StoredTensor) and bare and fqn in shapes and stored.spec.shape != shapes[fqn]:
            stored = unflatten(stored, shapes[fqn], fqn)  # stage 3
        rows = hints.get("vocab_size")
        if isinstance(stored, StoredTensor) and rows and file.entries.get("vocab_tensor"):
            stored = narrow(stored, 0, 0, min(int(rows), stored.spec.shape[0]))
        if state == "fp32" and isinstance(stored, StoredTensor):
            parts.model[fqn] = stored  # for buffers, the module's copy is better
        elif state != "fp32":
            parts.state.setdefault(fqn, {})[state] = stored
        found = True
    common = files.get("zero/optimizer_state")
    if not found or common is None:
        return
    _add_common_step(parts, common)
    if common.entries and not parts.groups:
        rank = Rank(common.source.label, groups=saved_groups(common.entries, common))
        for stage in stages.values():
            _add_groups(parts, [rank], stage.shapes())


def _add_common_step(parts: Parts, common: TorchFile) -> None:
    """Add the number of steps for parameters that have no file for it, such as those of stage 3.
    Each of its groups records one."""
    inner = common.entries.get("optimizer_state_dict")
    states = inner.get("state") if isinstance(inner, dict) else None
    steps = [of["step"] for of in states.values() if "step" in of] if isinstance(states, dict) else []
    if not steps or any(common.plain(step) != common.plain(steps[0]) for step in steps):
        return
    for fqn, states in parts.state.items():
        if states and "step" not in states:
            states["step"] = stored_or_plain(f"{fqn}.step", steps[0], common)


# DeepSpeed's optimizers of 16-bit models without ZeRO: a torch optimizer, and its fp32 masters.
#
#     {optimizer_state_dict: {state: {0: ...}, param_groups}, fp32_groups: [[master, ...] of each group]}
#     {optimizer_state_dict: with one id per group, fp32_groups_flat: [all masters of each group in one row]}


def read_mixed(optimizer: Mapping[str, Any], file: TorchFile, shapes: Shapes, hints: Hints) -> StoredOptimizer:
    """Return the states by ID, or by name if complete groups are flat. Masters are the state
    `MASTER`.

    Args:
        shapes: shapes of the module's tensors.

    Raises:
        NormalizationError: groups are flat, and no hint lists their parameters.
        CorruptCheckpointError: masters and groups do not fit together.
    """
    inner = optimizer["optimizer_state_dict"]
    groups = saved_groups(inner, file)
    state = {int(i): stored_values(i, of, file) for i, of in (inner.get("state") or {}).items()}
    flats = optimizer.get("fp32_groups_flat")
    if flats is not None:
        rows = [*stored_values("group", dict(enumerate(flats)), file).values()]
        return _cut(groups, state, rows, shapes, hints)
    masters = optimizer.get("fp32_groups") or ()
    for group, of in zip(groups, masters):
        if len(group.get("params", ())) != len(of):
            raise CorruptCheckpointError(
                f"{file.source.label}: a group of {len(group.get('params', ()))} parameters has {len(of)} fp32 masters"
            )
        for i, ref in zip(group["params"], of):
            state.setdefault(i, {})[MASTER] = stored_or_plain(f"{i}.{MASTER}", ref, file)
    return StoredOptimizer({str(i): of for i, of in state.items()}, groups)


def _cut(
    groups: Sequence[dict[str, Any]],
    state: Mapping[int, Values],
    flats: Sequence[Value],
    shapes: Shapes,
    hints: Hints,
) -> StoredOptimizer:
    """Split flat groups into the parameters that the hint lists for them."""
    given = hints.get("param_groups")
    if given is None:
        hints.missing(
            "param_groups",
            f"the optimizer's {len(flats)} groups are saved as one flat tensor each, and the files do not say which "
            "parameters are in them, or in which order",
            '[["embed.weight", ...], ...]',
        )
    if len(given) != len(flats):
        raise NormalizationError(f"the hint 'param_groups' lists {len(given)} groups, but there are {len(flats)}")
    out = StoredOptimizer()
    for g, (names, flat) in enumerate(zip(given, flats)):
        settings = groups[g] if g < len(groups) else {}
        ids = list(settings.get("params", (g,)))
        values: Values = {MASTER: flat, **(state.get(ids[0], {}) if ids else {})}
        out.state.update(_pieces(g, names, values, shapes))
        out.groups.append({**settings_of(settings), "params": list(names)})
    return out


def _pieces(g: int, names: Sequence[str], values: Values, shapes: Shapes) -> States:
    out: States = {}
    at = 0
    master = values[MASTER]
    length = master.spec.numel if isinstance(master, StoredTensor) else 0
    for name in names:
        if name not in shapes:
            raise NormalizationError(f"the hint 'param_groups' names {name!r}, which the module does not have")
        stop = at + math.prod(shapes[name])
        out[name] = {}
        for key, value in values.items():
            if isinstance(value, StoredTensor) and value.spec.shape == (length,) and stop <= length:
                value = cut(value, at, shapes[name], f"{name}.{key}")
            out[name][key] = value
        at = stop
    if at != length:
        raise NormalizationError(
            f"the hint 'param_groups' gives group {g} parameters of {at} elements, but its flat tensor has {length}"
        )
    return out


# The contents of DeepSpeed's files by the names in them, and how parts of tensor parallel ranks are
# joined.
#
# The files of model parallel ranks do not say how parameters were sharded: that follows from known
# names, or from the hint "tp_dims". States have the shapes of their parameters, so they are sharded in
# the same way.


@dataclass
class Parts(Canonical):
    """What was found in all files, or in those of one tensor parallel rank, by the names in them."""

    by_id: StoredOptimizer | None = None
    """ZeRO stage 0: the optimizer as torch saves it."""
    tied: dict[str, str] = field(default_factory=dict)
    """Second names of parameters, and the first ones."""


def joined(ranks: Sequence[Parts], hints: Hints) -> Parts:
    """Join the parts of tensor parallel ranks. If all ranks have all of a tensor, the first one's
    is used.

    Raises:
        NormalizationError: it is unknown how a parameter was sharded. The message requests the hint
            "tp_dims".
        CorruptCheckpointError: the ranks have different parameters, or shapes that do not fit.
    """
    first = ranks[0]
    shapes = {fqn: tensor.spec.shape for fqn, tensor in first.model.items()}
    out = Parts(groups=first.groups, tied=first.tied, notes=list(first.notes))
    for rank, other in enumerate(ranks):
        odd = sorted({*other.model} ^ {*first.model})
        if odd:
            raise CorruptCheckpointError(
                f"{odd[0]!r} is in the files of one tensor parallel rank, and not in those of another: rank 0 has "
                f"{len(first.model)} parameters, rank {rank} has {len(other.model)}"
            )
    for fqn in first.model:
        out.model[fqn] = join_by_name(fqn, [part.model[fqn] for part in ranks], shapes, hints)
        for name, value in first.state.get(fqn, {}).items():
            pieces = [part.state.get(fqn, {}).get(name) for part in ranks]
            states = out.state.setdefault(fqn, {})
            if isinstance(value, StoredTensor) and value.spec.shape == shapes[fqn] != ():
                states[name] = join_by_name(fqn, _all_stored(fqn, name, pieces), shapes, hints, name)
            else:
                states[name] = value
    if first.by_id is not None:
        out.notes.append("the optimizer's states are not read: without ZeRO, they have no names by which to join them")
    return out


def _all_stored(fqn: str, name: str, pieces: Sequence[Value]) -> list[StoredTensor]:
    found = [piece for piece in pieces if isinstance(piece, StoredTensor)]
    if len(found) < len(pieces):
        raise CorruptCheckpointError(f"the files of a tensor parallel rank have no {name!r} of {fqn!r}, others have")
    return found
