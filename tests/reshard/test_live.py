"""Live resharding between running ranks: every pair of a dozen layouts, whole models, views, bad input, failures."""

from __future__ import annotations

import itertools

import pytest

from tests import gloo
from tests.reshard import live_jobs
from tests.reshard.live_layouts import LAYOUTS

pytestmark = pytest.mark.gloo

ALL_PAIRS = list(itertools.product(LAYOUTS, LAYOUTS))


@pytest.mark.parametrize(("budget", "pairs"), [(1 << 20, ALL_PAIRS), (1024, ALL_PAIRS[::11])], ids=["wide", "tight"])
def test_every_pair_of_layouts_moves_each_needed_byte_once_and_no_bit_changes(budget, pairs):
    ranks = gloo.run(live_jobs.pairs_job, 8, pairs, budget, timeout_s=280)

    by_pair: dict[tuple[str, str], list[dict]] = {}
    for row in itertools.chain(*ranks):
        by_pair.setdefault(row["pair"], []).append(row)
    assert set(by_pair) == set(pairs)
    for pair, rows in by_pair.items():
        for row in rows:
            report = row["report"]
            assert not row["wrong"], pair
            assert not row["changed"], pair
            assert report.bytes_received == row["least"], pair
            assert report.buffer_bytes <= budget, pair
        moved = {row["report"].bytes_moved for row in rows}
        assert moved == {sum(row["least"] for row in rows)} == {sum(row["report"].bytes_sent for row in rows)}, pair
