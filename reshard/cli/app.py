"""The program: its commands, how errors are told, what the exit codes mean, and how it writes where
there is no Unicode or nobody reads on.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from reshard import __version__
from reshard.cli import convert, demo, diff, explain, gather, inspect, normalize, plan, verify
from reshard.cli.arguments import UsageError, in_words_of_the_command_line

__all__ = ["EXIT_ERROR", "EXIT_NO", "EXIT_USAGE", "app", "in_a_pipeline", "run"]


EXIT_NO = 1
"""The work was done, and the answer is no: a plan without proof, a damaged checkpoint, two that differ."""
EXIT_USAGE = 2
"""The words cannot be meant as they stand; nothing was looked at."""
EXIT_ERROR = 3
"""The work could not be done; one line on stderr says why, and what to do."""

_HELP = """Inspect, plan, check and reshard checkpoints of PyTorch models.

Exit codes: 0 done, and the answer is yes; 1 the answer is no (no proof, damage, differences); 2 wrong usage;
3 it could not be done (one line on stderr says why); 130 interrupted. With --traceback, anywhere, an error shows
where it came from.

A CHECKPOINT is a folder, a file or a URL, of any known format."""


def _flowing(text: str) -> str:
    """Paragraphs of one line each: terminals break them where they end, not where the source does."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


app = typer.Typer(
    name="reshard",
    help=_flowing(_HELP),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
EXAMPLES: dict[Callable[..., None], list[str]] = {
    inspect.inspect: [
        "inspect run/step-1000",
        "inspect hf/ --only '*.weight' --depth 3",
        "inspect run/step-1000 --map model.layers.0.wq.weight",
        "inspect s3://bucket/run --json",
        "inspect run/step-1000 --html",
    ],
    plan.plan: [
        "plan run/step-1000 fsdp=3",
        "plan run/step-1000 fsdp=48,tp=16 --html plan.html --read-rate 2GB",
        "plan run/step-1000 dp=4,tp=2 --rule '*.wo.weight=S(0),S(1)' --rule '*=S(0),R'",
    ],
    explain.explain: [
        "explain '_S(0, 2),S(0) on dp=2,tp=2'",
        "explain 'S(0),S(1) on dp=4,tp=2' --shape 4096,1024",
    ],
    verify.verify: ["verify run/step-1000", "verify copy/ --against run/step-1000", "verify run/step-1000 --shallow"],
    diff.diff: ["diff run/step-1000 run/step-2000", "diff fsdp/ megatron/ --normalized", "diff a.pt b.pt --html"],
    convert.convert: [
        "convert run/step-1000 hf -f safetensors --model --dtype bf16",
        "convert run/step-1000 titan --names huggingface:torchtitan --config config.json",
        "convert run/step-1000 dcp -f dcp --onto fsdp=8 --workers 4",
        "convert s3://bucket/run/step-1000 s3://bucket/hf -f safetensors --on dask://scheduler:8786",
    ],
    normalize.normalize: ["normalize global_step1000/", 'normalize model.pt --hint \'param_names=["w", "b"]\''],
    gather.gather: [
        "gather node0 node1 node3 run/step-100",
        "gather /local/run1/node* run/step-100 --step 100",
    ],
    demo.demo: ["demo", "demo --steps 20 --out /tmp/demo"],
}
"""What each command is used for, at the end of its help."""


class _Command(TyperCommand):
    """Draws into a file named after it, where --html names none."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        for at, (word, following) in enumerate(zip(args[:end], [*args[1:], "-"])):
            if word == "--html" and following.startswith("-"):
                args[at] = f"--html=reshard-{self.name}.html"
        return super().parse_args(ctx, args)


for command, examples in EXAMPLES.items():
    lines = [f"  reshard {example}" for example in examples]
    told = _flowing(command.__doc__ or "")
    epilog = "\n\n".join(["Examples:", *lines]).replace("[", "\\[")
    app.command(command.__name__, cls=_Command, help=told, epilog=epilog)(command)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"reshard {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and stop.")
    ] = False,
) -> None:
    pass


def run(arguments: list[str] | None = None) -> None:
    """Run the command line; exits. Known errors become one line on stderr."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    traceback = "--traceback" in given
    try:
        app(args=[word for word in given if word != "--traceback"], prog_name="reshard")
    except Exception as error:
        if traceback or not _is_told(error):
            raise
        _tell(in_words_of_the_command_line(str(error)))
        sys.exit(EXIT_USAGE if isinstance(error, UsageError) else EXIT_ERROR)


def _tell(message: str) -> None:
    is_plain = "NO_COLOR" in os.environ or not sys.stderr.isatty()
    head = "error:" if is_plain else "\x1b[1;31merror:\x1b[0m"
    print(f"{head} {message}", file=sys.stderr)  # typer.echo has a stream of its own where there is no Unicode


def _is_told(error: Exception) -> bool:
    """Whether the error's own words say enough; anything else is a bug, and shows its traceback."""
    from planners.errors import PlanError
    from reshard.errors import ReshardError

    return isinstance(error, ReshardError | PlanError | OSError)


_PLAIN = {"×": "x", "→": "->", "·": "*", "…": "...", "━": "-", "─": "-", "│": "|", "—": "-", "“": '"', "”": '"'}
_PLAIN |= dict.fromkeys("┌┬┐├┼┤└┴┘", "+")
"""What stands for the signs of our own texts; anything else is written as its escape."""


def _in_plain_signs(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    signs = error.object[error.start : error.end]
    return "".join(_PLAIN.get(s, s.encode("ascii", "backslashreplace").decode()) for s in signs), error.end


codecs.register_error("plain signs", _in_plain_signs)


@contextmanager
def in_a_pipeline() -> Iterator[None]:
    """For the whole program: `reshard inspect X | head` ends with 0 and says nothing, whoever writes."""
    before = sys.stdout, sys.stderr
    for stream in before:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="plain signs")
    sys.stdout, sys.stderr = _Stream(sys.stdout), _Stream(sys.stderr)
    try:
        yield
    finally:
        try:
            sys.stdout.flush()  # while a broken pipe can still be told from an error
        finally:
            sys.stdout, sys.stderr = before


class _Stream:
    """A text stream that ends the program with 0 when its reader has gone.

    rich and typer would end it with 1, each in its own way, and the interpreter with a complaint.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._read_by_somebody():
            return int(self._stream.write(text))

    def flush(self) -> None:
        with self._read_by_somebody():
            self._stream.flush()

    @contextmanager
    def _read_by_somebody(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            with open(os.devnull, "w") as nowhere:  # for what is still in its buffer
                os.dup2(nowhere.fileno(), self._stream.fileno())
            raise SystemExit(0) from None
