"""`import planners` in a fresh interpreter: quick, without torch, and every name is what it is in whatever order."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import planners

NAMES = "names = [(name, type(getattr(planners, name)).__name__) for name in planners.__all__]"
SUBMODULES = [
    m.name.removeprefix("planners.")
    for m in pkgutil.walk_packages(planners.__path__, "planners.")
    if m.name != "planners.testing.strategies"  # for tests only
]
MODULES = f"[importlib.import_module('planners.' + name) for name in {SUBMODULES}]"


def fresh(code):
    code = "import importlib, sys, time; t = time.process_time(); import planners\n" + code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


def test_it_loads_neither_torch_nor_what_only_tests_and_reshard_need():
    unwanted = ("torch", "reshard", "hypothesis", "msgspec", "safetensors", "rich", "typer")

    assert fresh(f"{NAMES}\n{MODULES}\nprint([name for name in {unwanted!r} if name in sys.modules])") == "[]"


def test_all_of_it_takes_little():
    # an eighth of a second of processor time where nothing else runs, and numpy is a third of it; torch would take two
    assert min(float(fresh(f"{NAMES}\nprint(time.process_time() - t)")) for _ in range(3)) < 0.8


def test_every_public_name_is_there():
    layouts = ["Box", "Mesh", "Shard", "StridedShard", "Replicate", "TensorSpec", "TensorLayout", "StateLayout", "View"]
    plans = ["Topology", "plan_reads", "plan_writes", "verify", "replay", "dumps", "loads", "format_plan"]

    assert [name for name in (*layouts, *plans) if not hasattr(planners, name)] == []
    assert set(planners.__all__) <= set(dir(planners))
    with pytest.raises(AttributeError, match="'planners' has no attribute 'shedule': did you mean 'schedule'"):
        _ = planners.shedule


def test_no_module_hides_a_name():
    # importing planners.x binds x of planners to the module: then it could not be a function, too
    assert set(SUBMODULES) & set(planners.__all__) == set()


@pytest.mark.parametrize("order", [(NAMES, MODULES), (MODULES, NAMES)], ids=["names first", "modules first"])
def test_names_are_the_same_in_any_order(order):
    kinds = dict(eval(fresh("\n".join((*order, NAMES, "print(names)")))))

    assert list(kinds) == planners.__all__
    assert {name: kind for name, kind in kinds.items() if kind not in ("type", "ABCMeta", "function")} == {
        "LLAMA_TP_DIMS": "dict",
        "Placement": "UnionType",
    }


def test_a_plan_is_read_and_proved_without_what_draws_costs_and_schedules():
    code = (
        "from planners import StateLayout, TensorLayout, TensorSpec, dumps, loads, plan_reads, plan_writes, verify\n"
        "spec = TensorSpec('w', (4,), 'float32')\n"
        "state = StateLayout({'w': TensorLayout.from_flat_ranges(spec, {0: (0, 4)})})\n"
        "print(verify(plan_writes(loads(dumps(state)))).ok, verify(plan_reads(state, state)).ok)\n"
        "print([name for name in sys.modules if name.startswith('planners.')])"
    )
    proved, imported = fresh(code).splitlines()

    assert proved == "True True"
    unused = {"reports.cost", "reports.diff", "reports.html", "reports.plan_codec", "reports.text", "reports.summary"}
    unused |= {"topologies.presets", "topologies.topology", "testing.replay"}
    assert unused & {name.removeprefix("planners.") for name in eval(imported)} == set()
