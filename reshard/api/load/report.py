"""`LoadReport`: the truth about every key of a load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from planners.notebooks import Tabled
from planners.units import format_bytes
from reshard.errors import format_names

__all__ = ["LoadReport"]


@dataclass(frozen=True, repr=False)
class LoadReport(Tabled):
    """What a load did, or in a dry run would do, on this rank."""

    path: str
    format: str
    loaded: tuple[str, ...]
    """Keys that were filled, tensors and objects."""
    missing: tuple[str, ...]
    """Keys of the target that the checkpoint does not have; they keep the values they had."""
    unexpected: tuple[str, ...]
    """Keys of the checkpoint that no rank's target has; they were not read."""
    outside: tuple[str, ...]
    """Keys of the target that the checkpoint, declared a subset when it was saved, does not claim to have."""
    mismatched: tuple[str, ...]
    """Keys whose shape (or, under dtype_policy "error", dtype) differs, with both."""
    dropped: tuple[str, ...]
    """Values of the target that are gone, since a container without tensors was replaced by what was saved of it."""
    cast: Mapping[str, tuple[str, str]]
    """key -> (dtype saved, dtype of the target) of what was converted."""
    replaced: Mapping[str, tuple[str, str]]
    """key -> (dtype saved, dtype that the target had) of what was replaced, by dtype_policy "saved"."""
    aliases: Mapping[str, str]
    """Keys that were filled from another key's tensor, to which they were tied when saved."""
    bytes_needed: int
    """Bytes of this rank's own elements, as saved; under `read_once`, of those that it reads."""
    bytes_read: int
    """Bytes that this rank read of the data files for their elements, its own or those of others of its machine."""
    bytes_read_to_check: int
    """Bytes that were read beside, for nothing but to check those: headers, the rest of a block."""
    bytes_checked: int
    """Bytes that this rank checked against saved checksums, headers included. Of what ranks of a machine read for one
    another, who reads a byte checks it."""
    bytes_unchecked: int
    """Of this rank's own elements: bytes that nobody compared with a checksum, since the format has none, `check` was
    off, or it would have cost too much: see `reshard.formats.stored.checksums.may_check`."""
    unchecked: str
    """In words, what was not compared; empty where every byte was."""
    dry_run: bool
    seconds: Mapping[str, float] = field(compare=False)
    """Time by phase."""
    resized: tuple[str, ...] = ()
    """Extra state of modules that had another shape or dtype than was saved, and was replaced by what was saved."""
    retyped: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """key -> (class saved, class found in its place now) of values that came back as another type: parts of a quantized
    tensor in a dict, a plain dict for an OrderedDict."""
    bytes_received: int = 0
    """Bytes of elements that other ranks read for this one: of its machine, or under `read_once` of the whole job."""

    @property
    def ok(self) -> bool:
        """Whether both sides had the same keys and shapes, nothing of the target is gone, and nothing came back as
        another type than is known to have been saved."""
        return not (self.missing or self.unexpected or self.mismatched or self.dropped or self.retyped)

    def __repr__(self) -> str:
        """One line: what was loaded and read, and the first names of all that did not go as it should."""
        did = "would load" if self.dry_run else "loaded"
        verdict = ", ".join(filter(None, ("ok" if self.ok else "not ok", "" if self.dry_run else self.unchecked)))
        head = f"{verdict}, {did} {len(self.loaded)} of {self.path!r} ({self.format})"
        kinds = ("missing", "unexpected", "outside", "mismatched", "dropped", "cast", "replaced", "resized")
        odd = [f"{kind} {format_names(getattr(self, kind))}" for kind in kinds if getattr(self, kind)]
        if self.retyped:
            odd.append(f"retyped {format_names([f'{key}: {a} -> {b}' for key, (a, b) in self.retyped.items()])}")
        read = f"{format_bytes(self.bytes_read)} read for {format_bytes(self.bytes_needed)} needed"
        return f"LoadReport({', '.join([head, *odd, read])})"
