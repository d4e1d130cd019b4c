"""Normalizes states whose parts are named tensors: those of all formats that do not shard
parameters in their own way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from reshard.errors import CorruptCheckpointError, NormalizationError
from reshard.formats.canonical import (
    Canonical,
    Hints,
    NameMap,
    StoredOptimizer,
    check_names,
    common_attribute,
    name_ids,
    read_optimizer,
    take_optimizer,
)
from reshard.formats.fsdp1 import FLAT, cut_flat
from reshard.formats.safetensors import HuggingFaceFacts
from reshard.formats.sections import Sections, StoredLeaf, find_sections
from reshard.stored.contents import Contents
from reshard.stored.tensor import StoredTensor
from reshard.stored.views import concat, narrow, stack


def normalize_generic(contents: Contents, hints: Hints, what: str) -> Canonical:
    """Return the state under canonical names.

    Raises NormalizationError if a hint is missing, or two tensors would have the same name.
    """
    sections = find_sections(contents)
    optimizers = list(_optimizers(sections, hints, what))
    by_id = any(saved.by_id for _, saved in optimizers)
    scopes = range(len(optimizers)) if len(optimizers) > 1 else [None] * len(optimizers)
    named = [(model, name_ids(saved, hints, scope, what)) for (model, saved), scope in zip(optimizers, scopes)]
    result = Canonical()
    renames: dict[str, Callable[[str], str]] = {}
    for prefix, leaves in (sections.models or {"": []}).items():
        tensors = _tensors(contents, leaves, hints)
        names = [name for name, _ in tensors]
        others = [name for _, saved in named for name in saved.state]
        # the attribute of Lightning's module that holds the model; Fabric saves the model itself
        front = common_attribute(names) if "pytorch-lightning_version" in contents.objects else ""
        rename = NameMap(names or others, hints, front, others)
        renames[prefix] = _renamer(prefix, rename, result)
        for name, tensor in tensors:
            result.add_model(renames[prefix](name), tensor, prefix + name)
    for prefix, saved in named:
        take_optimizer(result, saved, renames[prefix])
    result.notes += _half_of_lightning(contents, result, hints)
    _override_groups(result, hints)
    if by_id:
        check_names(result)
    _split_fused(result, hints)
    return result


def _optimizers(sections: Sections, hints: Hints, what: str) -> Iterator[tuple[str, StoredOptimizer]]:
    for model, tree in sections.optimizers:
        try:
            saved = read_optimizer(tree)
            _refuse_pieces(saved, what)
        except NormalizationError:  # something else may have this name
            if not hints.model_only:
                raise
            continue
        yield model, saved


def _refuse_pieces(saved: StoredOptimizer, what: str) -> None:
    """Raise NormalizationError for each rank's own optimizer states of FSDP1, which do not record
    where they belong."""
    states = [one for states in saved.state.values() for one in states.items() if _PIECE.search(one[0])]
    shapes = [value.spec.shape for _, value in states if isinstance(value, StoredTensor)]
    if saved.by_id and shapes and all(len(shape) == 1 for shape in shapes):
        raise NormalizationError(
            f"the optimizer of {what} was saved as 1-D pieces of FSDP1, and no file says how to join them. "
            "Save what FSDP.optim_state_dict(model, optimizer) returns. "
            "To convert the model alone, pass model_only=True"
        )


def _tensors(contents: Contents, leaves: list[tuple[str, StoredLeaf]], hints: Hints) -> list[tuple[str, StoredTensor]]:
    """Return the tensors of a model. Flat parameters of FSDP1 are split into the parameters inside."""
    tensors = [(name, leaf.value()) for name, leaf in leaves]
    flat_names = [name for name, _ in tensors if name.endswith(FLAT)]
    if flat_names:
        parts = {name: cut_flat(name, tensor, flat_names, hints) for name, tensor in tensors if name in flat_names}
        inside = {param for of in parts.values() for param in of}
        tensors = [one for name, tensor in tensors for one in parts.get(name, {name: tensor}).items()]
        # each rank's 1-D piece of an original parameter is a view of the flat one
        tensors = [(name, tensor) for name, tensor in tensors if _PIECE.sub("", name) not in inside or name in inside]
    beside = contents.details(HuggingFaceFacts)
    on_disk = "safetensors" in contents.format or (beside is not None and beside.config)
    if on_disk and not hints.get("stored_names"):
        return in_memory(tensors)
    return tensors


_PIECE = re.compile(r"\.rank_\d+$")


def _renamer(prefix: str, rename: NameMap, result: Canonical) -> Callable[[str], str]:
    """Return a function that returns canonical names for one of several models. A hint may already
    apply to all models."""
    if not prefix:
        return rename
    return lambda name: name if name in result.model else prefix + rename(name)


def _half_of_lightning(contents: Contents, result: Canonical, hints: Hints) -> list[str]:
    """Return the note about a checkpoint that may have lost its `meta.pt`, which would show that
    names have a prefix."""
    front = common_attribute(result.model)
    numbered = any(key.startswith("optimizer_0.state.") for key in contents.tensors)
    if contents.format != "dcp" or not numbered or not front or "prefix" in hints:
        return []
    note = (
        f"all names begin with {front!r}, and the keys are those of Lightning, but without its meta.pt: if that was "
        "lost, this is the training module's attribute, and the hint 'prefix' takes it away"
    )
    return [note]


def _override_groups(result: Canonical, hints: Hints) -> None:
    """Replace lists of parameter names by those of a hint."""
    given = hints.get("param_groups")
    if given is None:
        return
    if result.groups and len(given) != len(result.groups):
        raise NormalizationError(
            f"the hint 'param_groups' lists {len(given)} groups, but the optimizer has {len(result.groups)}"
        )
    settings = result.groups or [{} for _ in given]
    result.groups = [{**group, "params": list(names)} for group, names in zip(settings, given)]
    result.notes[:] = [note for note in result.notes if "param group" not in note]


_FUSED = re.compile(r"(.*)\bwqkv\.(weight|bias)", re.DOTALL)


def _split_fused(result: Canonical, hints: Hints) -> None:
    """Split states of a fused wqkv like the weights wq, wk, and wv beside it, if hints give the
    number of heads.

    For each key/value head, wqkv has the rows of its query heads, then of its key, then of its
    value.
    """
    if "kv_heads" not in hints and "head_dim" not in hints:
        return
    for fqn in [name for name in result.state if _FUSED.fullmatch(name) and name not in result.model]:
        match = _FUSED.fullmatch(fqn)
        assert match is not None
        parts = {part: f"{match[1]}{part}.{match[2]}" for part in ("wq", "wk", "wv")}
        if any(name not in result.model for name in parts.values()):
            raise NormalizationError(f"cannot split the states of {fqn!r}: the model has no {parts['wq']!r} beside it")
        rows = {part: result.model[name].spec.shape[0] for part, name in parts.items()}
        kv = int(hints.get("kv_heads") or rows["wk"] // int(hints.get("head_dim")))
        if kv < 1 or any(count % kv for count in rows.values()):
            raise NormalizationError(f"{kv} key/value heads do not divide the rows {rows} of {fqn!r}")
        states = result.state.pop(fqn)
        for name, value in states.items():
            whole = isinstance(value, StoredTensor) and value.spec.shape[:1] == (sum(rows.values()),)
            if not whole and isinstance(value, StoredTensor) and value.spec.numel > 1:
                result.notes.append(f"the state {name!r} of {fqn!r} is omitted: it has no value for each of its rows")
                continue
            for part, target in parts.items():
                piece = _rows(value, {p: n // kv for p, n in rows.items()}, kv, part) if whole else value
                result.add_state(target, name, piece)
        for group in result.groups:
            if fqn in group.get("params", ()):
                at = group["params"].index(fqn)
                group["params"][at : at + 1] = parts.values()


def _rows(fused: StoredTensor, per_head: dict[str, int], kv: int, part: str) -> StoredTensor:
    before = {"wq": 0, "wk": per_head["wq"], "wv": per_head["wq"] + per_head["wk"]}[part]
    step, size = sum(per_head.values()), per_head[part]
    starts = [head * step + before for head in range(kv)]
    return concat([narrow(fused, 0, start, start + size) for start in starts], 0, fused.fqn)


# Hugging Face files: on disk, each expert has separate matrices; in memory, they are stacked, with
# gate and up fused.
#
#     disk      mlp.experts.<e>.gate_proj.weight [I, H], up_proj [I, H], down_proj [H, I]    Qwen, DeepSeek, GLM, ...
#               block_sparse_moe.experts.<e>.w1.weight, w3, w2; block_sparse_moe.gate        Mixtral, ...
#               feed_forward.experts.<e>.gate_proj.weight, up_proj, down_proj                Jamba
#     memory    mlp.experts.gate_up_proj [E, 2I, H], mlp.experts.down_proj [E, H, I]; mlp.gate
#               (feed_forward keeps its name)
#
# Granite's experts are stacked on disk, too, so they are only renamed.


_EXPERT = re.compile(
    r"(?P<head>.*layers\.\d+\.)(?P<block>mlp|block_sparse_moe|feed_forward)\.experts\.(?P<expert>\d+)\."
    r"(?P<part>gate_proj|up_proj|down_proj|w1|w2|w3)\.weight"
)
_OF_EXPERT = re.compile(r"(.*layers\.\d+\.)(mlp|block_sparse_moe|feed_forward)\.experts\.\d+\..*")
_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_RENAMED = (
    (re.compile(r"(\.block_sparse_moe)\.input_linear\.weight"), r"\1.experts.gate_up_proj"),
    (re.compile(r"(\.block_sparse_moe)\.output_linear\.weight"), r"\1.experts.down_proj"),
    (re.compile(r"(\.block_sparse_moe)\.router\.layer\.weight"), r"\1.router.weight"),
    (re.compile(r"(\.self_attn)\.attention_sink_bias$"), r"\1.sinks"),
    (re.compile(r"\.mlp\.((?:moe_statics\.)?e_score_correction_bias)$"), r".mlp.gate.\1"),
)
"""Stacked experts of Granite, attention sinks of MiMo, and the router biases of Ernie and EXAONE."""


def in_memory(tensors: Iterable[tuple[str, StoredTensor]]) -> list[tuple[str, StoredTensor]]:
    """Return the tensors with the names and shapes that a model in memory has.

    Raises CorruptCheckpointError if an expert lacks some of its matrices.
    """
    given = list(tensors)
    experts: dict[str, dict[str, dict[int, StoredTensor]]] = {}
    out: list[tuple[str, StoredTensor]] = []
    # experts with more tensors, such as scales of quantized ones, stay as they are
    odd = {m[1] for name, _ in given if (m := _OF_EXPERT.fullmatch(name)) and not _EXPERT.fullmatch(name)}
    for name, tensor in given:
        match = _EXPERT.fullmatch(name)
        if match is None or match["head"] in odd:
            out.append((_renamed(name), tensor))
            continue
        part = _PARTS.get(match["part"], match["part"])
        kept = match["block"].replace("block_sparse_moe", "mlp")
        block = experts.setdefault(f"{match['head']}{kept}.experts", {})
        block.setdefault(part, {})[int(match["expert"])] = tensor
    for prefix, parts in experts.items():
        _check(prefix, parts)
        count = len(parts["down_proj"])
        fused = f"{prefix}.gate_up_proj"
        pairs = [concat([parts["gate_proj"][e], parts["up_proj"][e]], 0, fused) for e in range(count)]
        out.append((fused, stack(pairs, fused)))
        down = f"{prefix}.down_proj"
        out.append((down, stack([parts["down_proj"][e] for e in range(count)], down)))
    return out


def _renamed(name: str) -> str:
    """Return the name in memory of a tensor that is not of a single expert."""
    for pattern, becomes in _RENAMED:
        changed, count = pattern.subn(becomes, name)
        if count:
            return changed
    return name.replace(".block_sparse_moe.", ".mlp.")


def _check(prefix: str, parts: dict[str, dict[int, StoredTensor]]) -> None:
    wanted = set(range(max(max(of) for of in parts.values()) + 1))
    for part in ("gate_proj", "up_proj", "down_proj"):
        missing = sorted(wanted - set(parts.get(part, {})))
        if missing:
            raise CorruptCheckpointError(
                f"{prefix}: expert {missing[0]} has no {part}, but other experts have: a file is missing"
            )
