"""The program: its commands and their help, exit codes, errors, and output without Unicode or to a
closed pipe."""

from __future__ import annotations

import codecs
import io
import os
import re
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from planners.errors import PlanError, sentence
from reshard import __version__
from reshard.cli import convert, demo, diff, explain, gather, inspect, normalize, plan, prune, verify
from reshard.cli.arguments import UsageError
from reshard.cli.messages import in_words_of_the_command_line
from reshard.cli.output import columns, print_json
from reshard.errors import OptionError, ReshardError, StorageError, did_you_mean

EXIT_NO = 1
"""A check failed: damage, differences, or a failed proof."""
EXIT_USAGE = 2
"""The command line is wrong."""
EXIT_ERROR = 3
"""The command failed; stderr gives the reason and the fix."""

_HELP = """Inspect, plan, verify, and reshard checkpoints of PyTorch models.

CHECKPOINT is a folder, file, or URL in any known format. For the folder of a run, the newest
complete checkpoint is used. To choose another one, give its folder. Most commands also take --step N.

Exit codes: 0: success. 1: a check failed: damage, differences, or a failed proof. 2: the command line is wrong, such as an unknown option or topology. 3: the command line is right,
but the command failed, such as on a file that cannot be read. 130: interrupted. With 2 and 3, stderr has
the reason and the fix.

With --json, an error is also printed as JSON on stdout. To see where an error comes from, add --traceback
to any command."""


def _flowing(text: str) -> str:
    """Return paragraphs of one line each, which terminals wrap at their own width."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


EXAMPLES: dict[Callable[..., None], list[str]] = {
    inspect.inspect: [
        "inspect run/step-1000",
        "inspect hf/ --select '*.weight' --depth 3",
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
    verify.verify: [
        "verify run/step-1000",
        "verify copy/ --against run/step-1000",
        "verify run/step-1000 --shallow",
    ],
    diff.diff: [
        "diff run/step-1000 run/step-2000",
        "diff fsdp/ megatron/ --normalized",
        "diff a.pt b.pt --html",
    ],
    convert.convert: [
        "convert run/step-1000 hf -f safetensors --model --dtype bf16",
        "convert run/step-1000 titan --names huggingface:torchtitan --config config.json",
        "convert run/step-1000 dcp -f dcp --onto fsdp=8 --workers 4",
        "convert s3://bucket/run/step-1000 s3://bucket/hf -f safetensors --on dask://scheduler:8786",
    ],
    normalize.normalize: [
        "normalize global_step1000/",
        'normalize model.pt --hint \'param_names=["w", "b"]\'',
    ],
    gather.gather: [
        "gather node0 node1 node3 run/step-100",
        "gather /local/run1/node* run/step-100 --step 100",
    ],
    prune.prune: ["prune run --keep-last 3 --dry-run", "prune s3://bucket/run --keep-last 10"],
    demo.demo: ["demo", "demo --steps 20 --out /tmp/demo"],
}
"""What each command is used for, at the end of its help."""


class _Command(TyperCommand):
    """Help in plain lines of any width. `--html` takes the next word only if it is the name of a page."""

    def get_help(self, ctx: Any) -> str:
        params: list[Any] = self.get_params(ctx)
        given = [(param.metavar, param.help or "") for param in params if param.param_type_name == "argument"]
        source = next((word for word, _ in given), "")
        options = [_option(param, self.name or "") for param in params]
        return _help_text(
            f"{ctx.command_path} [OPTIONS] {' '.join(word for word, _ in given)}",
            self.help or "",
            {"Arguments": given, "Options": [(name, text.replace("SOURCE", source)) for name, text in options]},
            (self.epilog or "").splitlines(),
        )

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for at, word in enumerate(args, 1):
            if re.fullmatch("(--[a-z-]+=)?", word):
                raise UsageError(f"{word or f'argument {at}'} is empty: check that all shell variables are set")
        end = args.index("--") if "--" in args else len(args)
        for at, (word, following) in enumerate(zip(args[:end], [*args[1:], "-"])):
            if word == "--html" and re.fullmatch(r"[^-:=][^:=]*\.(pdf|png|svg|txt|md|json)", following):
                raise UsageError(f"--html writes an HTML page: end its name in .html, or write --html={following}")
            if word == "--html" and not following.lower().endswith((".html", ".htm")):
                args[at] = f"--html=reshard-{self.name}.html"
            if word == "--step" and not any("--step" in param.opts for param in self.params):
                raise UsageError(f"{self.name} has no --step: give the folder of a step, such as run/step-100")
        return super().parse_args(ctx, args)


class _Program(TyperGroup):
    """The same for the program."""

    def get_help(self, ctx: Any) -> str:
        commands = [(name, (command.help or "").partition("\n")[0]) for name, command in self.commands.items()]
        sections = {"Commands": commands, "Options": [_option(param, "") for param in self.get_params(ctx)]}
        return _help_text(f"{ctx.command_path} [OPTIONS] COMMAND ...", self.help or "", sections)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            print(self.get_help(ctx))
            ctx.exit(EXIT_USAGE)
        if args and args[0] in _OF_OTHERS:
            raise UsageError(f"there is no command {args[0]!r}: {_OF_OTHERS[args[0]]}")
        return super().parse_args(ctx, args)


_OF_OTHERS = {
    **dict.fromkeys(("ls", "list", "show", "info", "steps"), "write reshard inspect"),
    "compare": "write reshard diff",
    "check": "write reshard verify",
    "version": "write reshard --version",
    "help": "write reshard COMMAND --help",
    "completion": "write reshard --install-completion",
    **dict.fromkeys(("save", "load"), "in Python, reshard.save(state, path) and reshard.load(state, path)"),
}
"""Names in other programs for commands and options with another name here."""


def _option(param: Any, command: str) -> tuple[str, str]:
    if param.param_type_name == "argument" or param.hidden:
        return "", ""
    names = ", ".join(sorted(param.opts, key=len))
    default = f" Default: {param.default}." if isinstance(param.default, int | str | Path) and param.default else ""
    return (
        f"{names} {param.metavar or ''}".rstrip(),
        f"{param.help}{'' if param.default is True else default}".replace("COMMAND", command),
    )


def _help_text(usage: str, text: str, sections: dict[str, list[tuple[str, str]]], examples: Sequence[str] = ()) -> str:
    width = max(min(shutil.get_terminal_size().columns, 110), 30)
    wrap = partial(textwrap.fill, width=width, break_on_hyphens=False)
    parts = [wrap(f"Usage: {usage.rstrip()}", subsequent_indent="  "), *map(wrap, text.split("\n\n"))]
    for title, rows in sections.items():
        if lines := list(columns([row for row in rows if row[0]], width)):
            parts.append("\n".join([f"{title}:", *lines]))
    whole = [re.sub("'[^']*'", lambda quoted: quoted[0].replace(" ", "\0"), example) for example in examples]
    lines = [wrap(example, width=width - 2, initial_indent="  ", subsequent_indent="    ") for example in whole]
    lines = [line.replace("\n", " \\\n").replace("\0", " ") for line in lines]
    parts += ["\n".join(["Examples:", *lines])] if lines else []
    return "\n\n".join(parts)


app = typer.Typer(
    name="reshard",
    help=_flowing(_HELP),
    cls=_Program,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command, examples in EXAMPLES.items():
    epilog = "\n".join(f"reshard {example}" for example in examples)
    app.command(command.__name__, cls=_Command, help=_flowing(command.__doc__ or ""), epilog=epilog)(command)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"reshard {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def run(arguments: list[str] | None = None) -> None:
    """Run the command line and exit. Known errors become a message on stderr, and with --json an object on stdout."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    words = [word for word in given if word != "--traceback"]
    try:
        sys.exit(app(args=words, prog_name="reshard", standalone_mode=False))
    except Exception as error:
        message = str(error)
        if type(error) is ModuleNotFoundError:
            raise  # to main, which says what to install
        if isinstance(error, OSError) and error.filename:
            message = f"cannot open {str(error.filename)!r}: {error.strerror}. Check its folder and your permissions"
        if is_typers := hasattr(error, "ctx"):  # which is None for an option without its value
            command = getattr(error.ctx, "command_path", f"reshard {words[0]}")
            said = error.format_message()  # type: ignore[attr-defined]
            said = re.sub(rf" Did you mean '(?!{re.escape(words[0][:1])})prune'\?", "", said)  # which deletes
            if type(error).__name__ == "NoSuchOption":
                said = _no_option(error)
            for name, word in pairwise(words):
                said = said.replace(f"value for '{name}'", f"value {word!r} for '{name}'")
                if name == "--html" and f"({word})" in said:
                    said = f"{sentence(said)} The name of a page ends in .html"
            message = f"{said[0].lower()}{sentence(said[1:])} See {command} --help"
        message = in_words_of_the_command_line(message)
        if "--json" in words:
            kind = "UsageError" if is_typers else type(error).__name__
            with suppress(StorageError):  # it may be the output that cannot be written
                print_json({"ok": False, "error": {"kind": kind, "message": message}})
        if "--traceback" in given or not (is_typers or isinstance(error, ReshardError | OSError)):  # a bug
            traceback.print_exception(error)
        else:
            _tell(message)
        is_of_rules = isinstance(error, PlanError) and re.search(r"--rule|--onto|\.(topology|txt)\b", " ".join(words))
        is_wrong = is_typers or is_of_rules or isinstance(error, UsageError | OptionError)
        sys.exit(EXIT_USAGE if is_wrong else EXIT_ERROR)


def _no_option(error: Any) -> str:
    """Return what to say about an unknown option. typer would suggest --help, because many words
    contain its letters."""
    known = [name for param in error.ctx.command.params if not getattr(param, "hidden", True) for name in param.opts]
    meant = did_you_mean(error.option_name.lstrip("-"), [name.lstrip("-") for name in known])
    return f"no such option: {error.option_name}" + meant.replace(" '", " '--")


def _tell(message: str) -> None:
    is_plain = bool(os.environ.get("NO_COLOR")) or not sys.stderr.isatty()
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - len("error: ")
        lines = [textwrap.fill(line, max(width, 20), break_on_hyphens=False) for line in message.splitlines()]
        message = "\n".join(lines)
    head = "error:" if is_plain else "\x1b[1;31merror:\x1b[0m"
    print(f"{head} {message}", file=sys.stderr)  # typer.echo has a stream of its own where there is no Unicode


_PLAIN = {
    "×": "x",
    "→": "->",
    "·": "*",
    "…": "...",
    "━": "-",
    "─": "-",
    "│": "|",
    "—": "-",
    "“": '"',
    "”": '"',
}
_PLAIN |= dict.fromkeys("┌┬┐├┼┤└┴┘", "+")
"""What replaces the signs of our own texts; others are written as escapes."""


def _in_plain_signs(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    signs = error.object[error.start : error.end]
    return "".join(_PLAIN.get(s, s.encode("ascii", "backslashreplace").decode()) for s in signs), error.end


codecs.register_error("plain signs", _in_plain_signs)


@contextmanager
def in_a_pipeline() -> Iterator[None]:
    """If the reader of a pipe leaves, as `head` does, end the command as it would end without a
    pipe, whichever library writes."""
    before = sys.stdout, sys.stderr
    for stream in before:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="plain signs")
    # a closed stream is None; opening another one in its place keeps other files from getting its number
    sys.stdout, sys.stderr = (
        _Stream(stream or open(os.devnull, "w", errors="ignore"))  # noqa: SIM115  for as long as the process
        for stream in before
    )
    try:
        yield
    finally:
        try:
            sys.stdout.flush()  # while a broken pipe still differs from an error
        finally:
            sys.stdout, sys.stderr = before


class _Stream:
    """A text stream that drops what is written after its reader has gone, so that the exit code is
    still the answer.

    rich and typer would end the program with 1, each in its own way, and the interpreter with a
    complaint.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._without_reader():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._without_reader():
            self._stream.flush()

    @contextmanager
    def _without_reader(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            with open(os.devnull, "w") as nowhere:  # also for what is still in its buffer
                os.dup2(nowhere.fileno(), self._stream.fileno())
        except OSError as error:
            raise StorageError(f"cannot write the output: {error.strerror or error}") from error
