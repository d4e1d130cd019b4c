"""`reshard inspect`: what is in a checkpoint."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from typer import Exit, Option

from planners.units import format_each
from reshard.cli.arguments import Depth, Html, Legend, Select, Source, Step, UsageError
from reshard.cli.completion import tensor_names
from reshard.cli.output import (
    PrintedLeaf,
    as_given,
    axes_as_json,
    console,
    counted,
    damaged,
    print_json,
    print_legend,
    print_lines,
    print_text,
    print_totals,
    print_tree,
    print_written,
    short,
    size,
    some,
)
from reshard.errors import CorruptCheckpointError, KeyMismatchError, did_you_mean
from reshard.live.garbage_collection import gc_paused

if TYPE_CHECKING:
    from planners.geometry.layout import TensorLayout
    from planners.reports.checkpoint_pages import SavedStep
    from reshard.api import retention
    from reshard.checkpoint import Checkpoint

_Map = Annotated[
    str | None,
    Option(
        "--map",
        metavar="NAME",
        autocompletion=tensor_names,
        help="Draw which rank holds which part of the tensor NAME.",
    ),
]
_AsJson = Annotated[
    bool,
    Option(
        "--json",
        help="Print JSON with one entry per tensor, object, or per-rank value. A list of plain values counts "
        "as one object. `covers` is the checkpoint to which `ok` refers.",
    ),
]
_Histograms = Annotated[
    str,
    Option(metavar="GLOB", help="With --html: read these tensors and draw histograms of their values."),
]


@gc_paused()
def inspect(
    path: Source,
    select: Select = None,
    only: Annotated[str | None, Option("--only", hidden=True)] = None,
    depth: Depth = None,
    step: Step = None,
    drawn: _Map = None,
    legend: Legend = False,
    as_json: _AsJson = False,
    html: Html = None,
    histograms: _Histograms = "",
) -> None:
    """Show the names, shapes, dtypes, sizes, and layouts in a checkpoint.

    Reads metadata only, and runs no code from the checkpoint. For a run, also lists its checkpoints.

    Exits with 1 if a file is missing or too short, if metadata is damaged, or if parts of a tensor are missing or
    overlap. For a run, also exits with 1 if no checkpoint is complete, or if a checkpoint newer than the one shown has
    lost files. To check values, use verify.
    """
    if histograms and html is None:
        raise UsageError("--histograms draws on the HTML page: add --html")
    if only is not None:
        print("--only is deprecated: use --select", file=sys.stderr)
        select = [*(select or []), only]
    if drawn is not None and (as_json or html is not None or select):
        raise UsageError("--map prints a drawing of one tensor: leave out --json, --html, and --select")
    import reshard
    from reshard.checkpoint import readable
    from reshard.formats.detect import steps_at

    steps = reshard.steps(path) if step is None and steps_at(path) else []
    if steps and all(found.problem for found in steps):
        raise _incomplete(path, steps, as_json)
    checkpoint = _opened(path, step, as_json)
    whole, run = readable(checkpoint), checkpoint.run
    lost = [checkpoint.contents.skipped[newer] for newer in checkpoint.contents.damaged_steps]
    checkpoint = whole.select(select) if select else whole
    drawn = drawn and _known(checkpoint, drawn)
    if steps and not as_json:
        _list_steps(path, steps)
    if html is not None:
        html.write_text(checkpoint.to_html(histograms=histograms, steps=_costs(run)), encoding="utf-8")
    if not as_json and (drawn is None or steps):
        _print_name(whole, path, ", the newest complete checkpoint" * bool(steps))
    problems = [as_given(it, path) for it in whole.problems()]
    if drawn is not None:
        _draw(checkpoint, drawn, legend)
    elif as_json:
        shown = _as_json(checkpoint, whole, problems)
        print_json({**shown, **_run_as_json(path, steps), "newest": shown} if steps else shown)
    elif html is None and (whole or whole.objects or not problems):
        _print(checkpoint, whole, depth, legend)
    for problem in [] if as_json else problems:
        print_text(problem, "damaged", "red")
    print_written(html, as_json=as_json)
    if problems or lost:
        raise Exit(1)


def _opened(path: str, step: int | None, as_json: bool) -> Checkpoint:
    """The checkpoint. One that cannot be opened ends the command."""
    from reshard.checkpoint import open_damaged

    try:
        return open_damaged(path, step=step)
    except CorruptCheckpointError as error:
        raise damaged(path, str(error), as_json, other=_UNOPENED) from None


def _print_name(checkpoint: Checkpoint, path: str, what: str) -> None:
    name = path if os.path.exists(path) and not checkpoint.run else checkpoint.url
    print_text(f"{name}{what}", style="bold")


def _run_as_json(path: str, steps: Sequence[retention.Step]) -> dict[str, Any]:
    return {"path": path, "steps": [vars(step) for step in steps]}


def _incomplete(path: str, steps: Sequence[retention.Step], as_json: bool) -> Exit:
    """List the checkpoints of a run in which none is complete. The command ends with that."""
    problem = "no checkpoint of this run is complete"
    if as_json:
        print_json({**_UNOPENED, **_run_as_json(path, steps), "newest": None, "ok": False, "problems": [problem]})
    else:
        _list_steps(path, steps)
        print_text(problem, style="red")
    return Exit(1)


def _list_steps(path: str, steps: Sequence[retention.Step]) -> None:
    print_text(path, style="bold")
    print_text(f"a run with {counted(len(steps), 'checkpoint')}")
    sizes = dict(zip((step.path for step in steps), format_each([step.nbytes for step in steps])))
    for step in steps:
        number = "last" if step.step is None else step.step
        if step.problem is None:
            print_text(f"step {number}  {step.path}  {step.format}, {sizes[step.path]}")
        else:
            print_text(f"{step.path}  not complete: {step.problem}", f"step {number}", "red")
    print_lines("")


def _costs(run: str) -> list[SavedStep]:
    """Return what each checkpoint of a run wrote, and what it shares with files of earlier ones.
    Nothing for no run."""
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
        files = []
        if facts is not None:
            files, saves[facts.manifest.save_id] = [*facts.files.values()], name
        linked = [file for file in files if isinstance(file, LinkedRecord)]
        ids = {re.sub(r".*/from-(\w+-\w+)-.*", r"\1", file.name) for file in linked}
        base = ", ".join(dict.fromkeys(saves.get(save_id, "one that is gone") for save_id in sorted(ids)))
        shared = sum(file.live_bytes for file in linked)
        written = sum(file.nbytes for file in files) - sum(file.nbytes for file in linked) if files else step.nbytes
        found.append(SavedStep(name, step.nbytes, written, shared, base))
    return found


def _known(checkpoint: Checkpoint, name: str) -> str:
    """The name under which a tensor is stored. Raises KeyMismatchError if there is no such tensor."""
    name = checkpoint.aliases.get(name, name)
    if name not in checkpoint:
        is_value = name in checkpoint.objects or name in checkpoint.contents.per_rank
        what = "a value, not a tensor," if is_value else "not"
        raise KeyMismatchError(f"{name!r} is {what} in {checkpoint.url}{_near(name, list(checkpoint))}")
    return name


def _draw(checkpoint: Checkpoint, name: str, legend: bool) -> None:
    from planners.geometry.layout_text import in_both_forms, short_form
    from planners.reports.terminal_pictures import draw_cuts

    layout = checkpoint.layout
    print_text(layout.described([name], in_both_forms)[name])
    print_lines(draw_cuts(layout[name], console().width))
    print_legend(layout.described([name], short_form).values(), legend)


def _near(name: str, known: list[str]) -> str:
    """The name that is meant, those that contain it, or the first ones."""
    meant, longer = did_you_mean(name, known[:5000]), [other for other in known if name in other]
    return meant or f". Names {'that contain it' if longer else 'there'}: {some(longer or known, 5)}"


def _described(checkpoint: Checkpoint, whole: Checkpoint, describe: Callable[[TensorLayout], Any]) -> dict[str, Any]:
    """The description of each tensor of a selection: the same as in the complete checkpoint, which names the axes."""
    holders = {name: whole.aliases.get(name, name) for name in checkpoint.layout}
    found = whole.layout.described(holders.values(), describe)
    return {name: found[holder] for name, holder in holders.items()}


_UNOPENED = dict.fromkeys((
    "covers", "format", "world_size", "total_bytes", "tensors", "objects", "per_rank", "aliases", "warnings",
    "unchecked",
))  # fmt: skip
"""What the JSON of a checkpoint has that does not open."""


def _as_json(checkpoint: Checkpoint, whole: Checkpoint, problems: list[str]) -> dict[str, Any]:
    from reshard.checkpoint import objects_of
    from reshard.live.plain_data import array_bytes

    layout, layouts = checkpoint.layout, _described(checkpoint, whole, _layout_as_json)
    return {
        "path": checkpoint.url,
        "ok": not problems,
        "covers": checkpoint.url,
        "format": checkpoint.format,
        "world_size": layout.world_size,
        "total_bytes": sum(tensor.nbytes for tensor in checkpoint.values()) + array_bytes(checkpoint.objects),
        "tensors": {
            name: {
                "shape": list(of.spec.shape),
                "dtype": of.spec.dtype,
                "nbytes": of.spec.nbytes,
                "layout": layouts[name],
            }
            for name, of in layout.items()
        },
        "objects": objects_of(checkpoint),
        "per_rank": {name: [*values] for name, values in checkpoint.contents.per_rank.items()},
        "aliases": dict(checkpoint.aliases),
        "warnings": list(checkpoint.warnings),
        "problems": problems,
        "unchecked": checkpoint.unchecked,
    }


def _print(checkpoint: Checkpoint, whole: Checkpoint, depth: int | None, legend: bool) -> None:
    from planners.geometry.layout_text import in_both_forms, in_words, short_form
    from reshard.checkpoint import objects_of, ranks_that_saved
    from reshard.live.plain_data import array_bytes

    layout, objects = checkpoint.layout, objects_of(checkpoint)
    specs = layout.specs
    said = _described(checkpoint, whole, lambda of: (in_words(of), short_form(of), in_both_forms(of)))
    nbytes = {name: specs[name].nbytes for name in specs}
    ranks = ranks_that_saved(checkpoint)
    saved_by = "" if ranks is None else f", saved by {counted(ranks, 'rank')}"
    own = checkpoint.contents.own_in_words()
    per_rank = f", {counted(len(own), 'per-rank value')}" if own else ""
    print_text(
        f"format {checkpoint.format}, {counted(len(specs), 'tensor')}, "
        f"{size(sum(nbytes.values()) + array_bytes(objects))}, "
        f"{counted(len(objects), 'object')}{per_rank}{saved_by}",
    )
    print_totals("dtypes", nbytes, {name: (specs[name].dtype,) for name in specs})
    print_totals("layouts", nbytes, {name: (both,) for name, (_, _, both) in said.items()})
    leaves: dict[Any, PrintedLeaf] = {}
    path_of = checkpoint.contents.path_of
    for name, (words, _, _) in said.items():
        spec = specs[name]
        text = f"{spec.dtype} {list(spec.shape)}  {size(spec.nbytes)}  {words}"
        leaves[_parts(path_of(name))] = PrintedLeaf(text, spec.nbytes)
    for name, value in objects.items():
        items = f"  {counted(len(value), 'item')}" if isinstance(value, list | tuple) else ""
        arrays = f"  {size(nbytes_of)}" if (nbytes_of := array_bytes(value)) else ""
        leaves[_parts(path_of(name) or (name,))] = PrintedLeaf(f"= {short(value)}{items}{arrays}")
    tied = {name: f"tied to {holder}" for name, holder in checkpoint.aliases.items()}
    for name, text in {**tied, **own}.items():
        leaves[_parts(path_of(name))] = PrintedLeaf(text)
    listed = checkpoint.contents.skipped.values()  # with the steps of the run
    notes = [text for text in checkpoint.warnings if text not in listed]
    print_tree(leaves, depth, filter(None, (*notes, checkpoint.unchecked)))
    print_legend((form for _, form, _ in said.values()), legend)


def _layout_as_json(layout: TensorLayout) -> dict[str, Any]:
    """In words, and in the short form if it has one.

    `mesh` and `placements` if they were saved; else `shards`,
    the sizes along each dim whose product the chunks are;
    else `chunks`.
    """
    from planners.geometry.layout_text import chunk_sizes, in_words, short_form

    said = {"words": in_words(layout), "short_form": short_form(layout)}
    if (mesh := layout.mesh) is not None:
        return {
            **said,
            "mesh": axes_as_json(mesh),
            "ranks": mesh.ranks.tolist() if mesh.has_explicit_ranks else None,
            "placements": [str(placement) for placement in layout.placements or ()],
        }
    if (sizes_of := chunk_sizes(layout)) is not None:
        return {**said, "shards": [{"dim": dim, "sizes": sizes} for dim, sizes in sizes_of]}
    return {**said, "chunks": [{"offsets": list(box.offsets), "sizes": list(box.sizes)} for _, box in layout.chunks()]}


def _parts(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Dotted names are split at their dots, too."""
    return tuple(part for key in path for part in str(getattr(key, "value", key)).split("."))
