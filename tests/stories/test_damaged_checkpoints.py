"""A share of the matrix, always the same one; `make nightly` tries 10,000 damages beyond it."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from reshard.cli import verify
from tests.damage.damages import DAMAGES
from tests.damage.formats import FORMATS
from tests.damage.matrix import Cell, Checkpoints, Outcome, Result, any_folder, cells, random_cell, readers_of
from tests.damage.ranks import WAYS, results_together, some_cells
from tests.damage.readers import MEANINGS, READERS

pytestmark = pytest.mark.host_only("it is about what is read from files")

SHARES = {
    "kept": 3,
    "files of ranks": 80,
    "native": 22,
    "native chain": 22,
    "dcp": 22,
    "orbax ocdbt": 20,
    "deepspeed pipeline": 30,
}
"""One of so many cells of a format is tried here: few of those that take long, more where there are few."""
SHARE = 45
"""The same of all others."""


def tried_here(checkpoints: Checkpoints, format: str) -> list[Cell]:
    """The cells of a format that are tried, always the same ones."""
    share = SHARES.get(format, SHARE)
    # a reader of one format has few cells
    return [
        cell
        for cell in cells(checkpoints, format)
        if cell.is_in_share(min(share, 8) if READERS[cell.reader].only else share)
    ]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoints]:
    import tempfile

    with tempfile.TemporaryDirectory(dir=any_folder() or tmp_path_factory.mktemp("damage")) as folder:
        yield Checkpoints(Path(folder))


def _all_found(results: list[Result]) -> None:
    bad = [str(result) for result in results if not result.outcome.is_allowed]
    assert not bad, f"{len(bad)} of {len(results)}, again by python -m tests.damage --cell ...\n" + "\n".join(bad[:20])


@pytest.mark.parametrize("format", FORMATS)
def test_damage_is_found_or_told_to_be_unchecked(format: str, checkpoints: Checkpoints) -> None:
    results = [checkpoints.run(cell) for cell in tried_here(checkpoints, format)]
    _all_found(results)
    assert Counter(result.outcome for result in results)[Outcome.REFUSED] > 2


@pytest.mark.gloo
def test_and_by_ranks_that_read_together(checkpoints: Checkpoints, tmp_path: Path) -> None:
    tried = some_cells(checkpoints, 60, seed=0)
    assert {cell.reader for cell in tried} == {*WAYS}
    _all_found(results_together(tried, tmp_path))


@pytest.mark.parametrize("format", ["native", "dcp"])
def test_a_reader_that_looks_at_nothing_is_not_let_through(format: str, checkpoints: Checkpoints) -> None:
    """The judge itself: what is read with `check=False` and passed off as checked."""
    import reshard
    from tests.damage.matrix import judged
    from tests.damage.readers import Read

    cell = Cell(format, "open, whole", "data", "byte")
    changes, where = checkpoints.planned(cell)
    scene = checkpoints[format].scene("damaged")

    def read(check: bool = False) -> Read:
        checkpoint = reshard.open(scene.path, check=check)
        return Read({name: tensor[...] for name, tensor in checkpoint.items()}, "ok" if not check else repr(checkpoint))

    wanted = read()
    with checkpoints[format].damaged(changes):
        assert judged(cell, where, read, wanted).outcome is Outcome.SILENT
        assert judged(cell, where, lambda: read(check=True), wanted).outcome is Outcome.REFUSED
        told = judged(cell, where, lambda: Read(read().values, "unchecked: whatever"), wanted)
        assert told.outcome is Outcome.MISSED  # since there is a checksum of these bytes
    assert judged(cell, where, read, wanted).outcome is Outcome.RIGHT


def test_the_words_by_which_the_command_line_is_understood_are_its_own() -> None:
    """They were not after it was reworded, and what it told to be unchecked counted as silent."""
    its = inspect.getsource(verify)
    assert [words for words in MEANINGS if words not in its] == []


def test_every_reader_format_and_damage_is_in_the_share(checkpoints: Checkpoints) -> None:
    tried = [cell for format in FORMATS for cell in tried_here(checkpoints, format)]
    assert {cell.reader for cell in tried} == {*READERS}
    assert {cell.damage for cell in tried} == {*DAMAGES}
    assert {(cell.format, cell.kind) for cell in tried} == {(f, kind) for f in FORMATS for kind in checkpoints[f].sites}
    assert all(len(readers_of(format)) >= 14 for format in FORMATS if format != "kept")
    assert all(Cell.parse(str(cell)) == cell for cell in tried)


def test_a_seed_gives_the_same_damage_again(checkpoints: Checkpoints, tmp_path: Path) -> None:
    again = Checkpoints(tmp_path / "again")
    for seed in range(30):
        cell = random_cell(checkpoints, seed)
        assert cell == random_cell(again, seed)
        # names have the time in them, and old files of torch.save the addresses of storages
        if not cell.format.startswith("native") and cell.format not in ("kept", "torch_save legacy"):
            assert checkpoints.planned(cell) == again.planned(cell)
