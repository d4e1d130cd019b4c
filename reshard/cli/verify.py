"""`reshard verify`: whether a checkpoint is complete and undamaged."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

from typer import Exit, Option

from reshard.cli.arguments import AsJson, On, Source, Step, Workers, executor_on, newest
from reshard.cli.output import (
    as_given,
    counted,
    damaged,
    print_json,
    print_report,
    print_text,
    report_as_json,
    size,
)
from reshard.errors import CheckpointNotFoundError, CorruptCheckpointError, NormalizationError

if TYPE_CHECKING:
    from planners.findings import Coverage, Report

_UNREAD = re.compile("""(['"].*?) cannot be read: """)
"""Matches a reader's warning about a value that it cannot represent, such as a sparse tensor."""
_SHALLOW = (
    "Check only metadata and file sizes. With --against, also compare saved fingerprints, and read only tensors "
    "for which they are missing or differ."
)


def verify(
    path: Source,
    against: Annotated[
        str | None, Option(metavar="CHECKPOINT", help="Another checkpoint, which must have the same values.")
    ] = None,
    shallow: Annotated[bool, Option("--shallow", help=_SHALLOW)] = False,
    step: Step = None,
    workers: Workers = 1,
    on: On = None,
    as_json: AsJson = False,
) -> None:
    """Verify that a checkpoint is complete and undamaged.

    Reads every byte. Compares the data with checksums and fingerprints, if the format has them. Proves that the chunks
    cover each tensor exactly once. Prints how much data was verified.

    Exits with 1 if the checkpoint is damaged, or if it differs from --against. The first line of the output
    says `damaged` or `different`.
    For damage, lists the files and tensors, and the bytes if they are known.

    In a run, a newer step with missing files counts as damage. A step that a killed save left incomplete is listed, but
    does not count. If no step is complete, exits with 1. Exits with 3 if there is nothing to compare with --against.
    """
    import reshard

    engine = executor_on(on)
    against = against and newest(against)
    chosen = _chosen(path, step, as_json)
    with engine as executor:
        report = reshard.verify(  # of a run, it names newer steps that are not complete
            path if step is None else chosen,
            against,
            deep=not shallow,
            workers=workers,
            executor=executor,
            progress=not as_json,
        )
    if against and report.ok and not report.tensors and (both := reshard.compare(chosen, against)).is_empty:
        raise NormalizationError(f"{both.subject}: {both.covers}")  # as diff does: it is not the same, but nothing
    if as_json:
        print_json(report_as_json(report, path))
    else:
        covered = report.covered
        notes = [*filter(None, covered.unchecked.split("; "))] if covered else []
        right = _verdict(covered, against if report.ok else None) if covered else ""
        if unread := [found[1] for it in notes if (found := _UNREAD.match(it))]:
            right += f". {', '.join(unread)} cannot be read"
        if not report.ok:
            print_text(as_given(_failure(report, right, against), path), style="red")
        print_report(report, right=right, path=path)
        for text in notes:
            print_text(text, "note", "yellow")
    if not report.ok:
        raise Exit(1)


def _chosen(path: str, step: int | None, as_json: bool) -> str:
    """Return the path of the checkpoint to verify. If a run has no complete one, exit with 1."""
    from reshard.formats.detect import has_ended, steps_at
    from reshard.formats.run_folder import path_below

    try:
        return newest(path, step, reports_skipped=True)
    except (CheckpointNotFoundError, CorruptCheckpointError) as error:
        if step is not None or not (steps := steps_at(path)):
            raise
        if any(has_ended(path_below(path, each.name)) for each in steps):
            raise damaged(path, str(error), as_json) from None
        reasons = str(error).partition("\n")[2]
        raise damaged(path, f"no checkpoint of this run is complete:\n{reasons}", as_json, head="") from None


def _failure(report: Report, right: str, against: str | None) -> str:
    """Return what is wrong, and whether it is in the checkpoint itself or in the comparison with
    another one."""
    from reshard.api.task_shares import is_about

    number = len(report.findings)
    if report.covered is None or against is None:
        found = [it.fqn for it in report.findings if it.kind != "unchecked"]
        what, others = counted(len(found), "problem"), found.count(None)
        if 0 < others < len(found):
            what = f"{counted(len({*found}) - 1, 'name')}, and {counted(others, 'problem')} with files or metadata"
        if len(found) < number:
            what += f"; {counted(number - len(found), 'more name')} in damaged files not read"
        return f"damaged: {what}{f'; not compared with {against}' * (against is not None)}"
    whole = "undamaged" if right.startswith("complete and undamaged") else "complete"
    harmed = sum(is_about(finding.message, against) for finding in report.findings)
    if harmed == number:
        return f"{whole}, but {against} is damaged: {counted(number, 'problem')}"
    also = f"; {against} is damaged: {counted(harmed, 'problem')}" if harmed else ""
    return f"{whole}, but different from {against}: {counted(number - harmed, 'difference')}{also}"


def _verdict(covered: Coverage, against: str | None) -> str:
    """Return what was verified, and what could not be checked."""
    total, checked = size(covered.total_bytes), size(covered.checked_bytes)
    same = "" if against is None else f", and the same as {against}"
    if covered.read_bytes < covered.total_bytes:
        equal = "" if against is None else f". Their saved fingerprints are equal to those of {against}"
        return f"complete; {size(covered.total_bytes - covered.read_bytes)} of values were not read{equal}"
    if covered.is_full and covered.metadata_checked:
        return f"complete and undamaged: {total} of values verified{same}"
    if covered.is_full:
        return f"complete: {total} of values verified{same}. Names, shapes, and objects have no checksum"
    if not covered.checked_bytes:
        return f"complete: {total} of values read, none verified{same}. A changed value would not be detected"
    return (
        f"complete: {total} of values read, {checked} of them verified{same}. The rest has no checksums, so a changed "
        "value would not be detected"
    )
