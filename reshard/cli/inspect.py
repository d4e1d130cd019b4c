"""`reshard inspect`: what is in a checkpoint."""

from __future__ import annotations

import fnmatch
import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reshard.cli.arguments import Depth, Html, UsageError
from reshard.cli.show import PrintedLeaf, console, counted, print_json, print_tree, short, size, write_page
from reshard.errors import KeyMismatchError, did_you_mean
from reshard.live.garbage import gc_paused

if TYPE_CHECKING:
    from planners.geometry.layout import StateLayout, TensorLayout
    from planners.reports.checkpoint_pages import SavedStep
    from reshard.checkpoint import Checkpoint

__all__ = ["cuts_of", "inspect"]


@gc_paused()
def inspect(
    path: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint of any known format: a folder, a file or a URL.")
    ],
    only: Annotated[str, typer.Option("--only", metavar="GLOB", help="Only names that match: '*.weight'.")] = "*",
    depth: Depth = None,
    step: Annotated[int | None, typer.Option(help="Of the folder of a run: show the checkpoint of this step.")] = None,
    drawn: Annotated[
        str | None, typer.Option("--map", metavar="NAME", help="Draw how this tensor is cut, and who holds which part.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: everything, one entry a tensor.")] = False,
    html: Html = None,
    histograms: Annotated[
        str, typer.Option(metavar="GLOB", help="With --html: read these tensors, and show their values: '*.weight'.")
    ] = "",
) -> None:
    """Show names, shapes, dtypes, sizes and layouts, from the metadata alone; nothing in it is
    executed. Of the folder of a run, list its checkpoints.

    Exits with 1 if tensors have holes or overlaps, if a file is missing, or if no checkpoint of a
    run is complete.
    """
    if histograms and html is None:
        raise UsageError("--histograms is of the page: add --html")
    shown = drawn is None and not as_json
    told = shown and os.path.exists(path)
    if told:
        _print_line(path)  # before all that takes long
    import reshard
    from reshard.formats.opening import steps_at

    if step is None and drawn is None and html is None and steps_at(path):
        _list_run(path, as_json, told)
        return
    checkpoint = reshard.open(path, step=step)
    if shown and (checkpoint.run or not told):
        _print_line(checkpoint.url)
    if drawn is not None:
        _draw(checkpoint, drawn)
        return
    names = [name for name in checkpoint if fnmatch.fnmatchcase(name, only)]
    objects = [name for name in checkpoint.objects if fnmatch.fnmatchcase(name, only)]
    if not names and not objects and (checkpoint or checkpoint.objects):
        everything = [*checkpoint, *checkpoint.objects]
        near = did_you_mean(only, everything[:5000]) or f"; it has {', '.join(everything[:3])}, ..."
        raise KeyMismatchError(f"nothing in {checkpoint.url} is called like {only!r}{near}")
    problems = checkpoint.problems()
    if html is not None:
        page = checkpoint.to_html(histograms=histograms, steps=_costs(checkpoint.run))
        write_page(html, page, as_json=as_json)
    if as_json:
        print_json(_as_json(checkpoint, names, objects, problems))
    elif html is None:
        _print(checkpoint, names, objects, problems, depth)
    if problems:
        raise typer.Exit(1)


def _print_line(path: str) -> None:
    from rich.markup import escape

    console().print(f"[bold]{escape(path)}[/]", soft_wrap=True)


def _list_run(path: str, as_json: bool, told: bool) -> None:
    import reshard

    steps = reshard.steps(path)
    if as_json:
        print_json({"path": path, "steps": [vars(step) for step in steps]})
    else:
        from rich.markup import escape

        screen = console()
        if not told:
            _print_line(path)
        screen.print(f"a run of {counted(len(steps), 'checkpoint')}")
        for step in steps:
            number = "last" if step.step is None else step.step
            what = (
                f"{step.format}, {size(step.nbytes)}"
                if step.problem is None
                else f"[red]not complete[/]: {escape(step.problem)}"
            )
            screen.print(f"step {number}  {escape(step.path)}  {what}", soft_wrap=True)
    if all(step.problem for step in steps):
        raise typer.Exit(1)


def _costs(run: str) -> list[SavedStep]:
    """What each checkpoint of a run wrote, and what of it lies in files of earlier ones. Nothing for no run."""
    import reshard
    from planners.reports.checkpoint_pages import SavedStep
    from reshard.native.manifest import LinkedRecord
    from reshard.native.reader import NativeFacts

    found, saves = [], {}
    for step in reshard.steps(run) if run else ():
        name = "last" if step.step is None else f"step {step.step}"
        if step.problem is not None:
            found.append(SavedStep(name, 0, 0, 0, problem=step.problem))
            continue
        facts = reshard.open(step.path).contents.details(NativeFacts)
        files = [] if facts is None else [*facts.files.values()]
        linked = [file for file in files if isinstance(file, LinkedRecord)]
        if facts is not None:
            saves[facts.manifest.save_id] = name
        ids = {re.sub(r".*/from-(\w+-\w+)-.*", r"\1", file.name) for file in linked}
        base = ", ".join(dict.fromkeys(saves.get(save_id, "one that is gone") for save_id in sorted(ids)))
        shared = sum(file.live_bytes for file in linked)
        written = sum(file.nbytes for file in files) - sum(file.nbytes for file in linked) if files else step.nbytes
        found.append(SavedStep(name, step.nbytes, written, shared, base))
    return found


def _draw(checkpoint: Checkpoint, name: str) -> None:
    from planners.reports.cuts import draw_cuts

    name = checkpoint.aliases.get(name, name)
    if name not in checkpoint:
        what = "no tensor but a plain value" if name in checkpoint.objects else "not in it"
        raise KeyMismatchError(f"{name!r} is {what}, in {checkpoint.url}{did_you_mean(name, list(checkpoint)[:5000])}")
    screen = console()
    screen.print(f"layout {_layout_text(checkpoint.layout[name])}", markup=False, soft_wrap=True)
    screen.print(draw_cuts(checkpoint.layout[name], screen.width), markup=False, soft_wrap=True)


def _as_json(checkpoint: Checkpoint, names: list[str], objects: list[str], problems: list[str]) -> dict[str, Any]:
    layout = checkpoint.layout
    return {
        "path": checkpoint.url,
        "format": checkpoint.format,
        "world_size": layout.world_size,
        "total_bytes": sum(checkpoint[name].nbytes for name in names),
        "tensors": {
            name: {
                "shape": list(layout[name].spec.shape),
                "dtype": layout[name].spec.dtype,
                "nbytes": layout[name].spec.nbytes,
                "layout": _layout_as_json(layout[name]),
            }
            for name in names
        },
        "objects": {name: checkpoint.objects[name] for name in objects},
        "aliases": dict(checkpoint.aliases),
        "warnings": list(checkpoint.warnings),
        "problems": problems,
    }


def _print(
    checkpoint: Checkpoint, names: list[str], objects: list[str], problems: list[str], depth: int | None
) -> None:
    from rich.markup import escape

    screen = console()
    layout = checkpoint.layout
    texts = layout.described(names, _layout_text)
    total = sum(layout[name].spec.nbytes for name in names)
    screen.print(
        f"format {checkpoint.format}, {counted(len(names), 'tensor')}, {size(total)}, "
        f"{counted(len(objects), 'object')}, saved by {counted(layout.world_size, 'rank')}"
    )
    for title, weights in _totals(layout, texts).items():
        rows = [f"{what} ({counted(count, 'tensor')}, {size(nbytes)})" for what, (count, nbytes) in weights.items()]
        screen.print(f"[bold]{title}[/]  {escape(_listed(rows))}", soft_wrap=True)
    leaves: dict[Any, PrintedLeaf] = {}
    paths = checkpoint.contents.paths
    for name, text in texts.items():
        spec = layout[name].spec
        text = f"{spec.dtype} {list(spec.shape)}  {size(spec.nbytes)}  {text}"
        leaves[_parts(paths.get(name, (name,)))] = PrintedLeaf(text, spec.nbytes)
    for name in objects:
        leaves[_parts(paths.get(name, (name,)))] = PrintedLeaf(f"= {short(checkpoint.objects[name])}")
    for name, holder in checkpoint.aliases.items():
        leaves[_parts(paths.get(name, (name,)))] = PrintedLeaf(f"tied to {holder}")
    print_tree(screen, leaves, depth, checkpoint.warnings)
    for problem in problems:
        screen.print(f"[red]damaged[/]  {escape(problem)}", soft_wrap=True)


def _totals(layout: StateLayout, texts: Mapping[str, str]) -> dict[str, dict[str, tuple[int, int]]]:
    """Tensors and bytes by dtype and by layout, the largest first. `texts`: of the layouts by name."""
    out: dict[str, dict[str, tuple[int, int]]] = {}
    dtypes = {name: layout[name].spec.dtype for name in texts}
    for title, kinds in (("dtypes ", dtypes), ("layouts", texts)):
        counts: Counter[str] = Counter(kinds.values())
        weights: Counter[str] = Counter()
        for name, what in kinds.items():
            weights[what] += layout[name].spec.nbytes
        out[title] = {what: (counts[what], nbytes) for what, nbytes in weights.most_common()}
    return out


Cuts = tuple[tuple[int, tuple[int, ...]], ...]
"""For each dim that is cut: its number, and the sizes of its pieces."""


def _layout_text(layout: TensorLayout) -> str:
    if layout.mesh is not None:
        return f"{','.join(map(str, layout.placements or ()))} on {layout.mesh}"
    cuts = cuts_of(layout)
    if cuts is None:
        return counted(sum(1 for _ in layout.chunks()), "explicit chunk")
    if not cuts:
        return "whole"
    uneven = "" if all(_is_chunked(sizes) for _, sizes in cuts) else ", uneven"
    return f"{','.join(f'S({dim})' for dim, _ in cuts)} on {'x'.join(str(len(sizes)) for _, sizes in cuts)}{uneven}"


def _layout_as_json(layout: TensorLayout) -> dict[str, Any]:
    """`mesh` and `placements` where they were saved; else `cuts`, whose product the chunks are; else `chunks`."""
    if (mesh := layout.mesh) is not None:
        axes = [{"name": name, "size": size} for name, size in mesh.axes]
        ranks = mesh.ranks.tolist() if mesh.has_explicit_ranks else None
        return {"mesh": axes, "ranks": ranks, "placements": [str(placement) for placement in layout.placements or ()]}
    cuts = cuts_of(layout)
    if cuts is not None:
        return {"cuts": [{"dim": dim, "sizes": list(sizes)} for dim, sizes in cuts]}
    return {"chunks": [{"offsets": list(box.offsets), "sizes": list(box.sizes)} for _, box in layout.chunks()]}


def cuts_of(layout: TensorLayout) -> Cuts | None:
    """The cuts whose product the chunks are, which files without a mesh do not say; None if they are none."""
    boxes = {box for _, box in layout.chunks()}
    starts = [sorted({box.offsets[dim] for box in boxes}) for dim in range(len(layout.spec.shape))]
    if len(boxes) != math.prod(map(len, starts)) or any(at[:1] != [0] for at in starts):
        return None
    stops = [dict(zip(at, [*at[1:], size])) for at, size in zip(starts, layout.spec.shape)]
    if any(stops[dim][at] != at + size for box in boxes for dim, (at, size) in enumerate(zip(box.offsets, box.sizes))):
        return None
    pieces = [tuple(stop - start for start, stop in of.items()) for of in stops]
    return tuple((dim, sizes) for dim, sizes in enumerate(pieces) if len(sizes) > 1)


def _is_chunked(sizes: tuple[int, ...]) -> bool:
    """Whether they are what `Shard` makes: equal pieces, the last one perhaps shorter."""
    return len(set(sizes[:-1])) == 1 and sizes[-1] <= sizes[0]


def _listed(rows: list[str], most: int = 6) -> str:
    more = f", and {len(rows) - most} more" if len(rows) > most else ""
    return ", ".join(rows[:most]) + more


def _parts(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Dotted names are cut at their dots, too."""
    return tuple(part for key in path for part in str(getattr(key, "value", key)).split("."))
