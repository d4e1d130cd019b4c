"""Wrong calls that type checkers must reject: mypy checks this file (`make check`), and reports ignores without an
error.

Nothing imports or runs it.
"""

from pathlib import Path

import torch

import reshard
import reshard.planners
from reshard import planners as same
from reshard.planners import Box, plan_reads

reshard.lod({}, "path")  # type: ignore[attr-defined]
reshard.planners.verfy(None)  # type: ignore[attr-defined]
same.Boxx  # type: ignore[attr-defined]  # noqa: B018
Box("a")  # type: ignore[call-arg, arg-type]
plan_reads({}, {})  # type: ignore[arg-type]

reshard.load({}, "path", dtype_policy="cats")  # type: ignore[arg-type]
reshard.load({}, "path", strict="subste")  # type: ignore[arg-type]
reshard.load({}, "path", read_once="hosts")  # type: ignore[arg-type]
reshard.load({}, "path", strct=False)  # type: ignore[call-arg]
reshard.convert("source", "target", format="safetensor")  # type: ignore[arg-type]
reshard.open("path").shapes  # type: ignore[attr-defined]  # noqa: B018
reshard.save({}, "path").bytes_writen  # type: ignore[attr-defined]  # noqa: B018

reshard.load({}, 3)  # type: ignore[arg-type]
reshard.save({}, 3)  # type: ignore[arg-type]
reshard.async_save({}, {})  # type: ignore[arg-type]
reshard.verify(3.0)  # type: ignore[arg-type]
reshard.compare("path", 3)  # type: ignore[arg-type]
reshard.convert(5, "target")  # type: ignore[arg-type]
reshard.plan("path", 3)  # type: ignore[arg-type]
reshard.layout_of({}).fqn  # type: ignore[attr-defined]  # noqa: B018
reshard.layout_of(torch.nn.Linear(2, 2))  # type: ignore[call-overload]

checkpoint: reshard.Checkpoint = reshard.open(Path("path"))
reshard.load({}, checkpoint.canonical())
reshard.plan(checkpoint, reshard.layout_of({}))
reshard.compare(checkpoint, {"w": torch.ones(2)})
reshard.save({}, Path("path"), select="model.*")
reshard.load({}, "path", strict="subset", dtype_policy="cast", read_once="job")
reshard.convert("source", "target", format="safetensors")
