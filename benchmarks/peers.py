"""Saving and resharding, compared with other libraries: the same tensors in the same rounds, each in its own format.

    python -m benchmarks.peers [--quick] [--folder /dev/shm] [--packages FOLDER]

Four ranks save rows, eight ranks load columns. The peers are torch_checkpointing with its resharder; TensorStore,
whose arrays are chunked when they are saved; safetensors, with a file per rank, from which `safe_open` reads slices;
and Orbax, which is made for one process per host with many devices, so that rank 0 has a device for each rank, and
the others wait. By default, we write checksums and fingerprints, and compare the checksums. safetensors,
torch_checkpointing, and TensorStore's arrays have none that are compared. The floor of a save is a raw write of the
same bytes by the same ranks. That of a load is one read, one hash, and one strided copy of each byte.

A peer that is not installed is reported so. Peers that should not be installed beside torch can be in a separate
folder of packages, which is searched last: `--packages`, or RESHARD_PEERS in the environment.
"""

from __future__ import annotations

import glob
import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import reshard
from benchmarks.load import work_of_columns
from benchmarks.page import Row, arguments, report
from benchmarks.processes import measured, over_ranks, run

warnings.filterwarnings("ignore")

SAVING, LOADING = 4, 8
"""Number of ranks."""
ROUNDS = 3

State = dict[str, DTensor]


def value(number: int, size: int) -> torch.Tensor:
    """Return a full tensor without equal parts."""
    start = number * size * size
    return torch.arange(start, start + size * size, dtype=torch.int32).view(size, size)


def local(tensor: DTensor) -> Any:
    """Return a rank's own elements, as an array that shares their memory."""
    return tensor.to_local().numpy()


class Contestant:
    """A library that saves and loads. All ranks call all of its methods."""

    def prepare(self, state: State) -> None:
        """Do what precedes a save and is not timed."""

    def save(self, state: State, folder: str) -> None:
        """Save into a folder that does not exist yet."""
        raise NotImplementedError

    def load(self, state: State, folder: str) -> None:
        """Fill the state."""
        raise NotImplementedError


class Ours(Contestant):
    """reshard, with checksums and fingerprints, as by default."""

    def save(self, state: State, folder: str) -> None:
        reshard.save(state, folder, overwrite=True)

    def load(self, state: State, folder: str) -> None:
        reshard.load(state, folder)


class TorchCheckpointing(Contestant):
    """Its manager, which saves before it returns, and its own resharder.

    Release 0.1.1 exchanges metadata by tensors on "cuda", whatever the process group. Here, they are sent over gloo.
    """

    package = "torch_checkpointing"

    def __init__(self) -> None:
        self.manager = self._new()

    @staticmethod
    def _new() -> Any:
        package: Any = importlib.import_module("torch_checkpointing")
        manager: Any = importlib.import_module("torch_checkpointing.checkpoint_manager")
        resharder: Any = importlib.import_module("torch_checkpointing.default_resharder")
        importlib.import_module(
            "torch_checkpointing.metadata_manager"
        ).DefaultMetadataManager._all_gather_pickled_data = _everybody_s
        item = package.ItemSpec(resharder=resharder.DefaultResharder())
        config = manager.CheckpointManager.Config(
            items={"model": item},
            save=manager.SyncCheckpointSaverConfig(),
            storage_config=manager.LocalFileSystemStorageConfig(use_direct_io=False),
        )
        return manager.CheckpointManager(config)

    def prepare(self, state: State) -> None:
        """Create a new manager: a second save of one writes no metadata, so that its checkpoint cannot be resharded."""
        self.manager = self._new()

    def save(self, state: State, folder: str) -> None:
        self.manager.save(folder, {"model": state})

    def load(self, state: State, folder: str) -> None:
        self.manager.load(folder, into={"model": state})


def _everybody_s(_: Any, data: Any, process_group: Any = None) -> dict[int, Any]:
    """Return what each rank has, by rank."""
    found = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(found, data, group=process_group)
    return dict(enumerate(found))


class TensorStore(Contestant):
    """Uncompressed zarr arrays, with a chunk for each saving rank. All of a rank's tensors are written at once."""

    package = "tensorstore"

    def _open(self, state: State, folder: str, **how: Any) -> dict[str, Any]:
        import tensorstore

        specs = {name: {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder}/{name}"}} for name in state}
        opened = {name: tensorstore.open(spec, open=True, **how) for name, spec in specs.items()}
        return {name: future.result() for name, future in opened.items()}

    def save(self, state: State, folder: str) -> None:
        import tensorstore

        rank = dist.get_rank()
        (size, _), (rows, _) = next(iter(state.values())).shape, local(next(iter(state.values()))).shape
        chunks = tensorstore.ChunkLayout(chunk_shape=[rows, size])
        if rank == 0:
            how = {"dtype": tensorstore.int32, "shape": [size, size], "chunk_layout": chunks}
            self._open(state, folder, create=True, **how)
        dist.barrier()
        arrays = self._open(state, folder)
        start = rank * rows
        writes = [arrays[name][start : start + rows].write(local(tensor)) for name, tensor in state.items()]
        for write in writes:
            write.result()

    def load(self, state: State, folder: str) -> None:
        arrays, rank = self._open(state, folder), dist.get_rank()
        columns = local(next(iter(state.values()))).shape[1]
        reads = {name: array[:, rank * columns : (rank + 1) * columns].read() for name, array in arrays.items()}
        for name, read in reads.items():
            np.copyto(local(state[name]), read.result())


class Safetensors(Contestant):
    """A file with each rank's rows. The loader knows how they were sharded."""

    package = "safetensors"

    def save(self, state: State, folder: str) -> None:
        from safetensors.torch import save_file

        os.makedirs(folder, exist_ok=True)
        rows = {name: tensor.to_local() for name, tensor in state.items()}
        save_file(rows, f"{folder}/{dist.get_rank()}.safetensors")

    def load(self, state: State, folder: str) -> None:
        from safetensors import safe_open

        rank, done = dist.get_rank(), 0
        for number in range(SAVING):
            with safe_open(f"{folder}/{number}.safetensors", framework="pt") as file:
                for name, tensor in state.items():
                    target = tensor.to_local()
                    columns = target.shape[1]
                    piece = file.get_slice(name)[:, rank * columns : (rank + 1) * columns]
                    target[done : done + len(piece)].copy_(piece)
            done += len(piece)


class Orbax(Contestant):
    """JAX arrays, for which rank 0 has a device per rank."""

    package = "orbax"

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        if dist.get_rank() == 0:
            os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={LOADING}"
            os.environ["JAX_PLATFORMS"] = "cpu"
            self.jax: Any = importlib.import_module("jax")
            self.checkpointer = importlib.import_module("orbax.checkpoint").StandardCheckpointer()

    def _cut(self, *dims: str | None) -> Any:
        sharding = self.jax.sharding
        mesh = sharding.Mesh(np.array(self.jax.devices()[: dist.get_world_size()]), ("ranks",))
        return sharding.NamedSharding(mesh, sharding.PartitionSpec(*dims))

    def prepare(self, state: State) -> None:
        """Create the arrays to save."""
        if dist.get_rank() == 0:
            cut = self._cut("ranks", None)
            for number, (name, tensor) in enumerate(state.items()):
                self.values[name] = self.jax.device_put(value(number, tensor.shape[0]).numpy(), cut)

    def save(self, state: State, folder: str) -> None:
        if dist.get_rank() == 0:
            self.checkpointer.save(Path(folder), self.values, force=True)
            self.checkpointer.wait_until_finished()

    def load(self, state: State, folder: str) -> None:
        if dist.get_rank() == 0:
            cut = self._cut(None, "ranks")
            like = {n: self.jax.ShapeDtypeStruct(tuple(t.shape), np.int32, sharding=cut) for n, t in state.items()}
            self.values = self.jax.block_until_ready(self.checkpointer.restore(Path(folder), like))

    def equal(self, state: State) -> bool:
        """Return True if what was loaded equals what was saved."""
        found = self.values.items()
        return all(np.array_equal(np.asarray(a), value(i, len(a)).numpy()) for i, (_, a) in enumerate(sorted(found)))


PEERS: dict[str, Any] = {
    "torch_checkpointing": TorchCheckpointing,
    "TensorStore": TensorStore,
    "safetensors": Safetensors,
    "Orbax": Orbax,
}


def contestants(packages: str | None) -> dict[str, Any]:
    """Return reshard, and the installed peers."""
    if packages:
        sys.path.append(packages)
    found = {name: peer() for name, peer in PEERS.items() if importlib.util.find_spec(peer.package) is not None}
    return {"ours": Ours(), **found}


def make(dim: int, count: int, size: int, *, filled: bool) -> State:
    """Return square tensors, sharded along a dim over all ranks."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world,))
    state = {}
    for number in range(count):
        data = value(number, size).chunk(world, dim)[rank].clone(memory_format=torch.contiguous_format)
        data = data if filled else torch.full_like(data, -1)
        state[f"layer{number:03}.weight"] = DTensor.from_local(data, mesh, [Shard(dim)], run_check=False)
    return state


def save(folder: str, count: int, size: int, packages: str | None) -> list[dict[str, tuple[float, ...]]]:
    """Return what this rank measured, round by round. The last round's checkpoints stay."""
    state, who = make(0, count, size, filled=True), contestants(packages)
    rounds: list[dict[str, tuple[float, ...]]] = []
    for _ in range(ROUNDS + 1):
        rounds.append({})
        for name, one in who.items():
            at = f"{folder}/{name}"
            one.prepare(state)
            _clear(at)
            *figures, _ = measured(partial(one.save, state, at))
            rounds[-1][name] = tuple(figures)
        _clear(f"{folder}/floor")
        *figures, _ = measured(lambda: _write_raw(f"{folder}/floor", state))
        rounds[-1]["floor"] = tuple(figures)
    return rounds[1:]  # the first round warmed up the imports


def load(folder: str, count: int, size: int, packages: str | None) -> list[dict[str, tuple[float, ...]]]:
    """Return what this rank measured, round by round. Raises AssertionError if a library loaded other values."""
    who, rank = contestants(packages), dist.get_rank()
    states = {name: make(1, count, size, filled=False) for name in who}
    wanted = make(1, count, size, filled=True)
    needed = sum(tensor.to_local().nbytes for tensor in wanted.values())
    files = sorted(glob.glob(f"{folder}/floor/*"))
    files = files[rank % SAVING :] + files[: rank % SAVING]
    rounds: list[dict[str, tuple[float, ...]]] = []
    for _ in range(ROUNDS + 1):
        rounds.append({})
        for name, one in who.items():
            *figures, _ = measured(partial(one.load, states[name], f"{folder}/{name}"))
            rounds[-1][name] = tuple(figures)
        *figures, _ = measured(lambda: work_of_columns(files, needed))
        rounds[-1]["floor"] = tuple(figures)
    for name, state in states.items():
        if name != "Orbax":
            same = all(torch.equal(t.to_local(), wanted[n].to_local()) for n, t in state.items())
            assert same, f"{name} loaded other values than were saved"
        elif rank == 0:
            assert who[name].equal(state), "Orbax loaded other values than were saved"
    return rounds[1:]


def _clear(folder: str) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(os.path.dirname(folder), exist_ok=True)
    dist.barrier()


def _write_raw(folder: str, state: State) -> None:
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/{dist.get_rank()}", "wb", buffering=0) as file:
        for tensor in state.values():
            view = memoryview(local(tensor)).cast("B")
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())


def rows(count: int, size: int, parent: str | None, packages: str | None) -> Iterator[Row]:
    """Yield a row of seconds and one of CPU time, for saving and for loading."""
    folder = tempfile.mkdtemp(dir=parent)
    try:
        saved = run(save, SAVING, folder, count, size, packages)
        loaded = run(load, LOADING, folder, count, size, packages)
    finally:
        shutil.rmtree(folder)
    total = f"{count * size * size * 4 / 1e9:.1f} GB"
    for what, ranks in ((f"save rows by {SAVING}", saved), (f"load columns by {LOADING}", loaded)):
        for unit, by in over_ranks(ranks).items():
            peers = {name: by.get(name, ()) for name in PEERS}
            yield Row("peers", f"{what}, {total}", unit, by["ours"], peers, by["floor"])


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--folder", help="where the files go; default: memory, where there is a folder of it")
    parser.add_argument("--packages", default=os.environ.get("RESHARD_PEERS"), help="a folder of more packages")
    options = parser.parse_args()
    folder = options.folder or ("/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    size = (8, 2048) if options.quick else (24, 4096)
    return report(rows(*size, folder, options.packages), options.rows)


if __name__ == "__main__":
    sys.exit(main())
