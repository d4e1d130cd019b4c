"""`reshard diff`: whether two checkpoints of any format and topology are the same."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from reshard.cli import arguments
from reshard.cli.arguments import (
    Config,
    HintOption,
    Html,
    Model,
    Names,
    Naming,
    Normalized,
    On,
    Select,
    Workers,
)
from reshard.cli.output import (
    as_given,
    counted,
    damaged,
    print_json,
    print_report,
    print_text,
    print_written,
    report_as_json,
    size,
    some,
)
from reshard.errors import CorruptCheckpointError, NormalizationError
from reshard.live.garbage_collection import gc_paused

if TYPE_CHECKING:
    from planners.findings import Coverage, Finding
    from reshard.api.compare import CompareReport

_Rtol = Annotated[
    float,
    Option(
        metavar="X",
        min=0,
        help="Tolerance for tensors, relative to the values in AFTER, such as 1e-3. Also allows different dtypes. "
        "Plain numbers must be equal. Default: compare bit by bit.",
    ),
]
_Atol = Annotated[
    float,
    Option(
        metavar="X",
        min=0,
        help="Absolute tolerance for tensors, added to that of --rtol. Also allows different dtypes.",
    ),
]
_ByFingerprint = Annotated[
    bool,
    Option("--by-fingerprint", help="Skip tensors whose saved fingerprints are equal."),
]


@gc_paused()
def diff(
    a: Annotated[str, Argument(metavar="BEFORE", help="A folder, file, or URL in any known format.")],
    b: Annotated[str, Argument(metavar="AFTER", help="The checkpoint to compare with it.")],
    rtol: _Rtol = 0.0,
    atol: _Atol = 0.0,
    select: Select = None,
    normalized: Normalized = False,
    model: Model = False,
    names: Names = None,
    by_fingerprint: _ByFingerprint = False,
    unread: Annotated[bool, Option("--unread", hidden=True)] = False,
    config: Config = None,
    naming: Naming = None,
    hint: HintOption = None,
    workers: Workers = 1,
    on: On = None,
    limit: Annotated[int, Option(metavar="N", min=1, help="Show at most this many differences.")] = 50,
    as_json: Annotated[bool, Option("--json", help="Print all differences as JSON.")] = False,
    html: Html = None,
) -> None:
    """Compare two checkpoints of any format and topology.

    Reads both, and compares names, shapes, dtypes, objects, and values. For each tensor that differs, prints the
    index of the first different element in the full tensor, and the largest absolute and relative difference.
    --by-fingerprint is fast, but cannot find damage since the save.

    Exits with 0 if both are the same, 1 if they differ or one is damaged, and 3 if there is nothing to compare.
    """
    import reshard

    by_fingerprint = _by_fingerprint(by_fingerprint, unread, is_within=bool(rtol or atol))
    parallel = "--on" if on else "--workers" * (workers > 1)
    if parallel and (normalized or model or names or select):
        words = "compares full checkpoints under stored names: leave out --normalized, --model, --names, and --select"
        raise arguments.UsageError(f"{parallel} {words}, or convert one checkpoint first")
    given = arguments.read_hints(hint, used=normalized or model)
    mapping, engine = arguments.mapping_of(names, config, naming), arguments.executor_on(on)
    sides = [_opened(path, as_json) for path in (a, b)]
    labels = (sides[0].url, sides[1].url)
    sides = sides if parallel else _named(sides, names, mapping, given, model, normalized, select)
    with engine as executor:
        report = reshard.compare(
            *(labels if parallel else sides),
            rtol=rtol,
            atol=atol,
            by_fingerprint=by_fingerprint,
            labels=labels,
            measure=html is not None,
            workers=workers,
            executor=executor,
            progress=not as_json,
        )
    if report.is_empty:
        raise NormalizationError(f"{report.subject}: {report.covers}")
    if html is not None:
        html.write_text(report.to_html(), encoding="utf-8")
    _print(report, by_fingerprint, bool(rtol or atol), sides, limit, as_json)
    print_written(html, as_json=as_json)
    if not report.ok:
        raise Exit(1)


def _by_fingerprint(wanted: bool, by_old_name: bool, is_within: bool) -> bool:
    if by_old_name:
        print("--unread is deprecated: use --by-fingerprint", file=sys.stderr)
    if (wanted or by_old_name) and is_within:
        raise arguments.UsageError("fingerprints allow no tolerance: leave out --rtol and --atol, or --by-fingerprint")
    return wanted or by_old_name


def _opened(path: str, as_json: bool) -> Any:
    """Return a side. If it is damaged, the command prints the damage and exits with 1."""
    import reshard

    try:
        return reshard.open(arguments.newest(path))
    except CorruptCheckpointError as error:
        raise damaged(path, str(error), as_json) from None


def _named(
    sides: list[Any],
    names: str | None,
    mapping: Any,
    given: Any,
    model: bool,
    normalized: bool,
    select: Any,
) -> list[Any]:
    """Return the sides, with the names under which they are compared."""
    if model or normalized:
        kinds = zip(sides, (names or ":").split(":"))
        sides = [side.canonical(arguments.stored_hints(kind, given), model_only=model) for side, kind in kinds]
    sides = sides if mapping is None else [mapping.apply(sides[0]), *sides[1:]]
    return [side.select(select) for side in sides] if select else sides


def _print(
    report: CompareReport, is_unread: bool, is_within: bool, sides: list[Any], limit: int, as_json: bool
) -> None:
    if as_json:
        print_json(report_as_json(report))
        return
    covered = report.covered
    assert covered is not None
    if is_unread:
        print_text(_unread_note(covered))
    for line in _damage(report):
        print_text(line, "damaged", "red")
    different = [finding for finding in report.findings if finding.fqn not in report.damaged]
    if different:
        print_text(_summary(different), style="red")
    if different or report.ok:
        shown = dataclasses.replace(report, findings=tuple(_with_size(it, report) for it in different))
        right = _verdict(covered, is_within) if report.ok else ""
        print_report(shown, right=right, of=" in common", limit=limit, more="--limit or --json")
        if _may_have_other_types(sides, report):
            print_text("lists and tuples count as equal, and so do 1 and 1.0", "note", "yellow")
    if covered.unchecked:
        print_text(covered.unchecked, "note", "yellow")


def _with_size(finding: Finding, report: CompareReport) -> Finding:
    """Add the difference between the values of a tensor, if its elements were compared."""
    if finding.element is None or (found := report.largest.get(finding.fqn or "")) is None:
        return finding
    far, ratio = found
    words = f"{finding.message}; largest difference: {far:.3g} absolute, {ratio:.3g} relative"
    return dataclasses.replace(finding, message=words)


def _may_have_other_types(sides: list[Any], report: CompareReport) -> bool:
    """Return True if a list and a tuple, or 1 and 1.0, may count as equal."""
    from reshard.live.plain_data import represent

    x, y = (side.objects for side in sides)
    if sides[0].format != sides[1].format:  # one may keep a list as one object
        return bool(x or y)
    kinds = sides[0].contents.containers.items() ^ sides[1].contents.containers.items()
    equal = (x.keys() & y.keys()) - {finding.fqn for finding in report.findings}
    return "tuple" in {kind for _, kind in kinds} or any(represent(x[name]) != represent(y[name]) for name in equal)


def _damage(report: CompareReport) -> Iterator[str]:
    """Yield a line for each damaged side, with the places of damage and the values that could not
    be compared."""
    from planners.geometry.arrays import grouped

    left, right = report.labels
    told = {name: as_given(as_given(text, left), right) for name, text in report.damaged.items()}
    sides = grouped(
        (max((s for s in report.labels if text.startswith(s)), key=len, default=""), name)
        for name, text in told.items()
    )
    for names in sides.values():
        places = {told[name] for name in names}
        more = f" (the first of {len(places)} places)" * (len(places) > 1)
        yield (
            f"{told[names[0]]}{more}; {counted(len(names), 'value')} could not be compared: "
            f"{some(list(map(repr, names)), 3)}"
        )


def _summary(different: Sequence[Finding]) -> str:
    """Return the number of differences of each kind, as text."""
    kinds = Counter(
        "only on one side" if finding.kind == "one-sided" else
        "not compared" if finding.kind == "unchecked" else
        "with different values" if finding.element is not None else
        "other differences"
        for finding in different
    )  # fmt: skip
    names = {"with different values": "tensor", "only on one side": "name", "not compared": "name"}
    said = [f"{counted(kinds[kind], what)} {kind}" for kind, what in names.items() if kinds[kind]]
    if others := kinds["other differences"]:
        said.append(counted(others, "other difference" if said else "difference"))
    return f"{'different' if kinds.keys() - {'not compared'} else 'incomplete'}: {', '.join(said)}"


def _unread_note(covered: Coverage) -> str:
    """Return a note about what --by-fingerprint did not read."""
    if not covered.read_bytes:
        return "no values were read: only saved fingerprints are compared, which does not detect damage"
    if covered.read_bytes >= covered.total_bytes:
        return "all values were read: no tensor has equal fingerprints on both sides"
    skipped = size(covered.total_bytes - covered.read_bytes)
    return f"{skipped} of values were not read: only saved fingerprints are compared, which does not detect damage"


def _verdict(covered: Coverage, is_within: bool) -> str:
    """Return what was equal, and how it was compared."""
    read = size(covered.read_bytes)
    if is_within:
        return f"equal within the tolerance: {read} of values were read and compared"
    if covered.read_bytes >= covered.total_bytes:
        return f"the same: {read} of values on each side were read and compared bit by bit"
    if not covered.read_bytes:
        return "the saved fingerprints are equal; no values were read"
    return f"the saved fingerprints are equal; {read} of values without fingerprints were read and compared bit by bit"
