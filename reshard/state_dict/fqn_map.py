"""`FqnMap`: maps the names of a live model to canonical names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch.optim import Optimizer

from reshard.arguments import renamed
from reshard.state_dict.live_model import LiveModel, Models, Stage, StateEntry
from reshard.state_dict.optimizer_parameters import LiveOptimizers, OptimizedParameter


@dataclass(frozen=True)
class FqnEntry:
    """One name in the live model, and what is known about it."""

    live: str
    """Name in the live module, including the segments of wrappers. "" for a parameter outside the
    model."""
    canonical: str
    kind: str
    """"parameter", "buffer", or "extra_state"."""
    wrappers: tuple[str, ...]
    """Classes of the wrappers around it. The outermost comes first."""
    aliases: tuple[str, ...]
    """Other canonical names of the same tensor."""
    ids: tuple[tuple[int, int], ...]
    """(optimizer, id in its own state dict) of the parameter."""
    stage: int
    """Index of its module in the list of stages."""
    offset: int
    """Number that was added to the stage's own layer number."""
    persistent: bool
    """True if it is part of state dicts."""
    requires_grad: bool
    shape: tuple[int, ...]
    """Global shape. () for extra state."""


class FqnMap(Mapping[str, FqnEntry]):
    """A mapping from canonical names to entries, in the order of the model. `str` prints a table.

    A name that several stages have appears once here. `entries` lists every occurrence.
    """

    def __init__(self, entries: tuple[FqnEntry, ...]) -> None:
        self.entries = entries
        self._by_name: dict[str, FqnEntry] = {}
        for entry in entries:
            self._by_name.setdefault(entry.canonical, entry)

    def __getitem__(self, canonical: str) -> FqnEntry:
        return self._by_name[canonical]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def live_to_canonical(self) -> dict[str, str]:
        """Return {live name: canonical name}, for a single module or for stages whose live names
        differ."""
        return {entry.live: entry.canonical for entry in self.entries if entry.live}

    def parameter_order(self, optimizer: int = 0) -> list[str]:
        """Return canonical names in the order of the ids of one optimizer. `normalize` needs this
        `order` for the optimizer's raw state dict."""
        ids = {number: entry.canonical for entry in reversed(self.entries) for k, number in entry.ids if k == optimizer}
        return [ids[number] for number in sorted(ids)]

    def __str__(self) -> str:
        rows = [("canonical", "live", "kind", "shape", "wrappers", "aliases", "optimizer:id", "stage")]
        for e in self.entries:
            is_frozen = e.kind == "parameter" and not e.requires_grad
            kind = e.kind + ("" if e.persistent else ", not saved") + ", frozen" * is_frozen
            ids = " ".join(f"{k}:{number}" for k, number in e.ids)
            stage = f"{e.stage}" + (f" (+{e.offset})" if e.offset else "")
            live = "=" if e.live == e.canonical else e.live
            shape = "x".join(map(str, e.shape)) or "-"
            rows.append((e.canonical, live, kind, shape, ">".join(e.wrappers), " ".join(e.aliases), ids, stage))
        shown = [i for i in range(len(rows[0])) if i < 4 or any(row[i] not in ("", "0") for row in rows[1:])]
        widths = {i: max(len(row[i]) for row in rows) for i in shown}
        return "\n".join("  ".join(row[i].ljust(widths[i]) for i in shown).rstrip() for row in rows)

    def __repr__(self) -> str:
        return f"FqnMap({len(self)} names)"


@renamed()
def fqn_map(model: Models, *optimizers: Optimizer, modifiers: str = "_fqn_modifiers") -> FqnMap:
    """Map the live names of a model, or of a list of modules, to canonical names.

    Raises NormalizationError if two different tensors have the same canonical name, or two
    optimizers have the same parameter.
    """
    live = LiveModel(model, modifiers)
    live_optimizers = LiveOptimizers(live, optimizers)
    entries = [_entry(slot, live, live_optimizers) for slot in live.slots]
    known = {entry.canonical for entry in entries}
    outside = [one for own in live_optimizers.parameters for one in own if one.name not in known]
    return FqnMap((*entries, *map(_outside, outside)))


def _entry(slot: StateEntry, live: LiveModel, optimizers: LiveOptimizers) -> FqnEntry:
    one = optimizers.by_name.get(slot.name) if slot.kind == "parameter" else None
    return FqnEntry(
        live=slot.live,
        canonical=slot.name,
        kind=slot.kind,
        wrappers=slot.wrappers,
        aliases=tuple(name for name in live.aliases(slot) if name != slot.name),
        ids=() if one is None else ((one.optimizer, one.id),),
        stage=slot.stage,
        offset=_offset(slot.name, live.stages[slot.stage]),
        persistent=slot.persistent,
        requires_grad=slot.value is not None and slot.value.requires_grad,
        shape=slot.shape,
    )


def _outside(one: OptimizedParameter) -> FqnEntry:
    ids = ((one.optimizer, one.id),)
    trained = one.parameter.requires_grad
    return FqnEntry("", one.name, "parameter", (), (), ids, 0, 0, False, trained, one.shape)


def _offset(name: str, stage: Stage) -> int:
    return max((by for path, by in stage.offsets.items() if name.startswith(f"{path}." if path else "")), default=0)
