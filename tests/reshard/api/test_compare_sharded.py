"""`compare` of a sharded state with a checkpoint: each rank compares what it holds, and all say the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import reshard
from tests import gloo
from tests.reshard.api import compare_jobs
from tests.reshard.api.live_layouts import truth

pytestmark = pytest.mark.gloo


def test_a_changed_element_is_found_in_every_layout_and_named_by_all_ranks(tmp_path: Path) -> None:
    reshard.save(truth(), tmp_path / "c")
    for tried in gloo.run(compare_jobs.compared, 8, str(tmp_path / "c")):
        assert len(tried) == 24
        for name, changing, element, findings in tried:
            if element is None:  # this rank holds nothing of it
                assert not findings, name
                continue
            (finding,) = findings
            assert finding.fqn == "w"
            assert finding.element == element, name
            assert finding.rank == changing, name
            assert finding.message.startswith("1 of 130 elements differ; the first: "), name
    assert any(element is not None for _, _, element, _ in tried)


def test_other_values_and_measures_of_a_sharded_state(tmp_path: Path) -> None:
    gloo.run(compare_jobs.others, 8, str(tmp_path / "c"))


def test_ranks_without_sharded_tensors_take_part_if_a_group_is_passed(tmp_path: Path) -> None:
    for said in gloo.run(compare_jobs.without_process_group, 4, str(tmp_path / "c"))[:2]:
        assert "ranks 2-3 did not reach" in said
        assert "compare without process_group=, in which only ranks with sharded tensors take part" in said


def test_a_copy_that_drifted_is_found(tmp_path: Path) -> None:
    for findings in gloo.run(compare_jobs.a_drifted_copy, 8, str(tmp_path / "c")):
        (finding,) = findings
        assert (finding.fqn, finding.rank, finding.element) == ("w", 6, (1, 2))
        assert finding.message == "1 of 16 elements differ; the first: 1 -> 5"


def test_stages_that_shard_a_tensor_in_several_ways(tmp_path: Path) -> None:
    reshard.save({"w": torch.arange(16.0).view(4, 4)}, tmp_path / "c")
    for same, other, *gaps in gloo.run(compare_jobs.in_several_ways, 4, str(tmp_path / "c")):
        assert same.ok
        assert (same.covered.read_bytes, same.covered.total_bytes) == (64, 64)
        (finding,) = other.findings
        assert finding.message == "at most 2 of 16 elements differ; the first: 0 -> 1"
        for gap in gaps:
            (finding,) = gap.findings
            assert finding.message == "4 of 16 elements were not compared: no rank has them"


def test_buffers_that_another_rank_overwrites_are_not_compared(tmp_path: Path) -> None:
    from reshard.live.tensors import mark_overwritten

    reshard.save({"mean": torch.zeros(3), "w": torch.ones(2)}, tmp_path / "c")
    state = {"mean": mark_overwritten(torch.ones(3), 1), "w": torch.ones(2)}
    report = reshard.compare(tmp_path / "c", state)
    assert report.ok
    assert "8 B of 20 B" in report.covers
    assert "not compared: 1 ('mean'), whose elements another rank will overwrite" in report.covers
    covered = reshard.verify(tmp_path / "c", against=state).covered
    assert covered is not None
    assert "not compared: 1 ('mean'), whose elements another rank will overwrite" in covered.unchecked
