"""What is no tensor: counters, learning rates and groups of parameters, carried over as plain data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from planners.geometry.layout import StateLayout
from reshard.api.redistribute.agreement import Side
from reshard.control.global_state import agree_on_values
from reshard.control.group import Group
from reshard.errors import FormatError
from reshard.state.container_types import needs_class, retyped, unmade
from reshard.state.plain_data import decode_plain, encode_plain
from reshard.state.targets import Targets
from reshard.state.tree import IntKey

__all__ = ["Values", "check_replicas"]


class Values:
    """The plain data of a transfer. False if no target of the job wants any."""

    def __init__(self, source: Targets, target: Targets, pairs: dict[str, str]) -> None:
        """`pairs`: target -> source, of the whole job."""
        self._source, self._target, self._pairs = source, target, pairs

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def check_places(self) -> None:
        """Raises FormatError for a value of this rank's target that cannot be replaced where it is."""
        own = [key for key in self._target.per_rank if key in self._source.per_rank]
        self._target.check_places([*own, *(key for key in self._pairs if key in self._target.paths)])

    def gather(self, group: Group) -> dict[str, Any]:
        """Collective: the values of this rank's targets, out of all that the ranks hold now. Changes nothing.

        Raises KeyMismatchError, alike on every rank, for a value that differs between ranks.
        """
        held = self._held()
        merged = agree_on_values({}, held, group, {}, check_replicas=True)
        mine = {key: name for key, name in self._pairs.items() if key in self._target.paths}
        return {key: self._made(key, decode_plain(merged[name])) for key, name in mine.items() if name in merged}

    def _made(self, key: str, value: Any) -> Any:
        """A value in the types that the target has in its place."""
        made = retyped(value, self._target.live(key))
        if (name := unmade(made)) is not None:
            raise FormatError(f"the value under {key!r} is {needs_class(name).removeprefix('saved as ')}")
        return made

    def assign(self, values: dict[str, Any]) -> None:
        """Put them into the target, and what is each rank's own from this rank's source to its target."""
        self._target.assign(values)
        own = {}
        for key, wrapper in self._target.per_rank.items():
            if key in self._source.per_rank:
                own[key] = replace(wrapper, value=self._source.per_rank[key].value)
        self._target.assign(own)

    def _held(self) -> dict[str, Any]:
        wanted = set(self._pairs.values())
        out = {}
        for key in wanted & (self._source.objects.keys() | self._source.units.keys()):
            try:
                out[key] = encode_plain(_at(self._source.root, self._source.paths[key]))
            except FormatError as error:
                raise FormatError(f"the value under {key!r} cannot be sent to other ranks: {error}") from None
        return dict(sorted(out.items()))


def check_replicas(source: Side, before: StateLayout, group: Group, *, on_device: bool) -> None:
    """Collective: compare digests of what several ranks hold alike. `before`: the layout of all sources of the job;
    `on_device`: whether any of them lies on a device.

    Raises KeyMismatchError, alike on every rank, where they differ.
    """
    copied = {key for key, layout in before.items() if int(layout.numels().sum()) > layout.spec.numel}
    mine = {k: t for k, t in source.state.tensors.items() if k in copied and k not in source.layouts}
    if copied:
        agree_on_values(mine, {}, group, before, check_replicas=True, on_device=on_device)


def _at(root: Any, path: tuple[Any, ...]) -> Any:
    for part in path:
        root = root[part.value if isinstance(part, IntKey) else part]
    return root
