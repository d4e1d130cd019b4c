"""`reshard demo`: the whole story in a minute, on four processes of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reshard.cli.show import console, print_json, size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from reshard.cli.demo_job import Plans, Result

__all__ = ["demo"]


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the checkpoint and the pictures.")] = Path("demo-out"),
    steps: Annotated[int, typer.Option(min=4, help="Training steps before the save; then half as many.")] = 40,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")] = False,
) -> None:
    """Train a small transformer on 2 × 2 ranks, save it, load it on 3 and on 2 ranks, and prove
    that no bit changed.

    Exits with 1 if anything is not as it must be.
    """
    screen = console(stderr=as_json)
    screen.print("[bold]reshard demo[/]: one checkpoint, three topologies")
    with screen.status("importing torch, reading the text"):
        from reshard.cli.demo_job import BEFORE, tell_story
    screen.print(f"[bold]1[/]  train on {BEFORE.world_size} processes, {BEFORE}, and save")
    with _bars(screen) as bars:
        listener = _Listener(bars, screen, steps)
        result = tell_story(out, steps, listener.hear, lambda plans: _show_plans(screen, plans))
    _show_result(screen, result)
    if as_json:
        print_json(result.as_json())
    if result.problems:
        raise typer.Exit(1)


def _bars(screen: Console) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[loss]}"))
    return Progress(TextColumn("   {task.description}"), *columns, console=screen)


class _Listener:
    """Shows what the ranks tell: a bar for each job where somebody looks, and now and then a line where nobody does."""

    def __init__(self, bars: Progress, screen: Console, steps: int) -> None:
        self.bars, self.screen, self.steps = bars, screen, steps
        self.tasks: dict[str, Any] = {}
        self.first: dict[str, int] = {}

    def hear(self, job: str, told: Any) -> None:
        """One word of a job's rank 0: ("step", loss), or what it does now."""
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

    screen.print(f"[bold]2[/]  plan from the metadata alone, and prove: {plans.tensors} tensors,")
    screen.print("   that every wanted element is read exactly once, from the saved element that it is")
    for name, plan in plans.of.items():
        proof = "[green]proved[/]" if plans.facts_proved[name] else "[red]not proved[/]"
        screen.print(f"   onto [bold]{name}[/]: {size(plan.total_bytes)} to read, {proof}")
        lines = format_plan(plan, limit=3).splitlines()[1:]
        screen.print("\n".join(lines), markup=False, style="dim", no_wrap=True, overflow="ellipsis")
    screen.print("[bold]3[/]  load in each of them, compare bit by bit, and train on")


def _show_result(screen: Console, result: Result) -> None:
    from rich.table import Table

    table = Table(title=f"{result.before}: {result.parameters:,} parameters, {size(result.total_bytes)} with AdamW")
    for name in ("onto", "ranks", "bit-equal tensors", "needed per rank", "read / needed", "load"):
        table.add_column(name, justify="left" if name == "onto" else "right")
    table.add_column("loss: saved → loaded → trained on", justify="right")
    for change in result.changes:
        table.add_row(
            change.onto,
            str(change.world_size),
            f"{change.tensors_equal} of {change.tensors}",
            size(max(change.bytes_needed)),
            f"{change.read_per_needed:.3f}",
            f"{change.load_s:.2f} s",
            f"{result.loss_before:.4f} → {change.loss_loaded:.4f} → {change.loss_after:.4f}",
        )
    screen.print(table)
    screen.print(f"checkpoint  {result.checkpoint}   (try: reshard inspect {result.checkpoint})", soft_wrap=True)
    for name, file in result.pictures.items():
        screen.print(f"picture     {file}   (the plan onto {name})", soft_wrap=True)
    for problem in result.problems:
        screen.print(f"[red bold]wrong[/]  {problem}")
    if not result.problems:
        screen.print("[green]All parameters and optimizer states are, bit for bit, what they were.[/]")
