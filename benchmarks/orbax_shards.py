"""Reading Orbax's checkpoints, compared with Orbax: `python -m benchmarks.orbax_shards`.

    python -m benchmarks.orbax_shards [--quick] [--folder /dev/shm] [--packages FOLDER]

One process has eight JAX devices, as Orbax is made for, and saves an array in each regular sharding of one, two, and
three dims. Orbax restores it in the sharding in which it was saved, which suits Orbax best. We open the checkpoint,
and read the full array, or the second half of its last dim. Orbax restores no parts, so this is compared with its
full restore.

Orbax and JAX should not be installed beside torch: `--packages` is a folder with them, which is searched last.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import reshard
from benchmarks.page import Row, arguments, report

DEVICES = 8
ROUNDS = 4
ARRAYS = 400
SHAPES = {1: (1 << 22,), 2: (2048, 2048), 3: (128, 128, 256)}
"""16 MiB of float32 each."""


def meshes(dims: int) -> list[tuple[int, ...]]:
    """Return each way to divide the devices among the dims."""
    return [mesh for mesh in itertools.product((1, 2, 4, 8), repeat=dims) if math.prod(mesh) == DEVICES]


def cut(jax: Any, mesh: tuple[int, ...]) -> Any:
    names = tuple("abc"[: len(mesh)])
    devices = np.array(jax.devices()[:DEVICES]).reshape(mesh)
    return jax.sharding.NamedSharding(jax.sharding.Mesh(devices, names), jax.sharding.PartitionSpec(*names))


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def measured(path: Path, restore: Callable[[], Any], values: np.ndarray[Any, Any]) -> tuple[float, float, float]:
    """Return the seconds of Orbax's restore, of our full read, and of reading a half. Raises AssertionError for other
    values."""
    half = (..., slice(values.shape[-1] // 2, None))
    theirs, restored = seconds(restore)  # waits for its arrays
    whole, all_of_it = seconds(lambda: reshard.open(path)["x"][...])
    part, half_of_it = seconds(lambda: reshard.open(path)["x"][half])
    assert np.array_equal(np.asarray(restored["x"]), values)
    assert torch.equal(all_of_it, torch.from_numpy(values))
    assert torch.equal(half_of_it, torch.from_numpy(values)[half])
    return theirs, whole, part


def rows(folder: str, quick: bool) -> Iterator[Row]:
    """Yield two rows for each sharding."""
    jax, orbax = importlib.import_module("jax"), importlib.import_module("orbax.checkpoint")
    checkpointer = orbax.StandardCheckpointer()
    for dims, shape in SHAPES.items():
        values = np.random.default_rng(dims).random(shape, dtype=np.float32)
        for mesh in meshes(dims)[:: 4 if quick else 1]:
            sharding, path = cut(jax, mesh), Path(folder, "x".join(map(str, mesh)))
            checkpointer.save(path, {"x": jax.device_put(values, sharding)})
            checkpointer.wait_until_finished()
            like = {"x": jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)}
            restore = partial(checkpointer.restore, path, like)
            figures = [measured(path, restore, values) for _ in range(ROUNDS + 1)]
            shutil.rmtree(path)
            theirs, whole, part = zip(*figures[1:], strict=True)  # the first round warmed up the imports
            name = f"16 MiB cut {' by '.join(map(str, mesh))}"
            yield Row("orbax_shards", f"{name}, whole", "s", whole, {"Orbax": theirs})
            yield Row("orbax_shards", f"{name}, half of the last dim", "s", part, {"Orbax, whole": theirs})
    yield many_arrays(jax, checkpointer, Path(folder, "many"), 32 if quick else ARRAYS)


def many_arrays(jax: Any, checkpointer: Any, path: Path, count: int) -> Row:
    """Return the CPU seconds of loading many arrays in small chunks, and of Orbax's restore."""
    sharding = cut(jax, (2, 4))
    values = {f"a{n}": np.random.default_rng(n).random((256, 256), dtype=np.float32) for n in range(count)}
    checkpointer.save(path, {name: jax.device_put(array, sharding) for name, array in values.items()})
    checkpointer.wait_until_finished()
    like = {name: jax.ShapeDtypeStruct((256, 256), np.float32, sharding=sharding) for name in values}
    into = {name: torch.empty(256, 256) for name in values}
    theirs, ours = [], []
    for _ in range(ROUNDS + 1):
        began = time.process_time()
        restored = checkpointer.restore(path, like)
        middle = time.process_time()
        reshard.load(into, path)
        theirs.append(middle - began)
        ours.append(time.process_time() - middle)
    for name, array in values.items():
        assert np.array_equal(np.asarray(restored[name]), array)
        assert torch.equal(into[name], torch.from_numpy(array))
    case = f"{count} arrays of 256 KiB cut 2 by 4, whole"
    return Row("orbax_shards", case, "CPU s", tuple(ours[1:]), {"Orbax": tuple(theirs[1:])})


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--folder", help="where the checkpoints go")
    parser.add_argument("--packages", default=os.environ.get("RESHARD_PEERS"), help="a folder of packages")
    options = parser.parse_args()
    if options.packages:
        sys.path.append(options.packages)
    if importlib.util.find_spec("orbax") is None:
        print("Orbax is not installed: give the folder of it with --packages")
        return 0
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    torch.set_num_threads(1)
    folder = tempfile.mkdtemp(dir=options.folder)
    try:
        return report(rows(folder, options.quick), options.rows)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
