"""The cost of a large checkpoint's manifest: Llama-3.1-405B with Adam, saved by 16,384 ranks.

    python -m benchmarks.manifest [--ranks 16384] [--layers 126]

One process creates, writes, and opens the manifest as the first rank of a save and any rank of a load would, with the
records of all files, but without data. Measures bytes, CPU time, and the memory for decoding. There is no peer.
"""

from __future__ import annotations

import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import models
from benchmarks.page import Row, arguments, report
from planners.geometry.layout import state_from_json
from planners.plans.save import plan_writes
from reshard.live.fingerprints import Partial
from reshard.native import reader
from reshard.native.commit import Generation, Written
from reshard.native.manifest import MANIFEST, FileRecord, encode_sealed, encode_table, read_manifest
from reshard.native.reader import NativeFacts, Share
from reshard.ranks.global_state import GlobalState
from reshard.storage.memory import MemoryStorage
from reshard.stored.source import Files


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of `work`, and its CPU seconds."""
    begin = time.process_time()
    value = work()
    return value, time.process_time() - begin


def rows(ranks: int, layers: int) -> Iterator[Row]:
    """Yield the rows of one run."""

    def row(what: str, unit: str, figure: float) -> Row:
        return Row("manifest", f"{ranks:,} ranks: {what}", unit, (figure,))

    layout = models.laid_out(models.with_adam(models.llama(layers)), models.fsdp(ranks))
    plan, took = timed(lambda: plan_writes(layout))
    yield row("plan of the save", "CPU s", took)
    folder = "data-0192f3c1a800-5d2e6f7a8b9c"
    records = {
        rank: FileRecord(f"{folder}/{rank:05d}.safetensors", 1 << 38, 1 << 18, f"{rank:032x}") for rank in range(ranks)
    }
    written = {rank: Written(record) for rank, record in records.items()}
    specs = layout.specs
    parts = [{name: Partial((number, number), specs[name].numel) for number, name in enumerate(layout)}]
    census = GlobalState(layout, {"step": 1}, {name: tuple(name.split(".")) for name in layout})
    storage = MemoryStorage()
    generation = Generation(storage, folder.removeprefix("data-"), 0.0, census, plan, None)
    (table, data), tabled = timed(lambda: encode_table(f"{folder}/files", records))
    storage.publish(table.name, data)
    data, encoded = timed(lambda: encode_sealed(generation.manifest(written, parts, table)))
    yield row("make manifest and table", "CPU s", tabled + encoded)
    storage.publish(MANIFEST, data)
    names = storage.list()
    yield row("manifest", "MB", len(data) / 1e6)
    yield row("table of the files", "MB", (sum(names.values()) - len(data)) / 1e6)
    tracemalloc.start()
    reader.open(Files(storage, names))
    yield row("memory to open it, at most", "MB", tracemalloc.get_traced_memory()[1] / 1e6)
    tracemalloc.stop()
    manifest, took = timed(lambda: read_manifest(storage))
    yield row("read and decode the manifest", "CPU s", took)
    _, took = timed(lambda: state_from_json(manifest.layout))
    yield row("layout out of it", "CPU s", took)
    _, took = timed(lambda: reader.open(Files(storage, names)))
    yield row("open, all of it", "CPU s", took)
    for who, share in (("one rank of all", Share(ranks // 2, ranks)), ("a process alone", reader.ALL)):
        facts = reader.open(Files(storage, names)).facts
        assert isinstance(facts, NativeFacts)
        lengths, took = timed(lambda facts=facts, share=share: len(list(reader._lengths(facts, share))))
        yield row(f"lengths of {lengths:,} files, {who}", "CPU s", took)
        yield row(f"pages of the table read for that, {who}", "pages", len(facts.files._pages))


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=16384)
    parser.add_argument("--layers", type=int, default=126)
    options = parser.parse_args()
    return report(rows(1024 if options.quick else options.ranks, options.layers), options.rows)


if __name__ == "__main__":
    sys.exit(main())
