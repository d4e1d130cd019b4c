"""Parses arguments of commands: sides of a plan, mappings, hints, and mistyped words."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Argument, Option

from planners.errors import PlanError
from reshard.cli.completion import namings, one_of, tensor_names
from reshard.cli.output import console, print_text
from reshard.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    FormatError,
    KeyMismatchError,
    ReshardError,
    did_you_mean,
    framework,
    sentence,
)

if TYPE_CHECKING:
    from planners.geometry.layout import StateLayout
    from planners.geometry.topologies import Topology
    from reshard.checkpoint import Checkpoint
    from reshard.mapping import Mapping as StateMapping

# Arguments and options that several commands share.


NAMING_KEYS = (
    "titan", "transformer_engine", "padded_vocab", "zero_centered", "exact", "mtp", "routed_experts",
    "qkv_interleaved", "fill",
)  # fmt: skip
"""Options of `reshard.mapping.families.ready`, which is imported only when it is used."""
Source = Annotated[str, Argument(metavar="CHECKPOINT", help="A folder, file, or URL in any known format.")]
AsJson = Annotated[bool, Option("--json", help="Print JSON.")]
Depth = Annotated[int | None, Option(metavar="N", min=1, help="Show at most this many levels of names.")]


def writable(file: Path | None) -> Path | None:
    """Return the file. Raises OSError, before anything is read, if it is not writable."""
    if file is not None and not file.is_fifo():
        is_new = not file.exists()
        file.open("a").close()
        if is_new:
            file.unlink()
    return file


Html = Annotated[
    Path | None,
    Option(metavar="[FILE.html]", callback=writable, help="Write an HTML page. Default: ./reshard-COMMAND.html."),
]
Legend = Annotated[bool, Option("--legend", help="Explain the notation of layouts.")]
Rules = Annotated[
    list[str] | None,
    Option(
        "--rule",
        metavar="GLOB=PLACEMENTS",
        help="Place tensors whose names match GLOB, such as '*.wo.weight=S(0),S(1)'. Repeatable.",
    ),
]
Select = Annotated[
    list[str] | None,
    Option(
        metavar="GLOB",
        autocompletion=tensor_names,
        help="Use only names that match. * also matches dots. '!GLOB' excludes names. Repeatable.",
    ),
]
Step = Annotated[int | None, Option("--step", metavar="N", min=0, help="Use this step of a run. Default: the newest.")]
Workers = Annotated[
    int,
    Option("--workers", metavar="N", min=1, help="Number of parallel processes."),
]
Normalized = Annotated[bool, Option("--normalized", help="Use canonical names and layouts.")]
Model = Annotated[bool, Option("--model", help="Use only the model. Its names are FQNs, without a prefix.")]
Names = Annotated[
    str | None,
    Option(
        "--names",
        metavar="FROM:TO",
        autocompletion=namings,
        help="Convert the names and tensors of SOURCE from one naming scheme to another, "
        "such as torchtitan:huggingface or torchtitan:hf. Needs --config.",
    ),
]
On = Annotated[
    str | None,
    Option(
        "--on",
        metavar="WHERE",
        autocompletion=one_of("processes:", "dask://", "ray://"),
        help="Run on processes:N, dask://HOST:PORT, or ray://HOST:PORT.",
    ),
]


def newest(path: str, step: int | None = None, *, reports_skipped: bool = False) -> str:
    """Return the path of a checkpoint. In a run, this is the given step, complete or not, or the
    newest complete one. Prints the latter on stderr, with newer steps that were skipped, unless the
    command reports these."""
    from reshard.formats.detect import step_path, steps_at

    if step is not None:
        return step_path(path, step)
    if not steps_at(path):
        return path
    from reshard.checkpoint import log_skipped, open_among

    found = open_among(path, 0, 1)
    if not reports_skipped:
        log_skipped(found)
    print_text(f"using {found.url}, the newest complete checkpoint of {path}", screen=console(stderr=True))
    return found.url


def executor_on(engine: str | None) -> AbstractContextManager[Executor | None]:
    """Return an executor for an engine: `with executor_on("dask://scheduler:8786") as executor`.

    Raises UsageError for an unknown engine, MissingPackageError if its package is not installed.
    """
    if engine is None:
        return nullcontext()
    kind, _, where = engine.partition(":")
    address = where.removeprefix("//")
    if kind == "processes" and address.isdecimal() and int(address):
        from reshard.api.tasks import Processes

        return Processes(int(address))
    if kind not in ("dask", "ray") or not where.startswith("//") or (kind == "dask" and not address):
        raise UsageError(f"cannot read --on {engine}: write processes:16, dask://HOST:PORT, or ray://HOST:PORT")
    try:
        return _on_dask(address) if kind == "dask" else _on_ray(address)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"--on {engine} does not answer: {error}. Check the address, and that the cluster is running"
        ) from error


@contextmanager
def _dask_executor(client: Any) -> Iterator[Executor]:
    with client, client.get_executor() as executor:
        yield executor


def _on_dask(address: str) -> AbstractContextManager[Executor]:
    with framework("distributed>=2024.1"):
        from distributed import Client

    return _dask_executor(Client(f"tcp://{address}", timeout=30))


def _on_ray(address: str) -> AbstractContextManager[Executor]:
    from reshard.integrations.ray import RayExecutor

    return RayExecutor(f"ray://{address}" if address else None)


def rules_of(given: list[str] | None) -> dict[str, str]:
    """Return placements by glob. Raises UsageError for a rule that cannot be parsed."""
    rules = {}
    for text in given or []:
        glob, equals, placements = text.partition("=")
        if not equals:
            raise UsageError(f"cannot read the rule {text!r}: write GLOB=PLACEMENTS, such as '*.weight=S(0),R'")
        rules[glob.strip()] = placements.strip()
    return rules


class Sides(NamedTuple):
    """The two sides of a plan."""

    saved: StateLayout
    wanted: StateLayout
    topology: Topology | None
    """The topology from which one side was made, for the tensors of the other side."""
    is_onto: bool
    """True if `wanted` is the side that was made from the topology."""

    @property
    def unsharded_axes(self) -> dict[str, tuple[str, ...]]:
        """Axes that shard none of these tensors, although the topology has a rule by which they shard."""
        made = self.wanted if self.is_onto else self.saved
        return {} if self.topology is None else self.topology.unsharded_axes(made)

    @property
    def notes(self) -> dict[str, tuple[str, ...]]:
        """Return the assumptions of the topology, in the form of the JSON output."""
        return {"notes": () if self.topology is None else self.topology.notes}


def both_sides(
    source: str,
    onto: str,
    rules: Mapping[str, str],
    **how: Any,
) -> Sides:
    """Return both sides of a plan.

    `rules` apply to sides that are topologies. `how` are the arguments of `side` for checkpoints.

    Raises UsageError if neither side says which tensors there are, if no side uses the rules, or if
    a side cannot be parsed.
    """
    from planners.geometry.layout import StateLayout
    from reshard.api.plan import names_topology

    texts = source, onto
    opened = [None if names_topology(text) else side(text, rules, **how) for text in texts]
    known = [layout for layout in opened if isinstance(layout, StateLayout)]
    saved = known[0] if known else None
    sides = [_topology(text, rules, saved) if it is None else it for text, it in zip(texts, opened)]
    if not known:
        raise UsageError(
            f"{source!r} and {onto!r} are both topologies, and a topology does not list tensors: pass a checkpoint or "
            "a layout file as one of the two"
        )
    topology = next((side for side in sides if not isinstance(side, StateLayout)), None)
    if topology is None and rules:
        raise UsageError(f"--rule is for a topology, but {source!r} and {onto!r} are not topologies: leave out --rule")
    first, second = (side if isinstance(side, StateLayout) else side.layout(known[0].specs) for side in sides)
    return Sides(first, second, topology, topology is sides[1])


def side(
    text: str,
    rules: Mapping[str, str],
    normalized: bool = False,
    hints: Mapping[str, Any] | None = None,
    select: list[str] | None = None,
) -> StateLayout | Topology:
    """Return the layout of a checkpoint or file, or a topology. Raises UsageError for a topology
    that cannot be parsed."""
    import reshard
    from planners.geometry.layout import StateLayout
    from planners.geometry.topologies import WORDS
    from reshard.api.plan import is_layout_file, names_topology, read_layout_file

    if names_topology(text):
        return _topology(text, rules, None)
    if is_layout_file(text):
        layout = read_layout_file(text, rules)
    else:
        try:
            checkpoint = reshard.open(newest(text))
        except CheckpointNotFoundError as error:
            raise CheckpointNotFoundError(
                f"{sentence(str(error))} Or pass a topology, such as {WORDS}, or any other with --rule"
            ) from None
        checkpoint.contents.refuse_incomplete()
        layout = _canonical(checkpoint, hints) if normalized else checkpoint.layout
    if not select or not isinstance(layout, StateLayout):
        return layout
    from reshard.checkpoint import chosen

    kept = chosen(list(layout), select, text)
    return StateLayout({name: of for name, of in layout.items() if name in kept}, layout.world_size)


def _topology(text: str, rules: Mapping[str, str], saved: StateLayout | None) -> Topology:
    """Return the typed topology for the tensors of `saved`. Raises UsageError if it cannot be parsed."""
    from planners.geometry.topologies import topology_of

    try:
        return topology_of(text, rules, saved)
    except PlanError as error:
        raise UsageError(str(error)) from None


def _canonical(checkpoint: Checkpoint, hints: Mapping[str, Any] | None) -> StateLayout:
    """Return the layout under canonical names: `model.<fqn>`, `optim.state.<fqn>.<name>`."""
    from planners.geometry.layout import StateLayout
    from reshard.checkpoint import stored_layout
    from reshard.live.tree import flatten
    from reshard.state import key_of
    from reshard.stored.tensor import LazyTensor

    leaves = flatten(checkpoint.normalized(hints), is_leaf=lambda value: isinstance(value, LazyTensor)).leaves
    tensors = {key_of(path): value.stored for path, value in leaves.items() if isinstance(value, LazyTensor)}
    return StateLayout({key: stored_layout(stored.renamed(key)) for key, stored in tensors.items()})


# `--names FROM:TO` and `--hint KEY=JSON`: the ready mappings on the command line, and what a
# checkpoint cannot say of its names.


Config = Annotated[
    str | None, Option("--config", metavar="FILE", help="For --names: the Hugging Face model's config.json.")
]
Naming = Annotated[
    list[str] | None,
    Option(
        "--naming",
        metavar="KEY=VALUE",
        autocompletion=one_of(*(f"{key}=" for key in NAMING_KEYS)),
        help="For --names: an option of a naming scheme, such as titan=0.2 or padded_vocab=50304. Repeatable. "
        f"Keys, explained at reshard.mapping.ready: {', '.join(NAMING_KEYS)}.",
    ),
]
HintOption = Annotated[
    list[str] | None,
    Option(
        "--hint",
        metavar="KEY=JSON",
        help="Provide a value that the checkpoint lacks but canonical names need, such as param_names or "
        "vocab_size. Errors print the exact option. Repeatable.",
    ),
]


def mapping_of(names: str | None, config: str | None, naming: list[str] | None) -> StateMapping | None:
    """Return the mapping that the options select, or None without such options.

    Raises UsageError for incomplete options, and for options that no mapping has.
    """
    if names is None:
        if config is not None or naming:
            raise UsageError("--config and --naming are for --names FROM:TO, such as --names torchtitan:huggingface")
        return None
    from reshard.mapping.families import NAMINGS, ready

    source, colon, target = names.partition(":")
    for naming_of_a_side in (source, target) if colon else ():
        choice(naming_of_a_side, NAMINGS, "naming scheme")
    if not colon or config is None:
        fix = "the model's config.json is needed: add" if colon else "write --names FROM:TO"
        raise UsageError(f"--names {names}: {fix} --config config.json")
    return ready(config, source, target, **_options(naming or [], ready))


def dequantized(wanted: bool, dtype: str | None) -> StateMapping:
    """Return the mapping that dequantizes weights, or None if `wanted` is False."""
    from reshard.mapping import Dequantize, Mapping, Mxfp4

    to = dtype or "bfloat16"
    return Mapping([Dequantize(dtype=to), Mxfp4(dtype=to)] if wanted else [])


def stored_hints(naming: str | None, hints: dict[str, Any]) -> dict[str, Any]:
    """Return the hints, with one that keeps the names in Hugging Face's files if `naming` is
    Hugging Face's."""
    return {"stored_names": True, **hints} if naming in ("huggingface", "hf", "plain") else hints


def unmapped(names: str, mapping: StateMapping, state: Checkpoint) -> list[str]:
    """Return the tensors that keep their names although the naming scheme changes.

    Raises KeyMismatchError if nearly all names stay the same: then the checkpoint does not have the
    names that the options say.
    """
    if not mapping.stages:
        return []
    becomes = mapping.names(state)
    changed = sum(now != (name,) for name, now in becomes.items())
    is_other = any(part in ("torchtitan", "megatron") for part in names.split(":"))
    # "norm.weight" within "model.norm.weight" may be taken by chance
    if changed * 10 < len(state) if is_other else not changed:
        found = f"{names.partition(':')[0]}: its first name is {next(iter(state), '')!r}"
        raise KeyMismatchError(f"{state.url} has no names of {found}. Check the order of the two sides of --names")
    return [name for name in state if is_other and name not in becomes]


def read_hints(given: list[str] | None, *, used: bool = True) -> dict[str, Any]:
    """Return hints by name. Raises UsageError for hints that cannot be parsed, and for those that
    no other option uses."""
    if given and not used:
        raise UsageError("--hint needs canonical names: add --normalized")
    from reshard.formats.canonical import HINTS

    hints = {}
    for text in given or []:
        name, equals, value = text.partition("=")
        try:
            hints[choice(name, HINTS, "hint") if equals else name] = json.loads(value)
        except ValueError:
            fix = "the value must be JSON" if equals else "write --hint KEY=JSON"
            raise UsageError(f"cannot read the hint {text!r}: {fix}, such as --hint 'vocab_size=32000'") from None
    return hints


def _options(given: list[str], ready: Any) -> dict[str, Any]:
    known = {p.name: p.default for p in inspect.signature(ready).parameters.values() if p.kind is p.KEYWORD_ONLY}
    out: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        choice(name, known, "naming option")
        if not equals:
            raise UsageError(f"cannot read --naming {text}: write --naming KEY=VALUE")
        try:
            out[name] = value if isinstance(known[name], str) else json.loads(value)
        except ValueError:
            raise UsageError(f"cannot read --naming {text}: the value must be true, false, or a number") from None
    return out


# What was typed wrong, and what was meant: errors of usage, and names that are nearly right.


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


class UsageError(ReshardError):
    """The command line is wrong."""


def choice(word: str, known: Iterable[str], what: str) -> str:
    """Return the word. Raises UsageError if it is not one of the known words."""
    names = list(known)
    if word not in names:
        raise UsageError(f"there is no {what} {word!r}{did_you_mean(word, names) or '.'} Known: {', '.join(names)}")
    return word


def dtype_name(word: str) -> str:
    """Return torch's name of a dtype. Accepts short names such as `bf16` and `fp8`. Raises
    UsageError for an unknown dtype."""
    from reshard.live.dtypes import dtype_from_name, full_name

    try:
        dtype_from_name(name := full_name(word))
    except FormatError as error:
        raise UsageError(str(error)) from None
    return name


def size_in_bytes(text: str) -> int:
    """Return the bytes of a size such as `5GB`, `500MB`, or `2GiB`. Raises UsageError for anything
    else, and for numbers below a million without a unit, which are probably mistakes."""
    if re.fullmatch(r"(?!0+$)\d{1,6}", text):
        unit = "GB" if int(text) < 100 else "MB"
        raise UsageError(f"{text!r} has no unit: write {text}{unit}, or {text}B for bytes")
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([KMG]?I?B?)\s*", text.upper())
    unit = "" if match is None else match[2] if match[2] in _UNITS else f"{match[2]}B"
    if match is None or unit not in _UNITS:
        raise UsageError(f"{text!r} is not a size: write it like 5GB, 500MB, or 2GiB")
    size = int(float(match[1]) * _UNITS[unit])
    if not size:
        raise UsageError(f"{text!r} must be more than 0, such as 5GB")
    return size
