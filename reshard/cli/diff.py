"""`reshard diff`: do two checkpoints hold the same, whatever their formats and topologies?"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from reshard.cli.names import Config, HintOption, Naming, mapping_of, read_hints, stored_hints
from reshard.cli.show import print_json, print_report, report_as_json, size

__all__ = ["diff"]


def diff(
    a: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint of any known format.")],
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
    config: Config = None,
    naming: Naming = None,
    hint: HintOption = None,
    limit: Annotated[int, typer.Option(min=1, help="Show at most so many differences.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: all differences.")] = False,
) -> None:
    """Compare names, shapes, dtypes, objects and values. Of each tensor that differs, the first such element is told.

    Exits with 1 if they differ. In --json, `element` is an index in global coordinates.
    """
    import reshard

    given = read_hints(hint, used=normalized or model)
    mapping = mapping_of(names, config, naming)
    sides: list[Any] = [reshard.open(path) for path in (a, b)]
    if model or (normalized and mapping is not None):
        kinds = (names or ":").split(":")
        hints = [stored_hints(kind, given) for kind in kinds]
        sides = [side.canonical(hint, model_only=model) for side, hint in zip(sides, hints)]
    elif normalized:
        sides = [side.normalized(given) for side in sides]
    if mapping is not None:
        sides[0] = mapping.apply(sides[0])
    report = reshard.compare(*sides, rtol=rtol, atol=atol, labels=(a, b), progress=not as_json)
    if as_json:
        print_json(report_as_json(report))
    else:
        covered = report.covered
        unread = 0 if covered is None else covered.total_bytes - covered.read_bytes
        note = f": {size(unread)} of values by the fingerprints saved with them, unread" if unread else ""
        print_report(report, right=f"they hold the same{note}", limit=limit)
    if not report.ok:
        raise typer.Exit(1)
