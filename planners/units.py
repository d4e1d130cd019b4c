"""Sizes and times for people."""

from __future__ import annotations

__all__ = ["format_bytes", "format_seconds"]


def format_bytes(nbytes: float) -> str:
    """A size: `"1.5 MiB"`."""
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    value, unit = float(nbytes), 0
    while abs(value) >= 1024 and unit < len(units) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {units[unit]}" if unit == 0 else f"{value:.1f} {units[unit]}"


def format_seconds(seconds: float) -> str:
    """A time: `"85 ms"`, `"4.2 s"`, `"3.1 min"`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
