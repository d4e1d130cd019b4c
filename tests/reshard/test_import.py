"""What is imported by the first call of a fresh interpreter: what it uses, and every name in any order."""

from __future__ import annotations

import inspect
import os
import pkgutil
import subprocess
import sys

import pytest
import torch

import reshard
from reshard.errors import KeyMismatchError
from reshard.formats.native import reader as native
from reshard.formats.opening import composite_formats, plain_formats
from reshard.formats.stored.contents import Format

UNUSED = (
    *(
        "planners.reports.cost",
        "planners.reports.html",
        "planners.reports.plan_codec",
        "planners.topologies.presets",
        "planners.transfer.rounds",
    ),
    *("planners.transfer.plan", "planners.views.view", "planners.views.pullback", "numpy.ma"),
    *(
        "reshard.formats.dcp.reader",
        "reshard.formats.frameworks.deepspeed",
        "reshard.formats.torch_save.file",
        "reshard.formats.pickles.reader",
    ),
    *(
        "reshard.checkpoint.canonical",
        "reshard.execute.messages.exchange",
        "reshard.formats.stored.streaming",
        "reshard.api.convert",
    ),
    *("reshard.api.redistribute", "reshard.mapping", "reshard.execute.messages.read_once", "rich"),
)
"""By no load or save of the native format."""


def imported_by(code, folder, unused):
    """Which of the modules a fresh interpreter has after `code`, beyond what torch imports by itself."""
    before = "import sys, torch, torch.distributed.tensor, torch.distributed.checkpoint; had = set(sys.modules); "
    after = f"; print([name for name in {unused!r} if name in sys.modules and name not in had])"
    state = "import reshard; state = {'w': torch.ones(6, 4), 'b': [torch.ones(3), 1]}; "
    done = subprocess.run(
        [sys.executable, "-c", before + state + code + after],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return eval(done.stdout)


def test_a_load_imports_what_it_uses(tmp_path):
    reshard.save({"w": torch.ones(6, 4), "b": [torch.ones(3), 1]}, tmp_path / "ckpt")

    unused = (*UNUSED, "reshard.control.global_state", "reshard.api.save.saving", "reshard.state.fingerprints")
    assert imported_by("reshard.load(state, 'ckpt')", tmp_path, unused) == []


def test_a_save_imports_what_it_uses(tmp_path):
    unused = (
        *UNUSED,
        "planners.load.plan",
        "reshard.checkpoint.checkpoint",
        "reshard.api.load.loading",
        "reshard.api.load.matching",
    )
    assert imported_by("reshard.save(state, 'ckpt')", tmp_path, unused) == []


def test_opening_imports_what_it_uses(tmp_path):
    reshard.save({"w": torch.ones(6, 4)}, tmp_path / "ckpt")

    unused = (*UNUSED, "planners.proof", "planners.load.plan", "reshard.state.tensors", "reshard.control.group")
    assert imported_by("reshard.open('ckpt')['w'][1:2]", tmp_path, unused) == []


def test_no_module_hides_a_name():
    # importing reshard.x binds x of reshard to the module: then it could not be a function, too
    modules = {module.name for module in pkgutil.iter_modules(reshard.__path__)}

    assert modules & set(reshard.__all__) == set()


@pytest.mark.parametrize("module", [native, *composite_formats(), *plain_formats()], ids=lambda module: module.name)
def test_every_format_offers_what_a_format_does(module):
    assert module.name
    assert module.looks_for
    for verb in ("detect", "open"):
        wanted = [str(p) for p in inspect.signature(getattr(Format, verb)).parameters.values()][1:]
        assert [str(p) for p in inspect.signature(getattr(module, verb)).parameters.values()] == wanted


def test_a_mapping_that_is_none_is_refused(tmp_path):
    reshard.save({"w": torch.ones(3)}, tmp_path)

    with pytest.raises(KeyMismatchError, match=r"must be a dict or a reshard\.mapping\.Mapping, got "):
        reshard.load({"w": torch.ones(3)}, tmp_path, mapping=["w"])
