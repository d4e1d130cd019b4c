"""`reshard convert`: a checkpoint in another format, under other names, cut otherwise."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from reshard.cli.arguments import (
    Config,
    HintOption,
    Naming,
    On,
    Rules,
    Source,
    choice,
    dequantized,
    dtype_name,
    executor_on,
    mapping_of,
    read_hints,
    rules_of,
    side,
    size_in_bytes,
    stored_hints,
    untaken,
)
from reshard.cli.show import console, counted, print_json, size
from reshard.formats.table import WRITTEN, writing_of

if TYPE_CHECKING:
    from reshard.api.convert import ConvertReport
    from reshard.formats.table import FormatName

__all__ = ["convert"]


_Format = Annotated[
    str,
    typer.Option("--format", "-f", help=f"One of {', '.join(WRITTEN.values())}."),
]
_Names = Annotated[
    str | None,
    typer.Option(
        metavar="FROM:TO",
        help="Of huggingface, transformers, plain, torchtitan, megatron, vllm and sglang; needs --config.",
    ),
]
_Select = Annotated[
    list[str] | None, typer.Option(metavar="GLOB", help="Take only these; '!GLOB' leaves out. Repeat it.")
]
_Onto = Annotated[
    str | None,
    typer.Option(help="Write the files of these ranks: fsdp=8, fsdp=4,tp=2, a layout or a topology file."),
]


def convert(
    source: Source,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The folder to write; for torch_save the file.")],
    format: _Format = "native",
    model: Annotated[
        bool, typer.Option("--model", help="Only the model's tensors, under their bare canonical names.")
    ] = False,
    normalized: Annotated[bool, typer.Option("--normalized", help="Under canonical names, whatever wrote it.")] = False,
    names: _Names = None,
    config: Config = None,
    naming: Naming = None,
    select: _Select = None,
    dtype: Annotated[str | None, typer.Option(help="Convert floating-point tensors, such as to bfloat16.")] = None,
    dequantize: Annotated[
        bool,
        typer.Option("--dequantize", help="fp8 of DeepSeek and mxfp4 of gpt-oss become --dtype, or bfloat16."),
    ] = False,
    max_shard: Annotated[str, typer.Option(metavar="SIZE", help="Most bytes of a file, such as 5GB.")] = "5GB",
    onto: _Onto = None,
    rule: Rules = None,
    hint: HintOption = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that write files at the same time.")] = 1,
    on: On = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint at TARGET.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Write CHECKPOINT in another format, in little memory. What is interrupted goes on when it is started again."""
    import reshard
    from reshard.mapping import Mapping

    normalized |= writing_of(choice(format, WRITTEN, "format")).form is not None
    dtype = dtype and dtype_name(dtype)
    hints = stored_hints((names or "").partition(":")[0], read_hints(hint, used=normalized or model))
    mapping, plain = mapping_of(names, config, naming), dequantized(dequantize, dtype)
    kept: list[str] = []
    if names is not None and mapping is not None:
        opened = reshard.open(source)
        named = opened.canonical(hints, model_only=model) if model or normalized else opened
        kept = untaken(names, mapping, plain.apply(named))
    with _interrupts_told(), executor_on(on) as executor:
        report = reshard.convert(
            source,
            target,
            format=cast("FormatName", format),
            mapping=mapping if not plain.stages else plain | (mapping or Mapping()),
            onto=None if onto is None else side(onto, rules_of(rule)),
            select=select,
            dtype=dtype,
            normalized=normalized,
            model_only=model,
            hints=hints,
            max_shard_bytes=size_in_bytes(max_shard),
            workers=workers,
            executor=executor,
            alone=True,
            overwrite=overwrite,
            progress=not as_json,
        )
    _print(report, kept, as_json)


@contextmanager
def _interrupts_told() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        raise


def _print(report: ConvertReport, kept: list[str], as_json: bool) -> None:
    if as_json:
        print_json({**{name: getattr(report, name) for name in report.__dataclass_fields__}, "names_kept": kept})
        return
    from rich.markup import escape

    screen = console()
    time = f"{report.seconds:.1f} s, {size(report.total_bytes / max(report.seconds, 1e-9))}/s"
    tensors, objects = counted(report.tensors, "tensor"), counted(report.objects, "other value")
    screen.print(
        f"[bold]{escape(report.target)}[/], format {report.format}: {tensors} and {objects}, "
        f"{size(report.total_bytes)} in {counted(len(report.files), 'file')}, {time}",
        soft_wrap=True,
    )
    if report.unchecked:
        screen.print(f"  [yellow]{escape(report.unchecked)}[/]", soft_wrap=True)
    if report.resumed:
        screen.print(f"  {counted(len(report.resumed), 'file')} of an interrupted try checked and kept")
    for text, keys in (
        ("tied, stored once", [f"{alias} = {kept}" for alias, kept in report.aliases.items()]),
        (f"left out, without a place in {report.format} or a canonical name", list(report.left_out)),
        ("under their old names, since --names says nothing of them", kept),
        ("note", list(report.warnings)),
    ):
        _print_some(screen, text, keys)


def _print_some(screen: Any, text: str, keys: list[str], most: int = 5) -> None:
    from rich.markup import escape

    if keys:
        more = f" and {len(keys) - most} more" if len(keys) > most else ""
        screen.print(f"  [yellow]{text}[/]  {escape(', '.join(keys[:most]))}{more}", soft_wrap=True)
