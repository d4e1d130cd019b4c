"""What type checkers see of wrong calls: mypy checks this file (`make check`), and an ignore without an error is one.

Nothing imports it, and nothing in it is run.
"""

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

reshard.load({}, "path", strict="subset", dtype_policy="cast", read_once="job")
reshard.convert("source", "target", format="safetensors")
