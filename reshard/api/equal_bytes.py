"""Finds stored tensors with equal bytes on both sides of a comparison, without decoding elements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from reshard.api.task_shares import Share
from reshard.errors import CheckpointError
from reshard.stored.tensor import ByteRun, LazyTensor, run_of

_SMALL_BYTES = 64 << 10
"""Stored tensors up to this size are first compared as bytes, together with their neighbors in the files."""
_SPAN_BYTES = 1 << 20
"""Neighbors are read together up to this size."""


def equal_as_bytes(left: Mapping[str, Any], right: Mapping[str, Any], share: Share) -> set[str]:
    """Return the small stored tensors with equal bytes on both sides. Near damage, they are
    compared one by one."""
    runs = []
    for name, box in share:
        x, y = left[name], right[name]
        if isinstance(x, LazyTensor) and isinstance(y, LazyTensor) and box.numel * x.stored.itemsize <= _SMALL_BYTES:
            with suppress(CheckpointError):
                one, other = run_of(x.stored, box), run_of(y.stored, box)
                if one and other:
                    runs.append((name, one, other))
    equal: set[str] = set()
    for span in _spans(runs):
        with suppress(CheckpointError):
            equal.update(_equal_in(span))
    return equal


def _spans(runs: list[tuple[str, ByteRun, ByteRun]]) -> list[list[tuple[str, ByteRun, ByteRun]]]:
    """Join runs that are consecutive in the files of both sides."""
    spans: list[list[tuple[str, ByteRun, ByteRun]]] = []
    for name, one, other in sorted(runs, key=lambda run: (run[1].source.label, run[1].start)):
        if spans:
            _, first, _ = spans[-1][0]
            _, last, before = spans[-1][-1]
            follows = (last.source, last.stop, before.source, before.stop) == (*one[:2], *other[:2])
            if follows and one.stop - first.start <= _SPAN_BYTES:
                spans[-1].append((name, one, other))
                continue
        spans.append([(name, one, other)])
    return spans


def _equal_in(span: list[tuple[str, ByteRun, ByteRun]]) -> Iterator[str]:
    """Yield the runs that are equal. Raises CorruptCheckpointError for bytes that are missing or
    were changed on one side."""
    _, x, y = span[0]
    nbytes = span[-1][1].stop - x.start
    a, b = (bytes(run.source.read(run.start, nbytes, elements=True)) for run in (x, y))
    for name, run, _ in span:
        part = slice(run.start - x.start, run.stop - x.start)
        if a[part] == b[part]:
            yield name
