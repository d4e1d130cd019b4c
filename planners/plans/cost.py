"""`estimate`: the cost of a plan on a cluster that a few numbers describe; `compare_topologies`:
the best of several.

The model is simple on purpose; docs/cost-model.md says what it leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from planners.errors import PlanError
from planners.geometry.arrays import Floats, Ints, ints, zeros
from planners.geometry.layout import StateLayout
from planners.geometry.topologies import Topology
from planners.plans.load import LoadPlan, count_reads, plan_reads
from planners.plans.save import SavePlan
from planners.plans.transfer import TransferPlan, plan_transfers
from planners.units import format_bytes, format_count, format_rate, format_seconds

_QUESTIONS = {"save": 35, "load": 35}
"""Counted requests of one rank to the store of its process group: see docs/scale.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A cluster described by a few numbers. Ranks 0 to `ranks_per_host` - 1 are on host 0, and so on.

    Raises PlanError for numbers that are not positive (latency and gaps may be 0).
    """

    ranks_per_host: int = 8
    storage_read_bytes_per_s: float | None = None
    """Read bandwidth of storage per host."""
    storage_write_bytes_per_s: float | None = None
    """Write bandwidth of storage per host."""
    storage_total_bytes_per_s: float | None = None
    """Bandwidth of storage for all hosts together; None if it grows with the number of hosts."""
    network_bytes_per_s: float | None = None
    """Network bandwidth per host, in each direction at the same time."""
    local_bytes_per_s: float | None = None
    """Bandwidth between the ranks of one host; None if that takes no time."""
    request_latency_s: float = 0.0
    """Time from a request to storage, or from sending a message, to its first byte."""
    requests_in_flight: int = 16
    """Number of requests that one host has in flight."""
    max_gap_bytes: int = 0
    """Gaps up to this size are read instead of skipped."""
    host_memory_bytes: float | None = None
    """Memory for the tensors of one host's ranks."""
    store_requests_per_s: float | None = None
    """Number of requests per second that the store of the process group, usually one process,
    answers for all ranks; None if that takes no time."""

    def __post_init__(self) -> None:
        for name in ("ranks_per_host", "requests_in_flight"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise PlanError(f"{name} of a cluster must be an integer >= 1, got {getattr(self, name)!r}")
        for name in self.__slots__:
            value = getattr(self, name)
            least_is_zero = name in ("request_latency_s", "max_gap_bytes")
            if value is not None and not (value > 0 or (least_is_zero and value == 0)):
                raise PlanError(f"{name} of a cluster must be {'>= 0' if least_is_zero else '> 0'}, got {value!r}")

    @property
    def rates(self) -> str:
        """The rates assumed for a host: `"2 GB/s read by a host of 8 ranks"`."""
        rates = {
            "read": self.storage_read_bytes_per_s,
            "written": self.storage_write_bytes_per_s,
            "sent": self.network_bytes_per_s,
        }
        known = [f"{format_rate(rate)} {what}" for what, rate in rates.items() if rate is not None]
        latency = f", {format_seconds(self.request_latency_s)} per request" if self.request_latency_s else ""
        return f"{', '.join(known)} by a host of {format_count(self.ranks_per_host, 'rank')}{latency}"

    def require(self, name: str, purpose: str) -> float:
        """Return a bandwidth. Raises PlanError if the cluster does not have it."""
        value = getattr(self, name)
        if value is None:
            raise PlanError(f"to estimate {purpose}, the cluster needs a bandwidth: pass {name}")
        return float(value)

    def by_host(self, per_rank: Ints) -> Ints:
        """Return the sums over the ranks of each host."""
        hosts = -(-len(per_rank) // self.ranks_per_host)
        padded = zeros(hosts * self.ranks_per_host)
        padded[: len(per_rank)] = per_rank
        return ints(padded.reshape(hosts, self.ranks_per_host).sum(axis=1))


@dataclass(frozen=True, eq=False)
class Estimate:
    """The cost of a plan. Arrays have one entry per rank or per host."""

    kind: Literal["load", "save", "transfer"]
    cluster: Cluster
    rank_needed_bytes: Ints
    """Bytes that each rank reads, writes, or receives from others according to the plan."""
    rank_requests: Ints
    """Number of reads after coalescing, of files written, or of peers received from."""
    rank_bytes: Ints
    """Bytes that each rank really transfers. Reads include gaps between needed bytes."""
    host_in_bytes: Ints
    """Bytes that each host receives from storage or from other hosts."""
    host_out_bytes: Ints
    """Bytes that each host sends to storage or to other hosts."""
    host_seconds: Floats
    """Time at which each host finishes, if the total bandwidth of storage is not the limit."""
    peak_host_bytes: Ints
    """Bytes of tensors that each host holds at the same time."""
    seconds: float
    """Time at which all hosts finish."""
    control_seconds: float = 0.0
    """Part of `seconds` that the ranks of a save or load take to agree."""

    @property
    def over_read(self) -> float:
        """Bytes read per byte needed. 1 for saves and transfers."""
        needed = int(self.rank_needed_bytes.sum())
        return int(self.rank_bytes.sum()) / needed if needed else 1.0

    @property
    def slowest_host(self) -> int:
        """The host that finishes last. If several do, the first of them."""
        return int(self.host_seconds.argmax())

    @property
    def straggling(self) -> float:
        """Time of the slowest host divided by the mean of the busy hosts. 1 if all are equal."""
        busy = self.host_seconds[self.host_seconds > 0]
        return float(busy.max() / busy.mean()) if len(busy) else 1.0

    @property
    def fits(self) -> bool | None:
        """True if every host has enough memory. None if `cluster` has no `host_memory_bytes`."""
        limit = self.cluster.host_memory_bytes
        return None if limit is None else bool(self.peak_host_bytes.max(initial=0) <= limit)

    def __str__(self) -> str:
        verb = {"load": "read", "save": "written", "transfer": "received from other ranks"}[self.kind]
        room = {None: "", True: ", which fits", False: ", which does NOT fit"}[self.fits]
        moved, requests = format_bytes(int(self.rank_bytes.sum())), f"{int(self.rank_requests.sum()):,} requests"
        each = f"{self.over_read:.3f} bytes for each byte needed"
        lines = [
            f"at least {format_seconds(self.seconds)} at {self.cluster.rates}",
            f"{moved} {verb} in {requests}, {each}",
            f"slowest host: {self.slowest_host}, {self.straggling:.2f} times the mean time",
            f"a host holds at most {format_bytes(int(self.peak_host_bytes.max(initial=0)))}{room}",
        ]
        if self.control_seconds:
            lines.append(f"of the time, the ranks agree for {format_seconds(self.control_seconds)}")
        return "\n".join(lines)


def estimate(plan: LoadPlan | SavePlan | TransferPlan, cluster: Cluster) -> Estimate:
    """Estimate the bytes, requests, memory, and time of a plan, per rank and host. Does not list items.

    Raises PlanError if the cluster lacks a bandwidth that the plan needs, or if the value is not a
    plan.
    """
    if not isinstance(cluster, Cluster):
        raise PlanError(f"estimate(plan, cluster) needs a Cluster, got {cluster!r:.80}")
    if getattr(plan, "total_bytes", 0) >> 63:
        raise PlanError(f"a plan of 2**63 bytes or more has no estimate, got {plan.total_bytes:,}")
    if isinstance(plan, TransferPlan):
        return _estimate_transfers(plan, cluster)
    if isinstance(plan, LoadPlan):
        counts = count_reads(plan, cluster.max_gap_bytes)
        return _estimate_storage(plan, cluster, counts.requests, counts.read_bytes)
    if isinstance(plan, SavePlan):
        written = plan.rank_bytes()
        return _estimate_storage(plan, cluster, (written > 0).astype(np.int64), written)
    raise PlanError(f"cannot estimate a {type(plan).__name__}: expected a load, save, or transfer plan")


def _estimate_storage(plan: LoadPlan | SavePlan, cluster: Cluster, requests: Ints, nbytes: Ints) -> Estimate:
    """`requests` and `nbytes`: of each rank, to storage or from it."""
    is_load = isinstance(plan, LoadPlan)
    bandwidth = cluster.require(f"storage_{'read' if is_load else 'write'}_bytes_per_s", f"a {plan.kind}")
    host_bytes, layout = cluster.by_host(nbytes), plan.wanted if isinstance(plan, LoadPlan) else plan.layout
    idle = np.zeros_like(host_bytes)
    seconds = host_bytes / bandwidth + _latency_s(cluster.by_host(requests), cluster)
    control_s = _control_s(plan.kind, len(requests), cluster)
    return Estimate(
        kind=plan.kind,
        cluster=cluster,
        rank_needed_bytes=plan.rank_bytes(),
        rank_requests=requests,
        rank_bytes=nbytes,
        host_in_bytes=host_bytes if is_load else idle,
        host_out_bytes=idle if is_load else host_bytes,
        host_seconds=seconds,
        peak_host_bytes=cluster.by_host(layout.rank_bytes()),
        seconds=_shared_s(int(host_bytes.sum()), seconds, cluster) + control_s,
        control_seconds=control_s,
    )


def _estimate_transfers(plan: TransferPlan, cluster: Cluster) -> Estimate:
    bandwidth = cluster.require("network_bytes_per_s", "transfers")
    traffic, world = plan.traffic(), plan.world_size
    hosts = -(-world // cluster.ranks_per_host)
    giver, taker = traffic.sender // cluster.ranks_per_host, traffic.receiver // cluster.ranks_per_host
    sums = [zeros(hosts) for _ in range(3)]
    far = giver != taker
    np.add.at(sums[0], taker[far], traffic.nbytes[far])
    np.add.at(sums[1], giver[far], traffic.nbytes[far])
    np.add.at(sums[2], giver[~far], traffic.nbytes[~far])
    peers = np.bincount(traffic.receiver, minlength=world)
    seconds = np.maximum(sums[0], sums[1]) / bandwidth + _latency_s(cluster.by_host(peers), cluster)
    if cluster.local_bytes_per_s is not None:
        seconds = seconds + sums[2] / cluster.local_bytes_per_s
    held = zeros(world)
    for layout in (plan.before, plan.after):
        held[: layout.world_size] += layout.rank_bytes()
    return Estimate(
        kind="transfer",
        cluster=cluster,
        rank_needed_bytes=plan.received_bytes(),
        rank_requests=ints(peers),
        rank_bytes=plan.received_bytes(),
        host_in_bytes=sums[0],
        host_out_bytes=sums[1],
        host_seconds=seconds,
        peak_host_bytes=cluster.by_host(held),
        seconds=float(seconds.max(initial=0.0)),
    )


def _latency_s(requests: Ints, cluster: Cluster) -> Floats:
    """Requests go out in waves of at most `requests_in_flight`."""
    waves = -(-requests // cluster.requests_in_flight)
    return np.asarray(waves * cluster.request_latency_s, dtype=np.float64)


def _control_s(verb: str, ranks: int, cluster: Cluster) -> float:
    """The time that the store takes to answer all ranks. One rank does not ask."""
    rate = cluster.store_requests_per_s
    return 0.0 if rate is None or ranks < 2 else ranks * _QUESTIONS[verb] / rate


def _shared_s(total_bytes: int, seconds: Floats, cluster: Cluster) -> float:
    """The slowest host, or storage as a whole if that is slower."""
    shared = cluster.storage_total_bytes_per_s
    return max(float(seconds.max(initial=0.0)), total_bytes / shared if shared is not None else 0.0)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Estimates of a change to each of several target topologies."""

    estimates: dict[str, Estimate]
    """Name of the target topology -> its estimate, the fastest first."""

    @property
    def best(self) -> str:
        """The fastest target topology that fits in memory. If none does, the fastest."""
        return next((n for n, e in self.estimates.items() if e.fits is not False), next(iter(self.estimates)))

    def __str__(self) -> str:
        head = (
            "target",
            "ranks",
            "time",
            "moved",
            "over-read",
            "requests",
            "straggler",
            "memory a host",
            "fits",
        )
        rows = [head]
        for name, each in self.estimates.items():
            rows.append(
                (
                    name,
                    str(len(each.rank_bytes)),
                    format_seconds(each.seconds),
                    format_bytes(int(each.rank_bytes.sum())),
                    f"{each.over_read:.3f}",
                    f"{int(each.rank_requests.sum()):,}",
                    f"{each.straggling:.2f}x",
                    format_bytes(int(each.peak_host_bytes.max(initial=0))),
                    {None: "?", True: "yes", False: "no"}[each.fits],
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        return "\n".join(
            "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
            for row in rows
        )


def compare_topologies(
    source: StateLayout,
    targets: Mapping[str, StateLayout | Topology],
    cluster: Cluster,
    *,
    live: bool = False,
) -> Comparison:
    """Estimate the cost of moving a state from `source` to each of several target topologies, by a
    load. With `live`, by transfers between running ranks.

    Raises PlanError if there are no target topologies, or if the cluster lacks a bandwidth that is
    needed.
    """
    if not targets:
        raise PlanError("no targets to compare: pass at least one layout or topology by name")
    found: dict[str, Estimate] = {}
    for name, target in targets.items():
        layout = target.layout(source.specs) if isinstance(target, Topology) else target
        plan: LoadPlan | TransferPlan = (
            plan_transfers(source, layout, ranks_per_host=cluster.ranks_per_host)
            if live
            else plan_reads(source, layout)
        )
        found[name] = estimate(plan, cluster)
    return Comparison(dict(sorted(found.items(), key=lambda row: row[1].seconds)))
