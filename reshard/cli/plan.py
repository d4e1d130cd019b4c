"""`reshard plan`: what a change of topology would read, per rank, and whether that is right."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reshard.cli.names import HintOption, read_hints
from reshard.cli.show import console, counted, print_json, size
from reshard.cli.sides import Rules, both_sides, rules_of
from reshard.cli.usage import size_in_bytes

if TYPE_CHECKING:
    from planners.findings import Report
    from planners.load.plan import LoadPlan
    from planners.reports.cost import Cluster

__all__ = ["plan"]


def plan(
    source: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, a layout file (.json), or a topology.")
    ],
    onto: Annotated[
        str,
        typer.Argument(metavar="ONTO", help="The same, or in short: fsdp=3, tp=2, fsdp=4,tp=2, hsdp=2x4, ddp=8."),
    ],
    rule: Rules = None,
    normalized: Annotated[
        bool, typer.Option("--normalized", help="Take checkpoints under canonical names, whatever wrote them.")
    ] = False,
    hint: HintOption = None,
    limit: Annotated[int, typer.Option(min=0, help="Show so many ranks and items.")] = 12,
    out: Annotated[Path | None, typer.Option(help="Write the plan here, as JSON that planners.loads reads.")] = None,
    html: Annotated[Path | None, typer.Option(help="Draw the plan here, as one HTML file.")] = None,
    read_rate: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="What a host reads a second, such as 2GB: tells the time."),
    ] = None,
    ranks_per_host: Annotated[int, typer.Option(min=1, help="Ranks of a host: for --read-rate and --html.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print totals per rank and the proof as JSON.")] = False,
) -> None:
    """Plan what every rank of ONTO reads of CHECKPOINT, and prove it. No tensor is read; no GPU, no process group.

    Exits with 1 if the plan is not right.
    """
    from planners.load.plan import plan_reads
    from planners.proof import verify

    hints, cluster = read_hints(hint, used=normalized), _cluster(read_rate, ranks_per_host)
    made = plan_reads(*both_sides(source, onto, rules_of(rule), normalized=normalized, hints=hints), allow_cast=True)
    report = verify(made)
    if out is not None:
        from planners.reports.codec import dumps

        out.write_text(dumps(made), encoding="utf-8")
    if html is not None:
        from planners.reports.html import to_html

        page = to_html(made, source=source, target=onto, ranks_per_host=ranks_per_host, cluster=cluster)
        html.write_text(page, encoding="utf-8")
    if as_json:
        print_json(_as_json(made, report, cluster))
    else:
        _print(made, report, limit, cluster, [file for file in (out, html) if file is not None])
    if not report.ok:
        raise typer.Exit(1)


def _cluster(read_rate: str | None, ranks_per_host: int) -> Cluster | None:
    if read_rate is None:
        return None
    from planners.reports.cost import Cluster

    rate = size_in_bytes(read_rate.removesuffix("/s"))
    return Cluster(storage_read_bytes_per_s=rate, ranks_per_host=ranks_per_host)


def _seconds(made: LoadPlan, cluster: Cluster) -> float:
    from planners.reports.cost import estimate

    return estimate(made, cluster).seconds


def _as_json(made: LoadPlan, report: Report, cluster: Cluster | None) -> dict[str, Any]:
    return {
        "uncut_axes": {axis: list(fqns) for axis, fqns in made.wanted.uncut_axes().items()},
        "tensors": len(made.wanted),
        "saved_world_size": made.saved.world_size,
        "world_size": made.world_size,
        "total_bytes": made.total_bytes,
        "rank_bytes": made.rank_bytes().tolist(),
        "estimated_seconds": None if cluster is None else _seconds(made, cluster),
        "proved": report.ok,
        "findings": [str(finding) for finding in report.findings],
    }


def _uncut_notes(made: LoadPlan) -> Iterator[str]:
    """What axes cut nothing, and how they could."""
    for axis, fqns in made.wanted.uncut_axes().items():
        layout = made.wanted[max(fqns, key=lambda fqn: len(made.wanted[fqn].spec.shape))]
        assert layout.mesh is not None
        assert layout.placements is not None
        shown = ", ".join(fqns[:5]) + (f", and {len(fqns) - 5} more" if len(fqns) > 5 else "")
        axes = ",".join(f"{name}={size}" for name, size in layout.mesh.axes)
        said = [str(placement) for placement in layout.placements]
        cut = ["S(0)" if name == axis else text for name, text in zip(layout.mesh.names, said)]
        glob = re.sub(r"(?<=\.)\d+(?=\.)", "*", layout.fqn)
        yield (
            f"axis {axis!r} cuts nothing: all ranks along it read the same of {shown}. If it is to cut, give rules, "
            f"one placement for each axis of {axes}: --rule '{glob}={','.join(cut)}' --rule '*={','.join(said)}'"
        )


def _print(made: LoadPlan, report: Report, limit: int, cluster: Cluster | None, files: list[Path]) -> None:
    from planners.reports.text import format_plan
    from planners.units import format_seconds

    screen = console()
    for note in _uncut_notes(made):
        screen.print(f"note  {note}", markup=False, soft_wrap=True)
    screen.print(
        f"{counted(len(made.wanted), 'tensor')}, {made.saved.world_size} -> {counted(made.world_size, 'rank')}, "
        f"{size(made.total_bytes)} to read in all"
    )
    text = "\n".join(format_plan(made, limit=limit).splitlines()[1:])
    screen.print(text, markup=False, soft_wrap=True)
    if cluster is not None:
        screen.print(f"estimated {format_seconds(_seconds(made, cluster))}, {cluster.ranks_per_host} ranks a host")
    if report.ok:
        screen.print("[green]proved right[/]: every wanted element is read exactly once, from the same place")
    for finding in report.findings[:20]:
        screen.print(f"[red]wrong[/]  {finding}", soft_wrap=True)
    for file in files:
        screen.print(f"written  {file}", soft_wrap=True)
