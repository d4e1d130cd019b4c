"""What is imported by the first call of a fresh interpreter: what it uses, and every name in any order."""

from __future__ import annotations

import inspect
import os
import pkgutil
import re
import subprocess
import sys
from typing import get_args

import pytest
import torch

import reshard
from reshard.errors import OptionError
from reshard.formats.table import ALSO_CALLED, FORMATS, WRITTEN, FormatName, find_format, find_normalizer, writing_of
from reshard.live.tensors import warn_if_untried
from reshard.stored.streaming import FormatWriter

UNUSED = (
    *(
        "planners.plans.cost",
        "planners.reports.plan_pages",
        "planners.plans.plan_codec",
        "planners.geometry.topologies",
        "planners.plans.schedule",
    ),
    *("planners.plans.transfer", "planners.geometry.views", "planners.geometry.views", "numpy.ma"),
    *(
        "reshard.formats.dcp.reader",
        "reshard.formats.deepspeed.files",
        "reshard.formats.torch_save.reader",
        "reshard.formats.torch_save.pickles",
    ),
    *(
        "reshard.formats.normalize",
        "reshard.execute.exchange",
        "reshard.stored.streaming",
        "reshard.api.convert",
    ),
    *("reshard.api.redistribute", "reshard.mapping", "reshard.execute.exchange", "rich", "reshard.ranks.telemetry"),
)
"""By no load or save of the native format."""


OF_OTHERS = (
    *("torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.distributed._shard"),
    *("torch.fx.experimental.symbolic_shapes", "torch._dynamo", "torch._inductor", "sympy", "networkx"),
    *("safetensors", "fsspec", "rich", "typer", "asyncio", "multiprocessing.pool", "http.client", "numpy.testing"),
    "opentelemetry.trace",
)
"""What takes long to import, and a state of plain tensors has no use for."""


def printed_by(code, folder):
    """By a fresh interpreter, in a folder."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return done.stdout


def imported_by(code, folder, unused):
    """Which of the modules a fresh interpreter has after `code`, beyond what torch imports by itself."""
    before = "import sys, torch; had = set(sys.modules); "
    after = f"; print([name for name in {unused!r} if name in sys.modules and name not in had])"
    state = "import reshard; state = {'w': torch.ones(6, 4), 'b': [torch.ones(3), 1]}; "
    return eval(printed_by(before + state + code + after, folder))


def test_a_load_imports_what_it_uses(tmp_path):
    reshard.save({"w": torch.ones(6, 4), "b": [torch.ones(3), 1]}, tmp_path / "ckpt")

    unused = (*UNUSED, "reshard.ranks.global_state", "reshard.api.save", "reshard.live.fingerprints")
    assert imported_by("reshard.load(state, 'ckpt')", tmp_path, unused) == []


def test_a_save_imports_what_it_uses(tmp_path):
    unused = (
        *UNUSED,
        "planners.plans.load",
        "reshard.checkpoint",
        "reshard.api.load",
        "reshard.api.load_matching",
    )
    assert imported_by("reshard.save(state, 'ckpt')", tmp_path, unused) == []


def test_opening_imports_what_it_uses(tmp_path):
    reshard.save({"w": torch.ones(6, 4)}, tmp_path / "ckpt")

    unused = (*UNUSED, "planners.plans.load", "reshard.live.tensors", "reshard.ranks.group")
    assert imported_by("reshard.open('ckpt')['w'][1:2]", tmp_path, unused) == []


def test_plain_tensors_need_nothing_that_is_for_sharded_ones(tmp_path):
    calls = [
        "reshard.save(state, 'ckpt')",
        "reshard.load(state, 'ckpt')",
        "reshard.async_save(state, 'later').result()",
        "reshard.open('ckpt')['w'][1:2]",
        "reshard.verify('ckpt')",
        "reshard.compare('ckpt', state)",
        "reshard.layout_of(state)",
        "model = torch.nn.Linear(2, 2)",
        "reshard.set_model_state_dict(model, reshard.get_model_state_dict(model))",
    ]
    assert imported_by("; ".join(calls), tmp_path, OF_OTHERS) == []


def test_a_dtensor_is_known_though_its_class_came_after_the_first_save(tmp_path):
    """Whichever path it came by: the classes that were seen before are remembered as plain ones."""
    code = """
import sys, warnings, torch, reshard
import torch.distributed as dist
warnings.simplefilter("ignore")
reshard.save({"w": torch.ones(4)}, "before")
assert "torch.distributed.tensor" not in sys.modules
from torch.distributed._tensor import DTensor, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
class Own(DTensor):
    pass
values = torch.arange(6.0).view(3, 2)
whole, mine = DTensor.from_local(values, mesh, [Replicate()]), DTensor.from_local(values, mesh, [Shard(0)])
own = Own(values.clone(), mine._spec, requires_grad=False)
reshard.save({"whole": whole, "mine": mine, "own": own, "plain": values}, "after")
stored = reshard.open("after").layout
print([repr(stored[key].form.placements) for key in ("whole", "mine", "own")])
empty = {key: DTensor.from_local(torch.zeros(3, 2), mesh, [Shard(0)]) for key in ("whole", "mine", "own")}
reshard.load(empty, "after", strict=False)
print([torch.equal(one.to_local(), values) for one in empty.values()])
try:
    reshard.save({"w": DTensor.from_local(values, mesh, [Partial()])}, "refused")
except reshard.ReshardError as error:
    print(error)
dist.destroy_process_group()
"""
    forms, loaded, refused = printed_by(code, tmp_path).splitlines()

    assert eval(forms) == ["(Replicate(),)", "(Shard(dim=0),)", "(Shard(dim=0),)"]
    assert eval(loaded) == [True, True, True]
    assert "pending reduction" in refused


@pytest.mark.parametrize("enabled", [True, False])
def test_little_is_collected_while_names_are_imported(tmp_path, enabled):
    """Nothing of what torch left there is gone through, and collection is afterwards as it was before."""
    code = f"""
import gc, torch, reshard
gc.collect()
{"" if enabled else "gc.disable()"}
seen = set()
gc.callbacks.append(lambda phase, info: seen.add(info["generation"]))
reshard.save, reshard.load
print(seen - {{0}}, gc.isenabled())
"""
    assert printed_by(code, tmp_path) == f"set() {enabled}\n"


@pytest.mark.parametrize("module", ["mapping", "storage", "errors", "api", "dcp"])
def test_a_submodule_can_be_imported_first(module, tmp_path):
    assert "found" in printed_by(f"from reshard import {module}; print('found', {module}.__name__)", tmp_path)


def test_no_module_hides_a_name():
    # importing reshard.x binds x of reshard to the module: then it could not be a function, too
    modules = {module.name for module in pkgutil.iter_modules(reshard.__path__)}

    assert modules & set(reshard.__all__) == set()


@pytest.mark.parametrize("row", FORMATS, ids=lambda row: row.name)
def test_every_line_of_the_table_is_a_format(row):
    found = find_format(row.name)

    assert found.name == row.name
    assert list(inspect.signature(found.detect).parameters) == ["storage", "names"]
    assert list(inspect.signature(found.open).parameters) == ["files"]
    assert bool(row.writer) == (row.name in WRITTEN)
    if row.writer:
        assert issubclass(writing_of(row.name).writer, FormatWriter)
    if row.normalizer:
        assert list(inspect.signature(find_normalizer(row.name)).parameters) == ["contents", "hints", "what"]


def test_a_mapping_that_is_none_is_refused(tmp_path):
    reshard.save({"w": torch.ones(3)}, tmp_path)

    with pytest.raises(OptionError, match=r"must be a dict of names or a reshard\.mapping\.Mapping, such as .*, got "):
        reshard.load({"w": torch.ones(3)}, tmp_path, mapping=["w"])


def test_planners_are_the_same_modules_under_the_roof_of_reshard():
    """Not loaded twice, by whatever name and in whatever order; and without torch."""
    code = """
import sys
import reshard
at_once = reshard.planners
from reshard.planners.geometry.box import Box
from reshard.planners.testing import replay
import planners, planners.geometry.box, reshard.planners.units
assert at_once is planners is reshard.planners and Box is planners.Box is planners.geometry.box.Box
assert replay.replay is planners.replay and reshard.planners.units is sys.modules["planners.units"]
assert (planners.__name__, planners.geometry.__spec__.name) == ("planners", "planners.geometry")
assert "torch" not in sys.modules
try:
    import reshard.planners.nothing
except ModuleNotFoundError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert done.stdout == "No module named 'planners.nothing'\n"


@pytest.mark.parametrize("path", ["planners.py", "planners/__init__.py"])
@pytest.mark.parametrize("code", ["import reshard", "import planners, reshard", "import reshard.mapping"])
def test_planners_of_the_users_own_are_named(path, code, tmp_path):
    """Beside the script, and so first on the path: ours cannot be imported by its name."""
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text("routes = []\n")
    (tmp_path / "script.py").write_text(f"try:\n    {code}\nexcept ImportError as error:\n    print(error)\n")

    found = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=True)

    ours = os.path.join(os.path.dirname(os.path.dirname(reshard.__file__)), "planners")
    assert found.stdout == (
        f"reshard needs its own package planners, in {ours}, but Python finds {tmp_path / path} first: rename that, "
        "or remove its folder from sys.path\n"
    )


def test_a_folder_called_planners_does_no_harm(tmp_path):
    (tmp_path / "planners").mkdir()
    code = "import reshard, torch; reshard.save({'w': torch.ones(2)}, 'c'); print(reshard.planners.__file__)"
    assert printed_by(code, tmp_path) == f"{reshard.planners.__file__}\n"


@pytest.mark.parametrize("version", ["2.6.0", "2.15.3+cu130", "2.13.0a0+git1234"])
def test_torch_as_it_was_tried_is_no_news(version):
    warn_if_untried(version)


@pytest.mark.parametrize("version", ["2.16.0", "3.0.0.dev20270101+cpu", "10.1"])
def test_newer_torch_is_told_once(version):
    with pytest.warns(UserWarning, match=rf"tested with torch 2\.6 to 2\.15, not with {re.escape(version)}\."):
        warn_if_untried(version)


def test_type_checkers_know_the_formats_that_can_be_written() -> None:
    assert set(get_args(FormatName)) == {*WRITTEN, *ALSO_CALLED}
