"""The program: its commands, how errors are told, and what the exit codes mean."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from reshard.cli import convert, demo, diff, inspect, normalize, plan, verify

__all__ = ["EXIT_ERROR", "EXIT_NO", "app", "run"]

EXIT_NO = 1
"""The work was done, and the answer is no: a plan without proof, a damaged checkpoint, two that differ."""
EXIT_ERROR = 3
"""The work could not be done; one line on stderr says why, and what to do."""

_HELP = """Inspect, plan, check and reshard checkpoints of PyTorch models.

Exit codes: 0 done, and the answer is yes; 1 the answer is no (no proof, damage, differences); 2 wrong usage;
3 it could not be done (one line on stderr says why); 130 interrupted. With --traceback, anywhere, an error shows
where it came from."""

app = typer.Typer(
    name="reshard",
    help=_HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("inspect")(inspect.inspect)
app.command("plan")(plan.plan)
app.command("verify")(verify.verify)
app.command("diff")(diff.diff)
app.command("convert")(convert.convert)
app.command("normalize")(normalize.normalize)
app.command("demo")(demo.demo)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"reshard {version('reshard')}")
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
        typer.secho("error: ", err=True, fg="red", bold=True, nl=False)
        typer.echo(str(error), err=True)
        sys.exit(EXIT_ERROR)


def _is_told(error: Exception) -> bool:
    """Whether the error's own words say enough; anything else is a bug, and shows its traceback."""
    from planners.errors import PlanError
    from reshard.errors import ReshardError

    return isinstance(error, ReshardError | PlanError | OSError)
