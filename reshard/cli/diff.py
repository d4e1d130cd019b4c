"""`reshard diff`: do two checkpoints hold the same, whatever their formats and topologies?"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reshard.cli.arguments import (
    Config,
    HintOption,
    Html,
    Naming,
    On,
    Source,
    UsageError,
    executor_on,
    mapping_of,
    read_hints,
    stored_hints,
)
from reshard.cli.show import console, print_json, print_report, report_as_json, size, write_page

if TYPE_CHECKING:
    from planners.findings import Coverage, Report

__all__ = ["diff"]


def diff(
    a: Source,
    b: Annotated[str, typer.Argument(metavar="OTHER", help="Another one.")],
    rtol: Annotated[
        float, typer.Option(min=0, help="Values may differ by this much of OTHER's. Default: bit by bit.")
    ] = 0.0,
    atol: Annotated[float, typer.Option(min=0, help="And by this much.")] = 0.0,
    normalized: Annotated[
        bool, typer.Option("--normalized", help="Compare under canonical names: for two frameworks' checkpoints.")
    ] = False,
    model: Annotated[
        bool, typer.Option("--model", help="Only the models' tensors, under their bare canonical names.")
    ] = False,
    names: Annotated[
        str | None,
        typer.Option(
            metavar="FROM:TO",
            help="Bring CHECKPOINT from one naming to that of OTHER first, as convert does; needs --config.",
        ),
    ] = None,
    unread: Annotated[
        bool, typer.Option("--unread", help="Quick: what was saved with equal fingerprints is not read; damage stays.")
    ] = False,
    config: Config = None,
    naming: Naming = None,
    hint: HintOption = None,
    on: On = None,
    limit: Annotated[int, typer.Option(min=1, help="Show at most so many differences.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: all differences.")] = False,
    html: Html = None,
) -> None:
    """Read both; compare names, shapes, dtypes, objects, values. Of a tensor that differs, the first element is told.

    Exits with 1 if they differ; with 0 if every value of both was read and is the same, or, with --unread, has the same
    saved fingerprint. In --json, `element` is an index in global coordinates.
    """
    import reshard

    if unread and (rtol or atol):
        raise UsageError("--unread compares saved fingerprints, which know no tolerance: leave out --rtol and --atol")
    if on and (normalized or model or names):
        raise UsageError("--on compares checkpoints as they are stored: convert one first, or leave out --on")
    given = read_hints(hint, used=normalized or model)
    mapping = mapping_of(names, config, naming)
    sides: list[Any] = [reshard.open(path) for path in (a, b)]
    labels = (sides[0].url, sides[1].url)
    sides = list(labels) if on else _named(sides, names, mapping, given, model, normalized)
    how = partial(reshard.compare, rtol=rtol, atol=atol, by_fingerprint=unread, labels=labels, measure=html is not None)
    with executor_on(on) as executor:
        report = how(*sides, executor=executor, progress=not as_json)
    if html is not None:
        write_page(html, report.to_html(), as_json=as_json)
    if as_json:
        print_json(report_as_json(report))
    else:
        _print(report, unread, bool(rtol or atol), limit)
    if not report.ok:
        raise typer.Exit(1)


def _named(sides: list[Any], names: str | None, mapping: Any, given: Any, model: bool, normalized: bool) -> list[Any]:
    """Under the names by which they are compared."""
    if model or (normalized and mapping is not None):
        kinds = (names or ":").split(":")
        hints = [stored_hints(kind, given) for kind in kinds]
        sides = [side.canonical(hint, model_only=model) for side, hint in zip(sides, hints)]
    elif normalized:
        sides = [side.normalized(given) for side in sides]
    return sides if mapping is None else [mapping.apply(sides[0]), *sides[1:]]


def _print(report: Report, is_unread: bool, is_within: bool, limit: int) -> None:
    covered = report.covered
    assert covered is not None
    if is_unread:
        console().print(_unread_note(covered), markup=False, soft_wrap=True)
    print_report(report, right=_verdict(covered, is_within), limit=limit)


def _unread_note(covered: Coverage) -> str:
    """What --unread did not look at, before any verdict."""
    if not covered.read_bytes:
        return "nothing was read: only the fingerprints saved with the values are compared; damage is not found"
    if covered.read_bytes >= covered.total_bytes:
        return "every value was read: none has equal fingerprints saved on both sides"
    skipped = size(covered.total_bytes - covered.read_bytes)
    return f"{skipped} of values were not read: only the fingerprints saved with them are compared; damage is not found"


def _verdict(covered: Coverage, is_within: bool) -> str:
    """What was found to be equal, and by what."""
    read, how = size(covered.read_bytes), "within the tolerance" if is_within else "bit by bit"
    if covered.read_bytes >= covered.total_bytes:
        return f"they hold the same: {read} of values on each side were read and compared {how}"
    if not covered.read_bytes:
        return "their saved fingerprints are equal; no byte was read"
    return f"their saved fingerprints are equal; {read} of values without one were read and compared {how}"
