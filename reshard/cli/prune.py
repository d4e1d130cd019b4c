"""`reshard prune`: delete old checkpoints of a run."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from reshard.cli.arguments import AsJson, On, executor_on
from reshard.cli.show import console, counted, print_json, print_text, size

__all__ = ["prune"]


def prune(
    run: Annotated[str, Argument(metavar="RUN", help="The folder or URL of a run.")],
    keep_last: Annotated[int, Option(metavar="N", min=1, help="Keep the N newest checkpoints.")],
    dry_run: Annotated[bool, Option("--dry-run", help="Only list what would be deleted.")] = False,
    on: On = None,
    as_json: AsJson = False,
) -> None:
    """Delete old checkpoints of a run.

    Keeps the N checkpoints with the highest steps, and the N that were saved most recently. Deletes all other complete
    native checkpoints, and files that killed saves left. Does not ask first.

    Checkpoints that are damaged, in another format, or without a step number stay. They do not count toward N.

    Ignores the rules of a CheckpointManager. So it also deletes steps that the manager would keep, such as the best.
    """
    import reshard
    from reshard.api.retention import leftovers

    with executor_on(on) as executor:
        left = leftovers(run)
        gone = reshard.prune(run, keep_last=keep_last, executor=executor, dry_run=dry_run)
    left = {path: nbytes for path, nbytes in left.items() if path not in gone}
    if as_json:
        files = [{"path": path, "nbytes": nbytes} for path, nbytes in left.items()]
        print_json({"path": run, "dry_run": dry_run, "removed": gone, "leftovers": files})
        return
    done = "would delete" if dry_run else "deleted"
    for path in gone:
        print_text(console(), path, done)
    for path, nbytes in left.items():
        print_text(console(), f"{path}  (files of killed saves, {size(nbytes)})", done)
    print_text(console(), f"{done} {counted(len(gone), 'checkpoint')} of {run}", style="bold")
