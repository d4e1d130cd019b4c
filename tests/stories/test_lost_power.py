"""After lost power there is the old or the new checkpoint, whole, and each `fsync` has its reason."""

from __future__ import annotations

import ast
import inspect
import random
from pathlib import Path
from types import ModuleType

import pytest

import reshard
from reshard.api.elastic import generation
from reshard.storage import local
from tests.power.disk import Disk
from tests.power.scenarios import SCENARIOS
from tests.power.trials import recorded, scratch, tried

NEEDED = {
    "local._LocalWriter._commit": "save over",
    "local._LocalWriter._commit of a folder": "save over",
    "local.LocalStorage.publish_while of a folder": "save on a base",
    "local.LocalStorage.commit of a folder": "convert to torch_save",
    "local.LocalStorage.link of a folder": "storage",
    "local.LocalStorage.retract of a folder": "prune",
    "local.make_folder of a folder": "save",
    "generation._sync": "keep",
    "generation._sync of a folder": "keep",
}
"""Where something is synced, and the calls that would leave neither the old nor the new without that."""

RETRACTED = {
    "commit.remove: storage.retract(last)": "prune",
    "commit.unpublish: storage.retract(MANIFEST)": "prune",
    "safetensors.SafetensorsWriter.finish: out.retract(name)": "convert over safetensors",
    "writer.DeepSpeedWriter.finish: out.retract(name)": "convert to deepspeed",
    "writer.TorchCheckpointingWriter.finish: out.retract(METADATA)": "convert sections",
}
"""The same of each line that removes something before others go on: these calls do nothing else but to order."""


def syncs_in(module: ModuleType) -> set[str]:
    """The functions that sync, as recordings name them."""
    found = set()

    def look(node: ast.AST, within: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.FunctionDef | ast.ClassDef)
            if isinstance(child, ast.Call) and within[-1:] != ("sync_folder",):
                called = ast.unparse(child.func)
                kinds = {"os.fsync": "", "sync_folder": " of a folder"}
                if called in kinds:
                    found.add(f"{module.__name__.rpartition('.')[2]}.{'.'.join(within)}{kinds[called]}")
            look(child, (*within, child.name) if named else within)

    look(ast.parse(inspect.getsource(module)), ())
    return found


@pytest.mark.parametrize("name", ["save over", "save on a base", "prune", "convert over safetensors", "keep"])
def test_what_is_found_is_the_old_or_the_new(name):
    with scratch() as folder:
        disk = recorded(SCENARIOS[name], folder / "recorded")
        seen = tried(SCENARIOS[name], disk, random.Random(0), most=3, limit=5)
    assert not seen.violations, seen.violations[0]
    assert seen.different == 5


@pytest.mark.parametrize("name", ["prune", "save with an error"])
def test_what_was_removed_is_not_taken_for_damaged(name):
    """Data without a claim is that of a save whose manifest was lost, so a claim goes when the data has gone."""
    with scratch() as folder:
        disk = recorded(SCENARIOS[name], folder / "recorded")
        seen = tried(SCENARIOS[name], disk, random.Random(0), most=12)
    assert not seen.violations, seen.violations[0]
    assert seen.different > 15


def test_every_sync_is_tried():
    assert syncs_in(local) | syncs_in(generation) == NEEDED.keys()


def test_every_line_that_retracts_is_tried():
    own = {"storage", "stored"}  # through which others retract
    files = [file for file in Path(reshard.__file__).parent.rglob("*.py") if file.parent.name not in own]
    lines = [line.partition("  # ")[0].strip() for file in files for line in file.read_text().splitlines()]
    assert sorted(line for line in lines if ".retract(" in line) == sorted(
        site.partition(": ")[2] for site in RETRACTED
    )


@pytest.mark.parametrize(("site", "name"), sorted((NEEDED | RETRACTED).items()))
def test_without_any_one_sync_something_is_lost(site, name):
    scenario = SCENARIOS[name]
    with scratch() as folder:
        disk = recorded(scenario, folder / "recorded")
        assert site in disk.sites()
        seen = tried(scenario, disk, random.Random(0), most=40, without=frozenset([site]), stop_at=1)
    assert seen.violations


def test_a_change_that_is_not_recorded_is_noticed(tmp_path):
    disk = Disk(tmp_path)

    def change() -> None:
        with disk.recording():
            (tmp_path / "unseen").write_bytes(b"by Python's own files")

    with pytest.raises(AssertionError, match="behind our back"):
        change()
