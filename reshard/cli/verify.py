"""`reshard verify`: is a checkpoint whole and undamaged?"""

from __future__ import annotations

from typing import Annotated

import typer

from reshard.cli.show import print_json, print_report, report_as_json

__all__ = ["verify"]


def verify(
    path: Annotated[str, typer.Argument(help="A checkpoint of any known format.")],
    against: Annotated[str | None, typer.Option(help="Another checkpoint that must hold the same.")] = None,
    shallow: Annotated[bool, typer.Option("--shallow", help="Look at metadata and file lengths only.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Read every byte, compare checksums and fingerprints, and prove that chunks tile every tensor exactly once.

    Exits with 1 if anything is wrong, naming file, tensor and byte range.
    """
    import reshard

    report = reshard.verify(path, against, deep=not shallow, progress=not as_json)
    if as_json:
        print_json(report_as_json(report))
    else:
        print_report(report, right="whole and undamaged" if not shallow else "whole; its bytes were not read")
    if not report.ok:
        raise typer.Exit(1)
