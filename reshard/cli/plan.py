"""`reshard plan`: what a change of topology would read, per rank, and whether that is right."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from reshard.cli import arguments
from reshard.cli.arguments import HintOption, Html, Legend, Normalized, Rules, Select, Sides, Step
from reshard.cli.completion import topologies
from reshard.cli.output import (
    console,
    counted,
    print_json,
    print_legend,
    print_lines,
    print_text,
    print_totals,
    print_written,
    size,
    some,
)

if TYPE_CHECKING:
    from planners.findings import Report
    from planners.plans.cost import Cluster
    from planners.plans.load import LoadPlan

_Planned = Annotated[str, Argument(metavar="CHECKPOINT", help="A checkpoint, layout file, plan file, or topology.")]
_Onto = Annotated[
    str,
    Argument(
        metavar="ONTO",
        autocompletion=topologies,
        help="The target topology, such as fsdp=3, fsdp=4,tp=2, hsdp=2x4, or pp=2,fsdp=4. Or a checkpoint, layout "
        "file, plan file, or topology file.",
    ),
]
_ReadRate = Annotated[
    str | None,
    Option(metavar="SIZE", help="Estimate the load time. SIZE is what each host reads per second, such as 2GB."),
]
_AllowUnsharded = Annotated[bool, Option("--allow-unsharded-axes", help="Accept an axis that shards no tensor.")]
_Out = Annotated[
    Path | None, Option(metavar="FILE", callback=arguments.writable, help="Write the plan to FILE, as JSON.")
]
_Json = Annotated[
    bool, Option("--json", help="Print the bytes per rank and the proof as JSON. With --items, also the items.")
]


def plan(
    source: _Planned,
    onto: _Onto,
    rule: Rules = None,
    select: Select = None,
    normalized: Normalized = False,
    hint: HintOption = None,
    step: Step = None,
    limit: Annotated[int, Option(metavar="N", min=0, help="Show at most this many ranks and read items.")] = 12,
    items: Annotated[bool, Option("--items", help="List what each rank reads, box by box.")] = False,
    legend: Legend = False,
    out: _Out = None,
    html: Html = None,
    read_rate: _ReadRate = None,
    ranks_per_host: Annotated[int, Option(metavar="N", min=1, help="For --read-rate and --html.")] = 8,
    allow_unsharded_axes: _AllowUnsharded = False,
    allow_uncut_axes: Annotated[bool, Option("--allow-uncut-axes", hidden=True)] = False,
    as_json: _Json = False,
) -> None:
    """Plan what each rank of ONTO reads from CHECKPOINT, and prove the plan.

    Reads metadata only. Needs no GPU and no process group. The proof shows that each rank reads every element that it
    needs exactly once, from the right place. It does not show that ONTO is the topology that you meant.

    ONTO may name the axes that inspect prints, such as dp=2,tp=2. Each axis then shards the same dims as in CHECKPOINT.
    A plan file, which --out writes, stands for the layout that its ranks load.

    Exits with 1 if the proof fails, or if an axis of ONTO shards no tensor because its rules match none.
    """
    from planners.plans.codec import dumps
    from planners.plans.load import plan_reads
    from planners.plans.plan import verify
    from reshard.api.plan import names_topology, unsharded_text

    hints, cluster = arguments.read_hints(hint, used=normalized), _cluster(read_rate, ranks_per_host)
    rules, given = arguments.rules_of(rule), ((source, step), (onto, None))
    source, onto = (text if names_topology(text) else arguments.newest(text, its) for text, its in given)
    sides = arguments.both_sides(source, onto, rules, normalized=normalized, hints=hints, select=select)
    made = plan_reads(sides.saved, sides.wanted, allow_cast=True)
    report = verify(made)
    if not sides.is_onto and sides.topology is not None:
        _note_direction(source, onto, rule)
    texts = [unsharded_text(*item) for item in sides.unsharded_axes.items()]
    useless = [] if allow_unsharded_axes or allow_uncut_axes else texts
    if out is not None:
        out.write_text(dumps(made), encoding="utf-8")
    if html is not None:
        page = made.to_html(source=source, target=onto, ranks_per_host=ranks_per_host, cluster=cluster, wrong=useless)
        html.write_text(page, encoding="utf-8")
    if as_json:
        print_json({"source": source, "target": onto, **_as_json(made, report, useless, cluster, items), **sides.notes})
    else:
        _print_verdict(report, [*useless, *map(str, report.findings[:20])])
        _print(made, (limit, items, legend), cluster)
        _print_outside(sides)
        _print_unsharded(sides, source, onto, [] if useless else texts)
    print_written(out, html, as_json=as_json)
    if useless or not report.ok:
        raise Exit(1)


def _note_direction(source: str, onto: str, rule: list[str] | None) -> None:
    """Explain a topology as the first argument, because most people mean the other direction."""
    other = shlex.join(["reshard", "plan", onto, source, *(word for text in rule or () for word in ("--rule", text))])
    text = f"this plans how ranks with the layout of {onto} read a state saved as {source}. For the reverse: {other}"
    print_text(text, "note", screen=console(stderr=True))


def _cluster(read_rate: str | None, ranks_per_host: int) -> Cluster | None:
    if read_rate is None:
        return None
    from planners.plans.cost import Cluster

    rate = arguments.size_in_bytes(read_rate.removesuffix("/s"))
    return Cluster(storage_read_bytes_per_s=rate, ranks_per_host=ranks_per_host)


def _seconds(made: LoadPlan, cluster: Cluster) -> float:
    from planners.plans.cost import estimate

    return estimate(made, cluster).seconds


def _as_json(
    made: LoadPlan, report: Report, unsharded: list[str], cluster: Cluster | None, items: bool
) -> dict[str, Any]:
    listed = [[item._asdict() for item in made.items(rank)] for rank in range(made.world_size * items)]
    return {
        "ok": report.ok and not unsharded,
        "unsharded_axes": made.wanted.unsharded_axes(),
        "tensors": len(made.wanted),
        "saved_world_size": made.saved.world_size,
        "world_size": made.world_size,
        "total_bytes": made.total_bytes,
        "rank_bytes": made.rank_bytes().tolist(),
        "estimated_seconds": None if cluster is None else _seconds(made, cluster),
        "proved": report.ok,
        "covers": report.covers,
        "findings": [*map(str, report.findings), *unsharded],
        **({"items": listed} if items else {}),
    }


def _print_outside(sides: Sides) -> None:
    """Print the pipeline stages of tensors outside the layers. They follow from names only, such as
    those of embeddings."""
    from planners.geometry.arrays import grouped
    from planners.geometry.topologies import Globs

    if sides.topology is None or "pp" not in sides.topology.mesh.names:
        return
    homes = sides.topology.homes
    globs = Globs([home.pattern for home in homes])
    found = [(name, globs.first(name)) for name in (sides.wanted if sides.is_onto else sides.saved)]
    rest = [(name, homes[number]) for name, number in found if number is not None]
    rest = [(name, home) for name, home in rest if not re.search(r"\.\d+\.", home.pattern)]
    stages = grouped((stage, name) for name, home in rest for axis, stage in home.at if axis == "pp")
    for stage, names in sorted({0: [], **stages}.items()):
        listed = f": {some(names, 3)}" if names else ""
        print_text(f"{counted(len(names), 'tensor')} outside the layers{listed}", f"stage {stage}")


def _print_unsharded(sides: Sides, source: str, onto: str, notes: list[str]) -> None:
    """Print fixes for axes that shard nothing or, if they are allowed, notes."""
    from reshard.cli.sharding_rules import as_options, example_rules, recorded_rules

    for text in (*sides.notes["notes"], *notes):
        print_text(text, "note")
    for axis, fqns in () if notes else sides.unsharded_axes.items():
        assert sides.topology is not None
        other = sides.saved if sides.is_onto else sides.wanted
        print_text(f"\nNo rule for {axis!r} matches the names of these tensors.")
        if rules := recorded_rules(sides.topology, other, axis):
            print_text(
                f"The checkpoint records how {axis!r} sharded each tensor. To shard it the same way:",
            )
        elif rules := example_rules(sides.topology, other, axis, fqns):
            print_text(
                f"The checkpoint does not record how {axis!r} sharded its tensors. Add a rule for each kind of "
                f"tensor to shard, with one placement per axis of {sides.topology.mesh}. An example:",
            )
        words = (source, sides.topology.mesh) if sides.is_onto else (sides.topology.mesh, onto)
        lines = [f"  reshard plan {' '.join(map(str, words))}", *as_options(rules)]
        if rules:
            print_lines(" \\\n    ".join(lines))
        print_text(f"To replicate all tensors over {axis!r}, add --allow-unsharded-axes.")


def _print_verdict(report: Report, wrong: list[str]) -> None:
    if not wrong:
        print_text(report.verdict, style="green")
    for text in wrong:
        print_text(text, "failed", "red")


def _print(made: LoadPlan, how: tuple[int, bool, bool], cluster: Cluster | None) -> None:
    from planners.geometry.layout_text import in_both_forms, short_form
    from planners.reports.text import format_plan
    from planners.units import format_seconds

    limit, items, legend = how
    print_text(
        f"{counted(len(made.wanted), 'tensor')}, {made.saved.world_size} -> {counted(made.world_size, 'rank')}, "
        f"{size(made.total_bytes)} to read in total",
    )
    before, after = (side.described(made.wanted, in_both_forms) for side in (made.saved, made.wanted))
    nbytes = {name: layout.spec.nbytes for name, layout in made.wanted.items()}
    kinds = {
        name: (f"same  {new}",) if new == before[name] else (f"from  {before[name]}", f"to    {new}")
        for name, new in after.items()
    }
    print_totals("layouts", nbytes, kinds)
    print_text("reads", style="bold")
    for line in format_plan(made, limit=limit, width=console().width, items=items, bar="━").splitlines()[1:]:
        print_text(line)
    if cluster is not None:
        print_text(
            f"{format_seconds(_seconds(made, cluster))}, at {cluster.rates}",
            "at least",
        )
    print_legend(
        {text for side in (made.saved, made.wanted) for text in side.described(side, short_form).values()},
        legend,
        *["--items lists what each rank reads"] * (not items),
    )
