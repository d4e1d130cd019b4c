"""The ways to read a checkpoint. Each gives what it handed out, and what it said of it."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import reshard
from planners.findings import Report
from planners.geometry.topologies import Topology
from reshard.cli.app import run as run_command
from reshard.mapping.rules import Rename, Transpose
from reshard.stored.contents import Record
from reshard.stored.tensor import LazyTensor, whole
from tests.same import same
from tests.storages import Remote

__all__ = ["MEANINGS", "METADATA", "READERS", "VALUES", "Read", "Reader", "Scene"]

VALUES = "values unchecked"
METADATA = "metadata unchecked"
"""What verdicts leave open, where they do so in numbers or in other words."""


@dataclass(frozen=True)
class Scene:
    """What a reader is given: a checkpoint, the same one undamaged, and an empty folder for what it writes."""

    path: Path
    good: Path
    out: Path


@dataclass(frozen=True)
class Read:
    """What came of reading."""

    values: Mapping[str, Any]
    said: str
    """In one line: where bytes went unchecked, the word "unchecked" is in it; where files are lost, they are named."""
    ok: bool = True

    def __post_init__(self) -> None:
        values = _comparable(self.values)
        object.__setattr__(self, "values", {key: values[key] for key in sorted(values)})  # as files come, so do keys


def _comparable(value: Any) -> Any:
    """With what stands for objects of unknown classes as text: they are equal to nothing but themselves."""
    if isinstance(value, Mapping):
        return {key: _comparable(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_comparable, value))
    return repr(value) if isinstance(value, Record) else value


@dataclass(frozen=True)
class Reader:
    """A way to read."""

    name: str
    read: Callable[[Scene], Read]
    only: tuple[str, ...] = ()
    """The formats that can be read so; default: all."""
    but: tuple[str, ...] = ()
    """The formats that cannot, for what the reader wants is not in them."""


def _target(good: Path, part: slice = slice(None)) -> dict[str, Any]:
    """A live state with the keys of the undamaged checkpoint, and other values."""
    saved = reshard.open(good)
    state: dict[str, Any] = {k: torch.zeros(t.shape, dtype=t.dtype) for k, t in [*saved.items()][part]}
    own = {key: reshard.PerRank(torch.zeros(1), on_change=_joined) for key in [*saved.contents.per_rank][part]}
    return state | dict.fromkeys([*saved.objects][part]) | own


def _joined(saved: Mapping[int, Any], rank: int, world_size: int) -> Any:
    return dict(saved)


def _loaded(
    keys: slice = slice(None),
    change: Callable[[Any], Any] = lambda value: value,
    from_: Callable[[Path], Any] = lambda path: path,
    **options: Any,
) -> Callable[[Scene], Read]:
    def read(scene: Scene) -> Read:
        state = {key: change(value) for key, value in _target(scene.good, keys).items()}
        report = reshard.load(state, from_(scene.path), **options)
        values = {k: value.value if isinstance(value, reshard.PerRank) else value for k, value in state.items()}
        return Read(values, repr(report), not (report.missing or report.mismatched or report.dropped))

    return read


def _wide(value: Any) -> Any:
    return value.to(torch.float64) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _dcp_load(scene: Scene) -> Read:
    state = {k: value for k, value in _target(scene.good).items() if not isinstance(value, reshard.PerRank)}
    with _logged() as lines:
        reshard.dcp.load(state, checkpoint_id=scene.path, no_dist=True)
    return Read(state, " ".join(lines))


def _opened(
    index: Callable[[LazyTensor], Any], from_: Callable[[Path], Any] = lambda path: path
) -> Callable[[Scene], Read]:
    def read(scene: Scene) -> Read:
        checkpoint = reshard.open(from_(scene.path))
        found = {name: index(tensor) for name, tensor in checkpoint.items()}
        return Read({**found, **checkpoint.objects}, _said(checkpoint))

    return read


def _opened_before(scene: Scene) -> Read:
    """Opened undamaged; those that are damaged are written over before anything else is read."""
    path = scene.out / scene.good.name
    (shutil.copyfile if scene.good.is_file() else shutil.copytree)(scene.good, path)
    checkpoint = reshard.open(path)
    for file in [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]:
        now = scene.path / file.relative_to(path) if path.is_dir() else scene.path
        if not now.exists():
            file.unlink()
            continue
        if now.read_bytes() == file.read_bytes():
            continue
        with file.open("r+b") as over:
            over.write(now.read_bytes())
            over.truncate()
    return Read(_everything(checkpoint), _said(checkpoint))


def _said(checkpoint: reshard.Checkpoint) -> str:
    return "; ".join((repr(checkpoint), *checkpoint.warnings))


def _middle(tensor: LazyTensor) -> Any:
    return tensor[tuple(slice(n // 3, 2 * n // 3 + 1) for n in tensor.shape)]


def _strided(tensor: LazyTensor) -> Any:
    return tensor[(slice(None, None, 3),) * min(tensor.ndim, 1) + (slice(1, None, 2),) * max(tensor.ndim - 1, 0)]


def _last_row(tensor: LazyTensor) -> Any:
    return tensor[-1] if tensor.ndim and len(tensor) else tensor[...]


def _row_by_row(tensor: LazyTensor) -> Any:
    """The first few: what has been read once may have been checked for good."""
    return [tensor[i] for i in range(min(len(tensor), 5))] if tensor.ndim else [tensor[...]]


def _nested(scene: Scene) -> Read:
    checkpoint = reshard.open(scene.path)
    return Read({"nested": whole(checkpoint.nested())}, _said(checkpoint))


def _normalized(scene: Scene) -> Read:
    checkpoint = reshard.open(scene.path)
    return Read(whole(dict(checkpoint.normalized())), _said(checkpoint))


def _canonical(scene: Scene) -> Read:
    checkpoint = reshard.open(scene.path).canonical()
    return Read(_everything(checkpoint), _said(checkpoint))


def _model_only(scene: Scene) -> Read:
    checkpoint = reshard.open(scene.path).canonical(model_only=True)
    return Read(_everything(checkpoint), _said(checkpoint))


def _mapped(scene: Scene) -> Read:
    """One name changed, one tensor transposed, as the undamaged checkpoint has them."""
    saved = reshard.open(scene.good)
    plain = [name for name in saved if not set(name) & set("{}*+")]
    flat = next(name for name in plain if saved[name].ndim == 2)
    rules = [Transpose(flat, flat + ".turned"), Rename(plain[-1], plain[-1] + ".renamed")]
    checkpoint = reshard.open(scene.path).mapped(reshard.Mapping(rules))
    return Read(_everything(checkpoint), _said(checkpoint))


def _everything(checkpoint: reshard.Checkpoint) -> dict[str, Any]:
    return {name: tensor[...] for name, tensor in checkpoint.items()} | dict(checkpoint.objects)


def _unchecked(path: Path) -> dict[str, Any]:
    """What the bytes say, whatever checksums do: what a verdict that nothing is wrong must stand for."""
    able = "check" in inspect.signature(reshard.open).parameters
    try:
        return _everything(reshard.open(path, check=False) if able else reshard.open(path))
    except reshard.ReshardError as error:
        return {"it cannot be read": str(error)}


# --- what looks at metadata only ---


def _inspected(scene: Scene) -> Read:
    """What is known without a look at any element."""
    checkpoint = reshard.open(scene.path)
    problems = checkpoint.problems()
    facts = {
        name: (tuple(tensor.shape), tensor.dtype, str(checkpoint.layout[name])) for name, tensor in checkpoint.items()
    }
    said = "; ".join((_said(checkpoint), *problems))
    return Read({**facts, **checkpoint.objects, "aliases": dict(checkpoint.aliases)}, said, not problems)


def _printed_json(*words: str) -> Callable[[Scene], Read]:
    """The facts that a command prints."""

    def read(scene: Scene) -> Read:
        code, printed = _run(*words, scene=scene)
        if code:
            return Read({}, printed, ok=False)
        facts = json.loads(printed[printed.index("{") :])
        facts = facts.get("newest", facts)  # of a run, which it is where the file is gone that names its only step
        told = {"path", "covers", "source", "warnings", "unchecked"}
        unchecked = reshard.open(scene.path).unchecked if words[0] == "plan" else ""  # of the metadata as it is
        return Read({key: value for key, value in facts.items() if key not in told}, _meaning(printed) + unchecked)

    return read


def _run_with(scene: Scene, steps: int) -> Path:
    """A run whose last step is the checkpoint, and the others undamaged."""
    root = scene.out / "run"
    for number in range(1, steps + 1):
        shutil.copytree(scene.good if number < steps else scene.path, root / f"step-{number}")
    return root


def _newest(scene: Scene) -> Read:
    """Which step a run continues from: `steps`, `latest_complete` and `open` choose the same one. It is complete:
    without a file that it needs, the step before is the newest."""
    root = _run_with(scene, 2)
    before, last = reshard.steps(root)
    latest, opened = reshard.latest_complete(root), reshard.open(root).url
    agree = opened == latest or opened.startswith(f"{latest}/")
    values: dict[str, Any] = {"before": before.problem, "agree": agree}
    if latest != last.path:
        return Read(values, f"{last.problem}", ok=not (agree and latest == before.path and last.problem))
    newest = reshard.open(last.path)
    values |= {
        "problem": last.problem,
        "format": last.format,
        "bytes": last.nbytes,
        "lost": newest.contents.facts.problems(),
    }
    if last.format in ("native", "dcp") and _lost(scene) and not same(_unchecked(scene.path), _unchecked(scene.good)):
        return Read({"complete": "without a file that it needs"}, "")
    return Read(values, _said(newest))


def _lost(scene: Scene) -> bool:
    """Whether a file is gone, or only its beginning is there."""
    files = [file for file in scene.good.rglob("*") if file.is_file()]
    now = [scene.path / file.relative_to(scene.good) for file in files]
    return any(
        not new.is_file() or (new.stat().st_size < old.stat().st_size and old.read_bytes().startswith(new.read_bytes()))
        for old, new in zip(files, now)
    )


def _pruned(scene: Scene) -> Read:
    """The newest complete step of a run stays, and the damaged one, too."""
    root = _run_with(scene, 3)
    before = reshard.latest_complete(root)
    mine = {file: file.read_bytes() for file in (root / "step-3").rglob("*") if file.is_file()}
    gone = {Path(path).name for path in reshard.prune(root, keep_last=1)}
    newest = Path(before or "").name
    stays = {file for file, data in mine.items() if not file.is_file() or file.read_bytes() != data}
    values = {
        "newest stays": reshard.latest_complete(root) == before,
        "gone": gone == {"step-1", "step-2"} - {newest},
        "damaged one stays": sorted(str(file.relative_to(root)) for file in stays),
    }
    if newest != "step-3":
        values["values"] = same(_unchecked(root / newest), _unchecked(scene.good))
    return Read({key: value for key, value in values.items() if key != "values" or not value}, "")


# --- verdicts: what they call right is read without any check ---


def _verify(scene: Scene, **options: Any) -> Read:
    report = reshard.verify(scene.path, **options)
    covered = report.covered
    values = [] if covered is None or covered.is_full else [VALUES]
    metadata = [] if covered is None or covered.metadata_checked else [METADATA]
    return _judged(scene, report, *values, *metadata)


def _by_tasks(read: Callable[..., Any]) -> Callable[[Scene], Read]:
    """What is read or judged by the tasks of an executor."""

    def tasks(scene: Scene) -> Read:
        with ThreadPoolExecutor(1) as executor:
            return read(scene, executor=executor)

    return tasks


def _verify_against(scene: Scene) -> Read:
    return _judged(scene, reshard.verify(scene.path, scene.good))


def _compare(scene: Scene, **options: Any) -> Read:
    return _judged(scene, reshard.compare(scene.path, scene.good, **options))


def _compare_other_way(scene: Scene) -> Read:
    return _judged(scene, reshard.compare(scene.good, scene.path))


def _judged(scene: Scene, report: Report, *more: str) -> Read:
    if not report.ok:
        return Read({}, repr(report), ok=False)
    return Read(_unchecked(scene.path), " ".join((repr(report), *more)))


def _fingerprint(scene: Scene) -> Read:
    checkpoint = reshard.open(scene.path)
    return Read(reshard.fingerprint(checkpoint), _said(checkpoint))


def _restored(scene: Scene) -> Read:
    """By a manager whose run has this one step."""
    root = scene.out / "run"
    with reshard.CheckpointManager(root, every=reshard.Every(steps=1)) as manager:
        manager.save(1, {"w": torch.zeros(1)}, force=True)
    step = next(path for path in root.iterdir() if path.is_dir() and path.name.startswith("step"))
    shutil.rmtree(step)
    shutil.copytree(scene.path, step)
    state = _live()
    with reshard.CheckpointManager(root, every=reshard.Every(steps=1)) as manager:
        report = manager.restore(state)
    return Read(state, repr(report), report is not None)


# --- what writes another checkpoint, which is then read ---


def _converted(name: str = "converted", **options: Any) -> Callable[..., Read]:
    def read(scene: Scene, **more: Any) -> Read:
        report = reshard.convert(scene.path, scene.out / name, **options, **more)
        return Read(_everything(reshard.open(scene.out / name)), repr(report))

    return read


def _onto(scene: Scene) -> Read:
    onto = Topology.parse("dp=3", {"*": "S(0)"})
    return _converted(onto=onto)(scene)


def _dcp_to_torch_save(scene: Scene) -> Read:
    with _logged() as lines:
        reshard.dcp.format_utils.dcp_to_torch_save(scene.path, scene.out / "all.pt")
    return Read(_everything(reshard.open(scene.out / "all.pt")), " ".join(lines))


def _torch_save_to_dcp(scene: Scene) -> Read:
    with _logged() as lines:
        reshard.dcp.format_utils.torch_save_to_dcp(scene.path, scene.out / "dcp")
    return Read(_everything(reshard.open(scene.out / "dcp")), " ".join(lines))


def _based(scene: Scene) -> Read:
    """The next save, of mostly the same elements, and a load of it."""
    state = dict(_everything(reshard.open(scene.good)))
    changed = next(name for name in state if name.endswith("w"))
    state[changed] = state[changed] + 1
    target = {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else None for k, v in state.items()}
    beside = scene.path.parent / "next"
    try:
        saved = reshard.save(state, beside, base=scene.path)
        report = reshard.load(target, beside)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return Read(target, f"{saved!r} {report!r}", report.ok)


def _recovered(scene: Scene) -> Read:
    state = _live()
    report = reshard.elastic.Tier(scene.path, host="a", copies=0).restore(state)
    return Read(state, f"{report!r} {report.load!r}", report.load.ok)


def _live() -> dict[str, Any]:
    from tests.damage.formats import state

    def blank(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: blank(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(map(blank, value))
        return torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)()

    return dict(blank(state(1)))


MEANINGS = {
    "would not be detected": VALUES,
    "Names, shapes, and objects have no checksum": METADATA,
}
"""Of what `reshard verify` says."""


def _command(*words: str) -> Callable[[Scene], Read]:
    """What the command line says, with `{path}`, `{good}` and `{out}` filled in."""

    def read(scene: Scene) -> Read:
        code, printed = _run(*words, scene=scene)
        if code:
            return Read({}, printed, ok=False)
        made = scene.out / "out"
        return Read(_unchecked(made if made.exists() else scene.path), _meaning(printed))

    return read


def _run(*words: str, scene: Scene) -> tuple[Any, str]:
    """Exit code and output of a command."""
    given = [word.format(path=scene.path, good=scene.good, out=scene.out / "out") for word in words]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            run_command(given)
            code: Any = 0
        except SystemExit as end:
            code = end.code
    if "Traceback (most recent call last)" in printed.getvalue():
        raise RuntimeError(printed.getvalue()[-2000:])
    return code, printed.getvalue()


def _meaning(printed: str) -> str:
    said = " ".join(printed.split())
    for phrase, meaning in MEANINGS.items():
        said = said.replace(phrase, meaning)
    return said


@contextlib.contextmanager
def _logged() -> Iterator[list[str]]:
    """What is logged meanwhile: all that a call without a report can say."""
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("reshard"), Kept()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


_KEPT = "kept"  # no checkpoint, but what a job recovers from
_UNKNOWN_CLASSES = ("deepspeed", "deepspeed stage 1", "deepspeed pipeline", "deepspeed tensor parallel")
# raw, they have objects of their own classes: these cannot be written, loaded or compared
_UNWRITABLE = (*_UNKNOWN_CLASSES, "megatron")  # whose random states are tensors within objects
_SINGLE_FILES = ("torch_save", "torch_save legacy", "nemo", "safetensors", "gguf", "lightning")
_BY_NUMBER = (
    "torchsnapshot",
    "torchsnapshot batched",
    "files of ranks",
    "accelerate",
)  # optimizers without names: a hint is needed
_NO_SETTINGS = ("torch_checkpointing", "orbax zarr", "orbax ocdbt")  # of an optimizer
_MODELS = (
    "native v1", "native v2", "dcp zstd", "dcp sharded tensors", "safetensors", "hugging face", "hugging face of ranks",
    "gguf", "gguf split", "bin files", "adapter",
)  # fmt: skip
_NOT_FOR_DEEPSPEED = (*_BY_NUMBER, *_NO_SETTINGS, *_MODELS)
_NATIVE = ("native", "native chain", "native many files", "native v1", "native v2", "native on a base")
_NOT_FOR_MEGATRON = (
    *_BY_NUMBER, *_NO_SETTINGS, "native", "native chain", "native many files", "native on a base", "dcp", "torch_save",
    "torch_save legacy", "nemo",
)  # fmt: skip
# the latter have optimizer states of two parameters, and Megatron one tensor of all layers

READERS: Mapping[str, Reader] = {
    reader.name: reader if reader.only else replace(reader, but=(*reader.but, _KEPT))
    for reader in (
        Reader("load", _loaded(), but=_UNKNOWN_CLASSES),
        Reader("load, a third of the keys", _loaded(slice(1, None, 3), strict="subset"), but=_UNKNOWN_CLASSES),
        Reader("load, not strict", _loaded(strict=False, dtype_policy="saved"), but=_UNKNOWN_CLASSES),
        Reader("load, cast", _loaded(change=_wide, dtype_policy="cast"), but=_UNKNOWN_CLASSES),
        Reader("load, checked in its targets", _loaded(check="during"), but=_UNKNOWN_CLASSES),
        Reader("load, from far away", _loaded(from_=Remote), but=(*_UNKNOWN_CLASSES, *_SINGLE_FILES)),
        Reader("dcp.load", _dcp_load, but=_UNKNOWN_CLASSES),
        Reader("open, whole", _opened(lambda tensor: tensor[...])),
        Reader("open, a slice", _opened(_middle)),
        Reader("open, a strided slice", _opened(_strided)),
        Reader("open, the last row", _opened(_last_row)),
        Reader("open, row by row", _opened(_row_by_row)),
        Reader("open, a slice from far away", _opened(_middle, Remote), but=_SINGLE_FILES),
        Reader("open, then damaged", _opened_before),
        Reader("nested", _nested),
        Reader("normalized", _normalized, but=_BY_NUMBER),
        Reader("canonical", _canonical, but=_BY_NUMBER),
        Reader("model only", _model_only, but=_BY_NUMBER),
        Reader("mapped", _mapped, but=_UNKNOWN_CLASSES),
        Reader("verify", _verify),
        Reader("verify, by tasks", _by_tasks(_verify)),
        Reader("verify against", _verify_against, but=_UNKNOWN_CLASSES),
        Reader("compare", _compare, but=_UNKNOWN_CLASSES),
        Reader("compare, the other way", _compare_other_way, but=_UNKNOWN_CLASSES),
        Reader("compare, by tasks", _by_tasks(_compare), but=_UNKNOWN_CLASSES),
        Reader("fingerprint", _fingerprint),
        Reader("convert to native", _converted(), but=_UNWRITABLE),
        Reader("convert to dcp", _converted(format="dcp"), but=_UNWRITABLE),
        Reader("convert to torch_save", _converted("out.pt", format="torch_save"), but=_UNWRITABLE),
        Reader("convert to safetensors", _converted(format="safetensors")),
        Reader("convert, by tasks", _by_tasks(_converted()), but=_UNWRITABLE),
        Reader("convert to torch_checkpointing", _converted(format="torch_checkpointing"), but=(*_UNWRITABLE, "nemo")),
        Reader("convert to deepspeed", _converted(format="deepspeed"), but=_NOT_FOR_DEEPSPEED),
        Reader("convert to megatron", _converted(format="megatron"), but=_NOT_FOR_MEGATRON),
        Reader("convert onto others", _onto, but=_UNWRITABLE),
        Reader("convert, normalized", _converted(normalized=True), but=_BY_NUMBER),
        Reader("dcp_to_torch_save", _dcp_to_torch_save, only=("dcp", "dcp zstd", "dcp sharded tensors")),
        Reader("torch_save_to_dcp", _torch_save_to_dcp, only=("torch_save", "torch_save legacy")),
        Reader("save on it, and load", _based, only=("native", "native chain", "native on a base")),
        Reader("recover", _recovered, only=(_KEPT,)),
        Reader("restore", _restored, only=("native",)),
        Reader("newest of a run", _newest, but=_SINGLE_FILES),
        Reader("prune", _pruned, only=_NATIVE),
        Reader("inspect", _inspected),
        Reader("$ inspect", _printed_json("inspect", "{path}", "--json")),
        Reader("$ plan", _printed_json("plan", "{path}", "fsdp=2", "--json")),
        Reader("$ verify", _command("verify", "{path}")),
        Reader("$ diff", _command("diff", "{path}", "{good}"), but=_UNKNOWN_CLASSES),
        Reader("$ convert", _command("convert", "{path}", "{out}", "--format", "native"), but=_UNWRITABLE),
    )
}
