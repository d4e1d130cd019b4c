"""`import planners` in a fresh interpreter: quick, and without torch."""

from __future__ import annotations

import subprocess
import sys

LOADED = "import sys, time; t = time.process_time(); import planners; s = time.process_time() - t; "


def fresh(code):
    done = subprocess.run([sys.executable, "-c", LOADED + code], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


def test_it_loads_neither_torch_nor_what_only_tests_and_reshard_need():
    unwanted = ("torch", "reshard", "hypothesis", "msgspec", "safetensors", "rich", "typer")

    assert fresh(f"print([name for name in {unwanted!r} if name in sys.modules])") == "[]"


def test_it_takes_under_three_tenths_of_a_second():
    # numpy is a third of it; processor time, the best of three, since other work may share the machine
    assert min(float(fresh("print(s)")) for _ in range(3)) < 0.3


def test_every_public_name_is_there():
    import planners

    layouts = ["Box", "Mesh", "Shard", "StridedShard", "Replicate", "TensorSpec", "TensorLayout", "StateLayout", "View"]
    plans = ["Topology", "plan_reads", "plan_writes", "verify", "replay", "dumps", "loads", "format_plan"]

    assert [name for name in (*layouts, *plans) if not hasattr(planners, name)] == []
