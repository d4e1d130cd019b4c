"""What the manifest of a large checkpoint costs: Llama-3.1-405B with Adam, saved by 16,384 ranks.

    python -m benchmarks.manifest [--ranks 16384] [--layers 126]

One process makes, writes and opens the manifest as the first rank of a save and any rank of a load would, with the
records of all files, and no data. Prints bytes, seconds of processor time, and the memory that decoding takes.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

from benchmarks import models
from planners.reports.codec import from_json
from planners.save.plan import plan_writes
from reshard.control.global_state import Census
from reshard.formats.native import reader
from reshard.formats.native.file_table import FileRecord
from reshard.formats.native.manifest import MANIFEST, encode_manifest, read_manifest
from reshard.formats.native.publish import Generation, Written
from reshard.formats.native.reader import NativeFacts, Share
from reshard.storage.memory import MemoryStorage


def timed(what: str, work: Callable[[], Any]) -> Any:
    """Run it, and say what it took."""
    begin = time.process_time()
    value = work()
    print(f"{what:44} {time.process_time() - begin:8.2f} s", flush=True)
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="1,024 ranks")
    parser.add_argument("--ranks", type=int, default=16384)
    parser.add_argument("--layers", type=int, default=126)
    options = parser.parse_args()
    ranks = 1024 if options.quick else options.ranks
    layout = models.laid_out(models.with_adam(models.llama(options.layers)), models.fsdp(ranks))
    folder = "data-0192f3c1a800-5d2e6f7a8b9c"
    written = {
        rank: Written(FileRecord(f"{folder}/{rank:05d}.safetensors", 1 << 38, 1 << 18, f"{rank:032x}"))
        for rank in range(ranks)
    }
    prints = {name: f"{number:032x}" for number, name in enumerate(layout)}
    census = Census(layout, {"step": 1}, {}, {name: name.split(".") for name in layout}, [], {})
    plan = timed("plan of the save", lambda: plan_writes(layout))
    storage = MemoryStorage()
    generation = Generation(storage, folder.removeprefix("data-"), 0.0, census, plan, None)
    files, table = timed("table of the files", lambda: generation._files(written))
    data = timed("make and encode", lambda: encode_manifest(generation._manifest(written, files, table, prints)))
    storage.publish(MANIFEST, data)
    names = storage.list()
    print(f"{'bytes of the manifest':44} {len(data) / 1e6:8.2f} MB, {len(data) / ranks:.0f} for each rank")
    print(f"{'bytes of the table':44} {sum(names.values()) / 1e6 - len(data) / 1e6:8.2f} MB")
    tracemalloc.start()
    reader.open(storage, names)
    print(f"{'memory of the opened checkpoint, at most':44} {tracemalloc.get_traced_memory()[1] / 1e6:8.2f} MB")
    tracemalloc.stop()
    manifest = timed("read and decode the manifest", lambda: read_manifest(storage))
    timed("layout out of it", lambda: from_json({"reshard": "state_layout", "version": 1, **manifest.layout}))
    timed("open, all of it", lambda: reader.open(storage, names))
    look(storage, "one rank of all", Share(ranks // 2, ranks))
    look(storage, "a process alone", reader.ALL)


def look(storage: MemoryStorage, who: str, share: Share) -> None:
    """How much of the table somebody reads to look for its share of the files."""
    facts = reader.open(storage, storage.list()).facts
    assert isinstance(facts, NativeFacts)
    lengths = timed(f"lengths of files, {who}", lambda: len(list(reader._lengths(facts, share))))
    print(f"{'':44} {lengths:8} files, {len(facts.files._pages)} pages of the table")


if __name__ == "__main__":
    main()
