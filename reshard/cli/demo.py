"""`reshard demo`: save, reshard, and compare, on four processes of this machine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Exit, Option

from reshard.cli.output import console, counted, print_json, print_rows, print_text, size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from reshard.cli.demo_job import Plans, Result


def demo(
    out: Annotated[
        Path, Option(metavar="FOLDER", file_okay=False, help="Folder for the checkpoint and the pages.")
    ] = Path("demo-out"),
    steps: Annotated[int, Option(metavar="N", min=4, help="Training steps before the save.")] = 40,
    as_json: Annotated[bool, Option("--json", help="Print only the result, as JSON.")] = False,
) -> None:
    """Train a small transformer, save it, load it on other meshes, and compare.

    Trains on 2 × 2 ranks. Then loads on 3 ranks and on 2 ranks, compares every tensor bit by bit, and resumes training.
    All ranks are CPU processes on this machine. Takes 1 to 2 minutes on 2 cores, and writes 35 MiB.

    Exits with 1 if a comparison fails.
    """
    screen = console(stderr=as_json)
    screen.print("[bold]reshard demo[/]: one checkpoint, three topologies")
    with screen.status("importing torch, reading the text"):
        from reshard.cli.demo_job import BEFORE, run_demo
    print_text(f"train on {BEFORE.world_size} processes, {BEFORE}, and save", "1", screen=screen)
    with _bars(screen) as bars:
        listener = _Listener(bars, screen, steps)
        result = run_demo(out, steps, listener.hear, lambda plans: _show_plans(screen, plans))
    _show_result(screen, result)
    if as_json:
        print_json(result.as_json())
    if result.problems:
        raise Exit(1)


def _bars(screen: Console) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[loss]}"))
    return Progress(TextColumn("   {task.description}"), *columns, console=screen)


class _Listener:
    """Shows what the ranks report: in a terminal a progress bar for each job, and otherwise an
    occasional line."""

    def __init__(self, bars: Progress, screen: Console, steps: int) -> None:
        self.bars, self.screen, self.steps = bars, screen, steps
        self.tasks: dict[str, Any] = {}
        self.first: dict[str, int] = {}

    def hear(self, job: str, told: Any) -> None:
        """Show a report from a job's rank 0: ("step", loss), or a text that says what it is doing."""
        if job not in self.tasks:
            total = self.steps if not self.tasks else max(self.steps // 2, 1)
            self.tasks[job] = self.bars.add_task(job, total=total, loss="")
        if isinstance(told, str):
            self.bars.update(self.tasks[job], loss=told)
            if not self.screen.is_terminal:
                self.screen.print(f"   {job}: {told}")
            return
        step, loss = told
        done = step - self.first.setdefault(job, step) + 1
        self.bars.update(self.tasks[job], completed=done, loss=f"loss {loss:.3f}")
        if not self.screen.is_terminal and done % 10 == 1:
            self.screen.print(f"   {job}: step {step}, loss {loss:.3f}")


def _show_plans(screen: Console, plans: Plans) -> None:
    from planners.reports.text import format_plan

    say = partial(print_text, screen=screen)
    say(f"plan from metadata, and prove that each element of {plans.tensors} tensors is read once", "2", "bold")
    for name, plan in plans.of.items():
        say(
            f"{size(plan.total_bytes)} to read, {'' if plans.facts_proved[name] else 'not '}proved",
            f"   {name}",
        )
        for line in format_plan(plan, limit=3, width=screen.width, items=False, bar="━").splitlines()[1:]:
            screen.print(line, markup=False, style="dim", no_wrap=True, overflow="ellipsis")
    say("load on each of them, compare bit by bit, and resume training", "3")


def _show_result(screen: Console, result: Result) -> None:
    from planners.units import format_seconds

    say = partial(print_text, screen=screen)
    head = f"{result.parameters:,} parameters, {size(result.total_bytes)} with AdamW"
    say(f"\n{result.before}: {head}")
    for change in result.changes:
        say(f"\nloaded on {change.onto}, {counted(change.world_size, 'rank')}", style="bold")
        losses = f"{result.loss_before:.4f} saved, {change.loss_loaded:.4f} loaded"
        rows = [
            ("same bits", f"{change.tensors_equal} of {change.tensors} tensors"),
            ("needed per rank", f"at most {size(max(change.bytes_needed))}"),
            ("read", f"{change.read_per_needed:.2f} × the bytes needed, in {format_seconds(change.load_s)}"),
            ("loss", f"on the same batch: {losses}, {change.loss_after:.4f} after more training"),
        ]
        print_rows(rows, screen)
    screen.print()
    say(f"{result.checkpoint}   (try: reshard inspect {result.checkpoint})", "checkpoint")
    say(f"reshard plan {result.checkpoint} fsdp=3 --items   (what each rank reads)", "try")
    for name, file in result.pictures.items():
        say(f"{file}   (the plan onto {name})", "page")
    for problem in result.problems:
        say(problem, "failed", "red bold")
    if not result.problems:
        say("All parameters and optimizer states are the same, bit by bit.", style="green")
