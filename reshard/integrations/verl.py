"""verl's checkpoint engines on reshard: full weights, or only the elements that changed.

    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=reshard.integrations.verl
    actor_rollout_ref.rollout.checkpoint_engine.backend=reshard          # or reshard_delta

By itself, verl gathers each tensor on every trainer rank before an engine gets it. To transfer each
byte once, let `get_per_tensor_param` of the training engine return `(source, None)`, with a
`reshard.WeightSource`.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # documented, not in __all__

from planners.geometry.arrays import grouped
from reshard.api.weights import ChangedElements, SinceLastPass, WeightBucket, WeightPlace, WeightSource, marked_last
from reshard.errors import OptionError, ReshardError, framework
from reshard.live.dtypes import dtype_from_name, dtype_name
from reshard.ranks.group import DEADLINE_S

with framework("verl"):
    from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
    from verl.checkpoint_engine.delta_sync.encode import DeltaParam, checksum

__all__ = ["ReshardCheckpointEngine", "ReshardDeltaEngine"]


class _WeightMessage(NamedTuple):
    """One broadcast message."""

    header: dict[str, Any]
    """Sent as JSON through the store of the group."""
    parts: list[torch.Tensor]
    """1-D tensors of uint8."""


@CheckpointEngineRegistry.register("reshard")
class ReshardCheckpointEngine(CheckpointEngine):
    """Broadcasts full tensors from the first trainer rank to all rollout ranks. Other trainer ranks
    are not in the process group."""

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        rollout_dtype: str = "bfloat16",
        transport: str | None = None,
        host: str | None = None,
        timeout: float = DEADLINE_S,
    ) -> None:
        """Create the engine.

        Args:
            bucket_size: size of a bucket in bytes, from verl's config.
            is_master: True on the first trainer rank. Set by verl.
            rollout_dtype: dtype in which floating-point tensors from verl are sent. A
                `WeightSource` has its own.
            transport: `"gloo"` or `"nccl"`. Default: NCCL if there are GPUs.
            host: address of the first trainer rank. Default: the address that Ray reports.
            timeout: how long to wait for other ranks in each transfer, in seconds.
        """
        self._transport = transport or ("nccl" if torch.cuda.is_available() else "gloo")
        if self._transport not in ("gloo", "nccl"):
            raise OptionError(f"transport must be 'gloo' or 'nccl', got {transport!r:.80}")
        self._device = torch.device("cuda" if self._transport == "nccl" else "cpu")
        self._bucket_bytes, self._is_master, self._dtype = bucket_size, is_master, dtype_from_name(rollout_dtype)
        self._host, self._timeout = host, timedelta(seconds=timeout)
        self._store: Any = None
        self._group: Any = None
        self._messages = self._deleted = 0
        self._leave()

    def _leave(self) -> None:
        """Switch to a new group name, so that all ranks create a new group."""
        self._id, self._members, self._is_new = uuid.uuid4().hex, "", True

    def prepare(self) -> dict[str, Any]:
        """Return what other ranks need to know about this rank."""
        if not self._is_master:
            return {"id": self._id}
        if self._store is None:
            if self._host is None:
                import ray

                self._host = ray.util.get_node_ip_address().strip("[]")
            self._store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False, timeout=self._timeout)
        return {"id": self._id, "host": self._host, "port": self._store.port}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of `init_process_group` for each trainer rank and each rollout rank."""
        first, rollout = metadata[0], metadata[actor_wg_world_size:]
        common = {"host": first["host"], "port": first["port"], "members": [one["id"] for one in (first, *rollout)]}

        def each(ranks: list[int]) -> dict[str, list[Any]]:
            return {"rank": ranks, **{key: [value] * len(ranks) for key, value in common.items()}}

        return each([0] + [-1] * (actor_wg_world_size - 1)), each(list(range(1, rollout_world_size + 1)))

    def init_process_group(self, rank: int, host: str, port: int, members: list[str]) -> None:
        """Join the group. Collective. If the same ranks have joined before, do nothing."""
        name = "/".join(members)
        if rank < 0 or self._members == name:
            return
        if self._store is None:
            self._store = TCPStore(host, port, timeout=self._timeout)
        place = PrefixStore(name, self._store)
        if self._transport == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            self._group = dist.ProcessGroupNCCL(place, rank, len(members), options)
        else:
            self._group = dist.ProcessGroupGloo(place, rank, len(members), self._timeout)
        self._headers, self._members, self._is_new = PrefixStore("headers", place), name, True
        self._messages = self._deleted = 0

    def finalize(self) -> None:
        """End an update after all ranks have received it. The group is kept for the next update."""
        if self._is_master:
            for number in range(self._deleted, self._messages):
                self._headers.delete_key(str(number))
        self._deleted = self._messages

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        """Send all weights. Collective over the trainer.

        Args:
            weights: pairs of names and full tensors, a `WeightSource`, or verl's training engine.
        """
        if hasattr(weights, "get_per_tensor_param"):
            weights = weights.get_per_tensor_param()[0]
        try:
            if isinstance(weights, WeightSource):
                weights.require_full()
                if self._is_new:
                    weights.forget()  # a rank may have no weights yet
            with torch.no_grad():
                has_ended = not self._is_master
                for message, is_last in marked_last(self._encoded(self._buckets(weights))):
                    self._send(message, is_last)
                    has_ended = is_last
                if not has_ended:
                    self._send(_WeightMessage({}, []), True)
        except BaseException:
            self._leave()
            raise
        self._is_new = False

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield (name, full tensor) pairs."""
        messages = self._received()
        while (found := await asyncio.to_thread(next, messages, None)) is not None:
            message, _ = found
            places = tuple(
                WeightPlace(name, tuple(shape), dtype_from_name(dtype), start, stop)
                for name, shape, dtype, start, stop in message.header["places"]
            )
            for pair in WeightBucket(places, message.parts[0]).tensors():
                yield pair

    def _buckets(self, weights: Any) -> Iterator[WeightBucket]:
        if isinstance(weights, WeightSource):
            for bucket in weights.buckets():  # collective
                if self._is_master:  # only the first trainer rank sends
                    yield bucket
        elif self._is_master:
            yield from WeightBucket.pack(
                ((name, self._converted(tensor)) for name, tensor in weights), self._bucket_bytes
            )
        else:
            for _ in weights:  # the iteration gathers the weights, and is collective
                pass

    def _converted(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def _encoded(self, buckets: Iterable[WeightBucket]) -> Iterator[_WeightMessage]:
        for bucket in buckets:
            places = [[p.name, p.shape, dtype_name(p.dtype), p.start, p.stop] for p in bucket.places]
            yield _WeightMessage({"places": places}, [bucket.flat])

    def _send(self, message: _WeightMessage, is_last: bool) -> None:
        header = {**message.header, "sizes": [part.numel() for part in message.parts], "is_last": is_last}
        self._headers.set(str(self._messages), json.dumps(header))
        self._messages += 1
        for part in message.parts:
            self._group.broadcast(part.to(self._device), 0).wait()

    def _received(self) -> Iterator[tuple[_WeightMessage, bool]]:
        """Yield each message, and whether it is the last."""
        is_last = False
        try:
            while not is_last:
                header = json.loads(self._headers.get(str(self._messages)))
                self._messages += 1
                parts = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in header.pop("sizes")]
                for part in parts:
                    self._group.broadcast(part, 0).wait()
                is_last = header.pop("is_last")
                if header:
                    yield _WeightMessage(header, parts), is_last
        except BaseException:
            self._leave()
            raise


@CheckpointEngineRegistry.register("reshard_delta")
class ReshardDeltaEngine(ReshardCheckpointEngine):
    """Sends all weights first, then only elements that changed, in the form that verl's delta
    loaders read. The first trainer rank keeps a copy of all weights in host memory."""

    wire_format = "delta_flush"

    def __init__(self, *args: Any, **options: Any) -> None:
        """Take the arguments of `ReshardCheckpointEngine`."""
        super().__init__(*args, **options)
        self._since = SinceLastPass()

    def _buckets(self, weights: Any) -> Iterator[WeightBucket]:
        if self._is_new:
            self._since.forget()
        buckets = super()._buckets(weights)
        return buckets if isinstance(weights, WeightSource) and weights.delta else self._since.of(buckets)

    def _encoded(self, buckets: Iterable[WeightBucket]) -> Iterator[_WeightMessage]:
        """Encode tensors in messages. A message has one dtype, and positions for all of its tensors or for none."""
        for bucket in buckets:
            alike = grouped((change.values.dtype, change) for change in bucket.changes())
            yield from map(_flush, alike.values())

    def receive_weights(  # type: ignore[override]  # as verl's own engine of differences
        self, global_steps: int | None = None
    ) -> Iterator[tuple[list[tuple[str, torch.Tensor]], bool]]:
        """Yield (named tensors, whether they are the last), as verl's rollouts receive differences."""
        for message, is_last in self._received():
            spec = json.dumps(message.header["spec"]).encode()
            found = {"__delta_spec__": torch.frombuffer(bytearray(spec), dtype=torch.uint8).to(self._device)}
            *positions, values = message.parts
            if positions:
                found["__positions__"] = positions[0]
            found["__values__"] = values.view(dtype_from_name(message.header["dtype"]))
            yield list(found.items()), is_last


def _flush(changes: list[ChangedElements]) -> _WeightMessage:
    """Return a message in verl's form: 4-byte positions, located by byte offsets, and values,
    located by element offsets."""
    params, at = [], 0
    is_dense = changes[0].positions is None
    for change in changes:
        if not is_dense and change.numel > torch.iinfo(torch.int32).max:
            raise ReshardError(f"{change.name!r} has {change.numel} elements: verl's positions are of 32 bits")
        stop = at + change.values.numel()
        span = (0, 0) if is_dense else (4 * at, 4 * stop)
        dtype = dtype_name(change.values.dtype)
        params.append(vars(DeltaParam(change.name, dtype, list(change.shape), span[0], span[1], 4, at, stop)))
        at = stop
    values = torch.cat([change.values for change in changes])
    found = [change.positions.to(torch.int32) for change in changes if change.positions is not None]
    positions = torch.cat(found).view(torch.uint8) if found else values.new_empty(0, dtype=torch.uint8)
    encoding = "dense" if is_dense else "indices"
    spec = {"encoding": encoding, "params": params, "checksum": int(checksum(positions, values))}
    parts = [values.view(torch.uint8)] if is_dense else [positions, values.view(torch.uint8)]
    return _WeightMessage({"spec": spec, "dtype": dtype_name(values.dtype)}, parts)
