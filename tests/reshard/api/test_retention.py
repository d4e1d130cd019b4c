"""What `prune` deletes while others save, and what it says of leftovers."""

from __future__ import annotations

import pytest
import torch

import reshard
from reshard.api import retention


@pytest.mark.parametrize("after", ["complete", "is_alive", "unpublish"])
def test_pruning_leaves_what_was_saved_anew_since_it_was_chosen(after, tmp_path, monkeypatch) -> None:
    """By a job that went back to step 1. Its new checkpoint was once deleted."""
    for step in (1, 2, 3):
        reshard.save({"w": torch.ones(4)}, tmp_path / f"step-{step}")
    real, new = getattr(retention, after), []

    def late(*args):
        found = real(*args) if after == "complete" else None
        if not new and (after == "complete" or args[0].url.endswith("step-2")):
            new.append(reshard.save({"w": torch.zeros(4)}, tmp_path / "step-2"))
        return found or real(*args)

    monkeypatch.setattr(retention, after, late)
    assert reshard.prune(tmp_path, keep_last=1) == [str(tmp_path / "step-1")]

    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-3"]
    assert reshard.verify(tmp_path / "step-2").ok
    assert reshard.open(tmp_path / "step-2")["w"][...].tolist() == [0.0] * 4
    assert len(list((tmp_path / "step-2").glob("data-*"))) == 1


def saved(folder, *names) -> None:
    for number, name in enumerate(names):
        reshard.save({"w": torch.full((3,), float(number)), "name": name}, folder / name)


def left(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_step_that_a_link_leads_to_stays(tmp_path) -> None:
    """`best -> step-1` once led nowhere after `prune`."""
    saved(tmp_path, "step-1", "step-2", "step-3", "step-4")
    (tmp_path / "best").symlink_to("step-1")
    (tmp_path / "best.json").symlink_to("step-2/manifest.json")
    (tmp_path / "gone").symlink_to("step-99")

    would = reshard.prune(tmp_path, keep_last=1, dry_run=True)

    assert reshard.prune(tmp_path, keep_last=1) == would == [str(tmp_path / "step-3")]
    assert left(tmp_path) == {"best", "best.json", "gone", "step-1", "step-2", "step-4"}
    assert reshard.open(tmp_path / "best").objects["name"] == "step-1"


def test_a_step_that_is_a_link_counts_and_stays(tmp_path) -> None:
    saved(tmp_path, "step-1", "step-2", "step-3")
    (tmp_path / "step-9").symlink_to("step-1")
    newest = reshard.latest_complete(tmp_path)

    assert reshard.prune(tmp_path, keep_last=1) == [str(tmp_path / "step-2")]  # step-3 was saved last
    assert newest == reshard.latest_complete(tmp_path) == str(tmp_path / "step-9")


def test_what_links_lead_to_in_other_folders_stays(tmp_path) -> None:
    """A folder of links, such as a view of a run on another disk."""
    saved(tmp_path / "run", "step-1", "step-2", "step-3")
    (tmp_path / "view").mkdir()
    for number in (1, 2, 3):
        (tmp_path / "view" / f"step-{number}").symlink_to(f"../run/step-{number}")

    assert reshard.prune(tmp_path / "view", keep_last=1) == []
    assert reshard.latest_complete(tmp_path / "view") == str(tmp_path / "view" / "step-3")
    assert len(left(tmp_path / "view")) == len(left(tmp_path / "run")) == 3


@pytest.mark.parametrize(
    ("names", "newest"),
    [
        (("last", "step-1", "step-2"), "step-2"),
        (("step-1", "last", "step-2"), "step-2"),
        (("step-1", "step-2", "last"), "last"),
        (("step-10", "step-2", "last"), "last"),  # the run went back
    ],
)
def test_a_native_last_is_as_old_as_its_save(names, newest, tmp_path) -> None:
    saved(tmp_path, *names)

    assert reshard.latest_complete(tmp_path) == str(tmp_path / newest)
    assert reshard.open(tmp_path).objects["name"] == newest
    assert reshard.steps(tmp_path)[-1].path == str(tmp_path / newest)


def test_a_last_that_is_older_than_a_step_being_saved_is_not_the_newest(tmp_path) -> None:
    saved(tmp_path, "last", "step-1", "step-2")
    (tmp_path / "step-2" / "manifest.json").unlink()

    assert reshard.latest_complete(tmp_path) == str(tmp_path / "step-1")


def test_a_native_last_stays_and_does_not_count(tmp_path) -> None:
    saved(tmp_path, "step-1", "step-2", "step-3", "last")

    assert len(reshard.prune(tmp_path, keep_last=1)) == 2
    assert left(tmp_path) == {"step-3", "last"}


@pytest.mark.parametrize("place", ["", "memory://a-run-that-is-pruned"])
def test_a_step_that_is_removed_while_steps_are_listed_is_left_out(place, tmp_path, monkeypatch) -> None:
    place = place or str(tmp_path)
    for step in (1, 2):
        reshard.save({"w": torch.ones(4)}, f"{place}/step-{step}")
    real = retention.open_checkpoint

    def late(path):
        monkeypatch.setattr(retention, "open_checkpoint", real)
        reshard.prune(place, keep_last=1)
        return real(path)

    monkeypatch.setattr(retention, "open_checkpoint", late)
    assert [(step.step, step.problem) for step in reshard.steps(place)] == [(2, None)]


def test_of_names_without_numbers_nothing_is_pruned(tmp_path) -> None:
    saved(tmp_path, "last", "best")

    with pytest.raises(reshard.errors.FormatError, match="have no step numbers"):
        reshard.prune(tmp_path, keep_last=1)
    assert left(tmp_path) == {"last", "best"}
