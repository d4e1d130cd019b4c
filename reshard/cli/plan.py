"""`reshard plan`: what a change of topology would read, per rank, and whether that is right."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reshard.cli.arguments import HintOption, Html, Rules, Sides, both_sides, read_hints, rules_of, size_in_bytes
from reshard.cli.show import console, counted, print_json, size

if TYPE_CHECKING:
    from planners.findings import Report
    from planners.geometry.layout import StateLayout
    from planners.plans.cost import Cluster
    from planners.plans.load import LoadPlan

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
    html: Html = None,
    read_rate: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="What a host reads a second, such as 2GB: tells the time."),
    ] = None,
    ranks_per_host: Annotated[int, typer.Option(min=1, help="Ranks of a host: for --read-rate and --html.")] = 8,
    allow_uncut_axes: Annotated[
        bool,
        typer.Option("--allow-uncut-axes", help="It is meant so that an axis of the topology cuts no tensor."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print totals per rank and the proof as JSON.")] = False,
) -> None:
    """Plan what every rank of ONTO reads of CHECKPOINT, and prove it. No tensor is read; no GPU, no
    process group.

    Proved is that every wanted element is read exactly once, from the saved element that it is, and
    not that the layout is the one you meant. Exits with 1 if that does not hold, or if a topology
    has rules for an axis, none of which matches a tensor, so that the axis cuts nothing.
    """
    from planners.plans.load import plan_reads
    from planners.plans.plan import verify

    hints, cluster = read_hints(hint, used=normalized), _cluster(read_rate, ranks_per_host)
    sides = both_sides(source, onto, rules_of(rule), normalized=normalized, hints=hints)
    made = plan_reads(sides.saved, sides.wanted, allow_cast=True)
    report = verify(made)
    uncut = [] if allow_uncut_axes else _uncut_texts(sides.laid_out, sides.uncut_axes)
    if out is not None:
        from planners.plans.codec import dumps

        out.write_text(dumps(made), encoding="utf-8")
    if html is not None:
        from planners.reports.pages import to_html

        page = to_html(made, source=source, target=onto, ranks_per_host=ranks_per_host, cluster=cluster)
        html.write_text(page, encoding="utf-8")
    if as_json:
        print_json(_as_json(made, report, uncut, cluster))
    else:
        _print_uncut(sides, uncut)
        _print(made, report, limit, cluster, [file for file in (out, html) if file is not None])
    if uncut or not report.ok:
        raise typer.Exit(1)


def _cluster(read_rate: str | None, ranks_per_host: int) -> Cluster | None:
    if read_rate is None:
        return None
    from planners.plans.cost import Cluster

    rate = size_in_bytes(read_rate.removesuffix("/s"))
    return Cluster(storage_read_bytes_per_s=rate, ranks_per_host=ranks_per_host)


def _seconds(made: LoadPlan, cluster: Cluster) -> float:
    from planners.plans.cost import estimate

    return estimate(made, cluster).seconds


def _as_json(made: LoadPlan, report: Report, uncut: list[str], cluster: Cluster | None) -> dict[str, Any]:
    return {
        "uncut_axes": {axis: list(fqns) for axis, fqns in made.wanted.uncut_axes().items()},
        "tensors": len(made.wanted),
        "saved_world_size": made.saved.world_size,
        "world_size": made.world_size,
        "total_bytes": made.total_bytes,
        "rank_bytes": made.rank_bytes().tolist(),
        "estimated_seconds": None if cluster is None else _seconds(made, cluster),
        "proved": report.ok,
        "covers": report.covers,
        "findings": [*map(str, report.findings), *uncut],
    }


def _uncut_texts(layout: StateLayout | None, uncut: Mapping[str, tuple[str, ...]]) -> list[str]:
    """What axes cut nothing though rules are to cut along them."""
    assert layout is not None or not uncut
    return [
        f"axis {axis!r} cuts nothing: no rule that cuts along it matches a name, and all ranks along it read the same "
        f"of {_rule_for(layout, axis, fqns)}; if it is meant to cut nothing, --allow-uncut-axes"
        for axis, fqns in uncut.items()
        if layout is not None
    ]


def _rule_for(layout: StateLayout, axis: str, fqns: tuple[str, ...]) -> str:
    """Names that an axis does not cut, and the rules by which it would."""
    first = layout[max(fqns, key=lambda fqn: len(layout[fqn].spec.shape))]
    assert first.mesh is not None
    assert first.placements is not None
    shown = ", ".join(fqns[:5]) + (f", and {len(fqns) - 5} more" if len(fqns) > 5 else "")
    axes = ",".join(f"{name}={size}" for name, size in first.mesh.axes)
    said = [str(placement) for placement in first.placements]
    cut = ["S(0)" if name == axis else text for name, text in zip(first.mesh.names, said)]
    glob = re.sub(r"(?<=\.)\d+(?=\.)", "*", first.fqn)
    return (
        f"{shown}. If it is to cut, give rules, one placement for each axis of {axes}: "
        f"--rule '{glob}={','.join(cut)}' --rule '*={','.join(said)}'"
    )


def _print_uncut(sides: Sides, uncut: list[str]) -> None:
    """What axes cut nothing: what nobody has allowed first."""
    from rich.markup import escape

    screen = console()
    for text in uncut:
        screen.print(f"[red]uncut[/]  {escape(text)}", soft_wrap=True)
    told = sides.uncut_axes if uncut and sides.laid_out is sides.wanted else {}
    for axis, fqns in sides.wanted.uncut_axes().items():
        if axis not in told:
            text = f"axis {axis!r} cuts nothing: all ranks along it read the same of "
            screen.print(f"note  {text}{_rule_for(sides.wanted, axis, fqns)}", markup=False, soft_wrap=True)


def _print(made: LoadPlan, report: Report, limit: int, cluster: Cluster | None, files: list[Path]) -> None:
    from planners.reports.text import format_plan
    from planners.units import format_seconds

    screen = console()
    screen.print(
        f"{counted(len(made.wanted), 'tensor')}, {made.saved.world_size} -> {counted(made.world_size, 'rank')}, "
        f"{size(made.total_bytes)} to read in all"
    )
    text = "\n".join(format_plan(made, limit=limit).splitlines()[1:])
    screen.print(text, markup=False, soft_wrap=True)
    if cluster is not None:
        screen.print(f"estimated {format_seconds(_seconds(made, cluster))}, {cluster.ranks_per_host} ranks a host")
    if report.ok:
        screen.print(f"[green]proved[/] {report.verdict}", soft_wrap=True)
    for finding in report.findings[:20]:
        screen.print(f"[red]wrong[/]  {finding}", soft_wrap=True)
    for file in files:
        screen.print(f"written  {file}", soft_wrap=True)
