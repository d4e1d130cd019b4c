"""`reshard gather`: one checkpoint from the folders in which the hosts of a job kept it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from typer import Argument, Option

from reshard.cli.arguments import AsJson, On, executor_on
from reshard.cli.output import counted, print_json, print_text, size


def gather(
    folders: Annotated[list[str], Argument(metavar="HOST_FOLDER...", help="One folder per host.")],
    out: Annotated[str, Argument(metavar="OUT", help="The checkpoint to write: a folder or URL.")],
    step: Annotated[int | None, Option(metavar="N", min=0, help="Gather this step. Default: the newest.")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an existing checkpoint at OUT.")] = False,
    on: On = None,
    as_json: AsJson = False,
) -> None:
    """Gather an in-memory checkpoint from the folders of its hosts.

    The hosts of a job keep copies of its state in memory or on local disks. This command writes one checkpoint from
    them. Compares every block with its checksum. If a block is damaged, uses another copy of it. If a part of a
    tensor is in no copy, names the missing boxes and writes nothing.
    """
    from reshard.elastic import gather as gather_folders

    with executor_on(on) as executor:
        report = gather_folders(folders, out, step=step, overwrite=overwrite, executor=executor)
    if as_json:
        print_json(asdict(report))
        return
    files = f"{counted(report.files, 'file')}, {size(report.nbytes)}"
    print_text(f"step {report.step}, generation {report.number}: {files}", report.path, "bold")
    for line in report.skipped:
        print_text(line, "note", "yellow")
