"""`reshard verify`: is a checkpoint whole and undamaged?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from reshard.cli.arguments import AsJson, On, Source, executor_on
from reshard.cli.show import print_json, print_report, report_as_json, size

if TYPE_CHECKING:
    from planners.findings import Coverage

__all__ = ["verify"]


def verify(
    path: Source,
    against: Annotated[
        str | None, typer.Option(metavar="OTHER", help="Another checkpoint that must hold the same.")
    ] = None,
    shallow: Annotated[bool, typer.Option("--shallow", help="Look at metadata and file lengths only.")] = False,
    on: On = None,
    as_json: AsJson = False,
) -> None:
    """Read every byte, compare checksums and fingerprints where the format has them, and prove that
    chunks tile every tensor exactly once. The verdict says how many bytes of values were checked.

    Exits with 1 if anything is wrong, naming file, tensor and byte range.
    """
    import reshard

    with executor_on(on) as executor:
        report = reshard.verify(path, against, deep=not shallow, executor=executor, progress=not as_json)
    if as_json:
        print_json(report_as_json(report))
    else:
        right = ""
        if (covered := report.covered) is not None:
            right = "; ".join(filter(None, (_verdict(covered, against), covered.leaves_open)))
        print_report(report, right=right)
    if not report.ok:
        raise typer.Exit(1)


def _verdict(covered: Coverage, against: str | None) -> str:
    """What was found to be right, and what nobody could have found to be wrong."""
    total, checked = size(covered.total_bytes), size(covered.checked_bytes)
    same = "" if against is None else f", and the same as {against}"
    if covered.read_bytes < covered.total_bytes:
        equal = "" if against is None else f". The fingerprints saved with them are equal to those of {against}"
        return f"whole; {size(covered.total_bytes - covered.read_bytes)} of values were not read{equal}"
    if covered.is_full and covered.metadata_checked:
        return f"whole and undamaged: {total} of values checked{same}"
    if covered.is_full:
        return f"whole: {total} of values checked{same}. Of names, shapes and objects no checksum was saved"
    return (
        f"whole: {total} of values read, {checked} of them checked{same}. Of the others no checksums were saved: a "
        "changed value would not have been found"
    )
