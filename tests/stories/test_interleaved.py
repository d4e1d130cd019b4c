"""Complete calls by simulated processes in any order: a few seconds of what `python -m tests.interleaved` does."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import pytest

from reshard.api import redistribute
from reshard.native import commit
from tests.interleaved import scale
from tests.interleaved.scale import counted
from tests.interleaved.trials import VERBS, every_switch, scratch, trial


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """Saves log what they pass over."""
    log = logging.getLogger("reshard")
    level = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(level)


@pytest.fixture
def root() -> Iterator[Path]:
    with scratch() as folder:
        yield folder


@pytest.mark.parametrize("verb", VERBS)
def test_the_old_or_the_new_one_whatever_happens(verb: str, root: Path) -> None:
    for fault in ("none", "kill", "pause", "fail"):
        outcome = trial("ci.0", verb, fault, root=root)
        assert not outcome.violations, f"{outcome.violations}; {outcome.fault}, {outcome.size} ranks"


@pytest.mark.parametrize(
    ("verb", "seed"),
    [
        ("save, prune beside", "d31.4.21"),
        *(("save, base beside", seed) for seed in ("d31.20.21", "d31.47.39", "20261127.1023")),
    ],
)
def test_a_rank_that_is_late_leaves_no_data_of_a_save_that_others_gave_up(verb: str, seed: str, root: Path) -> None:
    assert not trial(seed, verb, "pause", root=root).violations


def test_a_seed_gives_the_same_run_again(root: Path) -> None:
    for verb, fault in (("save, base replaced", "kill"), ("async_save", "pause")):
        first, again = (trial("ci.1", verb, fault, root=root) for _ in range(2))
        assert (first.digest, first.ops, first.tried) == (again.digest, again.ops, again.tried)
        assert first.ops > 100


def test_some_orders_of_two_ranks(root: Path) -> None:
    outcomes = every_switch("save", 2, root=root)
    digests = set()
    for _ in range(12):
        outcome = next(outcomes)
        assert not outcome.violations
        assert outcome.tried == "done"
        digests.add(outcome.digest)
    assert len(digests) > 6


def test_the_first_rank_removes_no_more_for_others_than_a_few_files(root: Path) -> None:
    """Of more ranks than `save.REMOVES_ALONE`: what a save replaces is removed by all, and nothing of it stays."""
    costs = {cost.call: cost for cost in counted(root, 40)}
    first, another = costs["save over it"].files
    assert first - costs["save"].files[0] < 20
    assert another - costs["save"].files[1] < 10
    assert len(list((root / "c").glob("data-*"))) == 1


def test_what_ranks_have_in_common_costs_them_the_same(root: Path) -> None:
    """Where plans are in memory once for all ranks, each does and says what it does with a plan of its own."""
    rows = [[(cost.call, cost.files, cost.store, cost.store_kib) for cost in counted(root / "a", 20)]]
    with mock.patch.object(scale, "common", return_value=nullcontext()):
        rows += [[(cost.call, cost.files, cost.store, cost.store_kib) for cost in counted(root / "b", 20)]]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 3


@contextmanager
def _manifest_before_data() -> Iterator[None]:
    """As if a manifest were published by two steps, the first of which removes the old one."""
    real = commit.Generation.publish

    def publish(self: commit.Generation, *args: object) -> None:
        self.storage.delete("manifest.json")
        real(self, *args)  # type: ignore[arg-type]

    with mock.patch.object(commit.Generation, "publish", publish):
        yield


@contextmanager
def _no_last_look() -> Iterator[None]:
    """As if nobody looked what counts before it publishes."""
    with mock.patch.object(commit.Generation, "_check_current", return_value=None):
        yield


@contextmanager
def _nothing_is_undefined() -> Iterator[None]:
    """As if a transfer that fails midway had moved nothing."""
    with mock.patch.object(redistribute.Prepared, "_undefined", lambda self, error: error):
        yield


@pytest.mark.parametrize(
    ("broken", "verb", "fault", "count"),
    [
        (_manifest_before_data, "save over another", "none", 8),
        (_no_last_look, "save, two jobs", "none", 8),
        (_nothing_is_undefined, "redistribute", "kill", 24),
    ],
)
def test_what_is_broken_on_purpose_is_found(broken, verb: str, fault: str, count: int, root: Path) -> None:
    with broken():
        assert any(trial(f"broken.{i}", verb, fault, root=root).violations for i in range(count))
