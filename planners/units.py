"""Numbers, sizes, and times for people."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["format_bytes", "format_count", "format_each", "format_rate", "format_seconds", "format_some"]


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(nbytes: float) -> str:
    """A size: `"1.5 MiB"`."""
    return _in_unit(nbytes, _unit_of(nbytes))


def format_each(sizes: Sequence[float]) -> list[str]:
    """Return sizes for a column, all in the unit of the largest: `["1.5 MiB", "0.1 MiB", "<0.1 MiB"]`."""
    unit = max(map(_unit_of, sizes), default=0)
    return [_in_unit(size, unit) for size in sizes]


def _unit_of(nbytes: float) -> int:
    value, unit = abs(nbytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return unit


def _in_unit(nbytes: float, unit: int) -> str:
    value = nbytes / 1024**unit
    if unit == 0 or not value:
        return f"{value:.0f} {_UNITS[unit]}"
    return f"<0.1 {_UNITS[unit]}" if 0 < value < 0.05 else f"{value:.1f} {_UNITS[unit]}"


def format_count(number: int, what: str) -> str:
    """Return a number with its noun: `"1 tensor"`, `"2,000 tensors"`, `"2 entries"`, `"2 keys"`."""
    many = f"{what[:-1]}ies" if what.endswith("y") and what != "key" else f"{what}s"
    return f"{number:,} {what if number == 1 else many}"


def format_some(names: Sequence[object], most: int = 5) -> str:
    """The first of many: `"'a', 'b' and 3 more"`."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def format_rate(bytes_per_s: float) -> str:
    """A rate, in powers of 1000 as vendors give it: `"2 GB/s"`."""
    unit = min(max(math.floor(math.log10(max(bytes_per_s, 1)) / 3 + 1e-9), 0), 4)
    return f"{bytes_per_s / 1000**unit:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[unit]}/s"


def format_seconds(seconds: float) -> str:
    """A time: `"85 ms"`, `"4.2 s"`, `"3.1 min"`."""
    if seconds < 999.5e-6:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
