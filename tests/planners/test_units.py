"""Counts, sizes, and times for people."""

from __future__ import annotations

import pytest

from planners.units import format_bytes, format_count, format_rate, format_seconds, format_some


def test_counts():
    assert [format_count(n, "tensor") for n in (0, 1, 2)] == ["0 tensors", "1 tensor", "2 tensors"]
    assert format_count(86393856, "item") == "86,393,856 items"
    assert format_count(2, "geometry") == "2 geometries"


def test_the_first_of_many():
    assert format_some([]) == ""
    assert format_some(["a", "b"], 2) == "a, b"
    assert format_some(range(7)) == "0, 1, 2, 3, 4 and 2 more"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (1 << 40, "1.0 TiB"),
        (5 << 60, "5120.0 PiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_sizes(nbytes, text):
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [(0, "0 B/s"), (999, "999 B/s"), (1000, "1 kB/s"), (2e9, "2 GB/s"), (2.5e9, "2.5 GB/s"), (1e16, "1e+04 TB/s")],
)
def test_rates(rate, text):
    assert format_rate(rate) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 µs"), (2.5e-6, "2.5 µs"), (0.085, "85 ms"), (4.2, "4.2 s"), (186.0, "3.1 min")],
)
def test_times(seconds, text):
    assert format_seconds(seconds) == text
