"""`reshard gather`: the folders that the hosts of a job kept, as one checkpoint."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from reshard.cli.arguments import AsJson, On, executor_on
from reshard.cli.show import print_json, size

__all__ = ["gather"]


def gather(
    folders: Annotated[
        list[str], typer.Argument(metavar="HOST_FOLDER...", help="What a host kept: the folder with its name.")
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="Where the checkpoint goes: a folder or a URL.")],
    step: Annotated[int | None, typer.Option(min=0, help="Of which step; default: the newest that was kept.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint that is there.")] = False,
    on: On = None,
    as_json: AsJson = False,
) -> None:
    """Put one checkpoint together out of what the hosts of a job kept in memory or on their disks.

    Every block is compared with its checksum, and of several copies a good one is taken. What is
    missing is named, by tensor and region, and then nothing is written.
    """
    from reshard.elastic import gather as gather_folders

    with executor_on(on) as executor:
        report = gather_folders(folders, out, step=step, overwrite=overwrite, executor=executor)
    if as_json:
        print_json(asdict(report))
        return
    print(
        f"generation {report.number}, step {report.step}: {report.files} files, {size(report.nbytes)} in {report.path}"
    )
    for line in report.passed_over:
        print(line)
