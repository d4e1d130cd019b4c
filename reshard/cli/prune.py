"""`reshard prune`: delete old checkpoints of a run."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

from typer import Argument, Option

from reshard.cli.arguments import AsJson, On, executor_on
from reshard.cli.output import counted, print_json, print_text, size, some
from reshard.errors import ReshardError


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

    Ignores the rules of a CheckpointManager, so it also deletes steps that the manager would keep, such as the best.
    """
    import reshard
    from reshard.api.retention import leftovers

    with executor_on(on) as executor:
        left, all_steps = leftovers(run), []
        with suppress(ReshardError):  # which prune raises, too
            all_steps = [step for step in reshard.steps(run) if step.problem is None]
        gone = reshard.prune(run, keep_last=keep_last, executor=executor, dry_run=dry_run)
    left = {path: nbytes for path, nbytes in left.items() if path not in gone}
    kept = [step.path for step in all_steps if step.path not in gone]
    if as_json:
        files = [{"path": path, "nbytes": nbytes} for path, nbytes in left.items()]
        print_json({"path": run, "dry_run": dry_run, "deleted": gone, "kept": kept, "leftovers": files})
        return
    done, keeps = ("would delete", "keeps") if dry_run else ("deleted", "kept")
    for path, nbytes in left.items():
        print_text(f"{path}  (files of killed saves, {size(nbytes)})", done)
    top = f"{run.rstrip('/')}/"
    stay = [path.removeprefix(top) for path in kept]
    freed = size(sum(step.nbytes for step in all_steps if step.path in gone))
    what = f", {freed} of tensors: {', '.join(path.removeprefix(top) for path in gone)}" if gone else ""
    text = f"{done} {len(gone)} of {counted(len(gone) + len(stay), 'checkpoint')}{what}"
    print_text(text + f"; {keeps} {some(stay)}" * bool(stay), style="bold")
