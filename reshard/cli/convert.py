"""`reshard convert`: a checkpoint in another format, naming, dtype, or layout."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, cast

from typer import Argument, Option

from reshard.cli import arguments
from reshard.cli.arguments import (
    Config,
    HintOption,
    Model,
    Names,
    Naming,
    Normalized,
    On,
    Rules,
    Select,
    Source,
    Step,
    Workers,
)
from reshard.cli.completion import dtypes, formats, topologies
from reshard.cli.output import console, counted, print_json, print_text, size, some
from reshard.formats.table import ALSO_CALLED, NOT_SHARDED, WRITTEN, writing_of

if TYPE_CHECKING:
    from reshard.api.convert import ConvertReport
    from reshard.formats.table import FormatName
    from reshard.mapping import Mapping

_Format = Annotated[
    str,
    Option(
        "--format",
        "-f",
        metavar="FORMAT",
        autocompletion=formats,
        help=f"{', '.join(WRITTEN.values())}.",
    ),
]
_Onto = Annotated[
    str | None,
    Option(
        metavar="LAYOUT",
        autocompletion=topologies,
        help="Write one file per rank of this topology, such as fsdp=4,tp=2, or of this layout file.",
    ),
]


_Dtype = Annotated[
    str | None,
    Option(
        metavar="DTYPE",
        autocompletion=dtypes,
        help="Cast floating-point tensors to this dtype, such as bfloat16. Values out of its range become inf "
        "or, if it has no inf, NaN or its largest number. The report counts them.",
    ),
]
_MaxShard = Annotated[
    str | None,
    Option(
        metavar="SIZE",
        help="Maximum size of a file, such as 500MB. A larger tensor gets its own file. Not with --onto. Default: 5GB.",
    ),
]
_Dequantize = Annotated[
    bool,
    Option("--dequantize", help="Convert DeepSeek's fp8 and gpt-oss's mxfp4 weights to --dtype or bfloat16."),
]


def convert(
    source: Source,
    target: Annotated[str, Argument(metavar="OUTPUT", help="The folder to write. For torch_save, the file.")],
    format: _Format = "native",
    model: Model = False,
    normalized: Normalized = False,
    names: Names = None,
    config: Config = None,
    naming: Naming = None,
    select: Select = None,
    dtype: _Dtype = None,
    dequantize: _Dequantize = False,
    max_shard: _MaxShard = None,
    onto: _Onto = None,
    rule: Rules = None,
    hint: HintOption = None,
    step: Step = None,
    workers: Workers = 1,
    on: On = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an existing OUTPUT of this format.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Write a checkpoint in another format, naming scheme, dtype, or layout.

    Holds only small pieces of tensors in memory. To resume an interrupted conversion, run the same command again.
    """
    import reshard

    layout = _layout(format := ALSO_CALLED.get(format, format), onto, rule)
    normalized |= writing_of(format).form is not None
    dtype, given = dtype and arguments.dtype_name(dtype), arguments.read_hints(hint, used=normalized or model)
    hints = arguments.stored_hints((names or "").partition(":")[0], given)
    mapping, plain = arguments.mapping_of(names, config, naming), arguments.dequantized(dequantize, dtype)
    engine, source = arguments.executor_on(on), arguments.newest(source, step)
    kept: list[str] = []
    _note_useless(plain, source, as_json)
    if names is not None and mapping is not None:
        named = reshard.open(source)
        named = named.canonical(hints, model_only=model) if model or normalized else named
        kept = arguments.unmapped(names, mapping, plain.apply(named))
    with _resumable(), engine as executor:
        report = reshard.convert(
            source,
            target,
            format=cast("FormatName", format),
            mapping=(plain | mapping if mapping else plain) if plain.stages else mapping,
            onto=layout,
            select=select or None,
            dtype=dtype,
            normalized=normalized,
            model_only=model,
            hints=hints,
            max_shard_bytes=None if max_shard is None else arguments.size_in_bytes(max_shard),
            workers=workers,
            executor=executor,
            alone=True,
            overwrite=overwrite,
            progress=not as_json,
        )
    _print(report, kept, model, normalized, as_json)


def _note_useless(dequantizing: Mapping, source: str, as_json: bool) -> None:
    from reshard import open

    if not dequantizing.stages:
        return
    given = open(source)
    if [*dequantizing.apply(given)] == [*given]:  # otherwise the scales are lost
        print_text(
            "--dequantize has no effect: no tensor is quantized", "note", "yellow", screen=console(stderr=as_json)
        )


def _layout(format: str, onto: str | None, rule: list[str] | None) -> Any:
    """Return the layout that `onto` describes, or its text if the source may record its axes.
    Raises UsageError if the format cannot store layouts, and for rules without a topology."""
    from reshard.api.plan import names_topology

    if onto is not None and not writing_of(format).is_sharded:
        raise arguments.UsageError(f"{format} {NOT_SHARDED}")
    if onto is None or (rule is None and names_topology(onto)):
        layout: Any = onto
    else:
        layout = arguments.side(onto, arguments.rules_of(rule))
    if rule and not hasattr(layout, "rules"):
        fix = f"{onto!r} is not a topology, so leave out --rule" if onto else "add --onto"
        raise arguments.UsageError(f"--rule is for the topology of --onto: {fix}")
    return layout


@contextmanager
def _resumable() -> Iterator[None]:
    log = logging.getLogger("reshard")
    log.addFilter(_is_not_in_report)
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted: run the same command to resume", file=sys.stderr)
        raise
    finally:
        log.removeFilter(_is_not_in_report)


def _is_not_in_report(record: logging.LogRecord) -> bool:
    """Return whether the report omits the log record."""
    return not hasattr(record, "is_in_report")


def _print(report: ConvertReport, kept: list[str], is_model: bool, is_normalized: bool, as_json: bool) -> None:
    from planners.units import format_seconds
    from reshard.checkpoint import open
    from reshard.formats.normalize import without_name

    beside = without_name(open(report.source).contents) if is_model else ()
    if as_json:
        print_json({**vars(report), "phases": report.seconds, "names_kept": kept, "not_in_model": beside})
        return
    seconds = report.phases.seconds
    rate = f", {size(report.total_bytes / seconds)}/s" if seconds >= 1 else ""  # of short runs, it says little
    print_text(
        f"format {report.format}: {counted(report.tensors, 'tensor')} and "
        f"{counted(report.objects, 'object')}, "
        f"{size(report.total_bytes)} in {counted(len(report.files), 'file')}, {format_seconds(seconds)}{rate}",
        report.target,
        "bold",
    )
    if report.unchecked:
        print_text(report.unchecked, "source", "yellow")
    if report.resumed:
        print_text(
            f"kept {counted(len(report.resumed), 'file')} of an interrupted conversion, verified",
        )
    unnamed = [key for key in report.unnamed if key not in beside]
    for text, keys in (
        ("tied, stored once", [f"{alias} = {kept}" for alias, kept in report.aliases.items()]),
        (f"omitted ({report.format} cannot store them)", [key for key in report.omitted if key not in report.unnamed]),
        (f"omitted ({'no canonical name' if is_normalized else 'cannot be read here'})", unnamed),
        ("omitted (not part of the model)", beside),
        ("not renamed by --names", kept),
        *(("note", [text]) for text in report.warnings),
    ):
        if keys:
            print_text(some(keys), text, "yellow")
