"""`Globs` finds what `fnmatch` finds, in order."""

from __future__ import annotations

import fnmatch

import pytest
from hypothesis import given, settings, strategies as st

from planners.geometry.topologies import Globs, literal_segments

SEGMENTS = st.sampled_from(["layers", "1", "17", "w", "experts", "weight", ""])
PARTS = st.sampled_from(["layers", "1", "17", "w", "*", "?", "*w", "[0-9]", "exp*", "a.[.w]b", ""])


@given(
    st.lists(st.lists(PARTS, min_size=1, max_size=4).map(".".join), max_size=6),
    st.lists(SEGMENTS, min_size=1, max_size=5).map(".".join),
)
@settings(deadline=None, derandomize=True, max_examples=1000)
def test_it_finds_what_fnmatch_finds(patterns, name):
    due = [i for i, pattern in enumerate(patterns) if fnmatch.fnmatchcase(name, pattern)]

    globs = Globs(patterns)

    assert list(globs.matching(name)) == due
    assert globs.first(name) == (due[0] if due else None)


@pytest.mark.parametrize(
    ("pattern", "run"),
    [
        ("*.experts.17.*", ("experts", "17")),
        ("layers.0.*", ("layers", "0")),
        ("*layers.3.*", ("3",)),
        ("*.a.*.b.c.*", ("b", "c")),
        ("whole.name", ("whole", "name")),
        ("*", ()),
        ("a.[0-9.]b.c.d", ()),
    ],
)
def test_patterns_are_filed_under_whole_segments(pattern, run):
    assert literal_segments(pattern) == run


def test_thousands_of_patterns_are_not_all_tried():
    globs = Globs([f"*.experts.{e}.*" for e in range(5000)])
    tried = []
    globs._match = [
        lambda name, i=i, match=match: tried.append(i) or match(name) for i, match in enumerate(globs._match)
    ]

    assert globs.first("layers.7.experts.4321.w1.weight") == 4321
    assert tried == [4321]
