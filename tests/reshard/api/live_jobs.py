"""What the processes of the tests of live resharding do. Each job makes many checks, since starting one takes long."""

from __future__ import annotations

import gc
import os
import time
import warnings
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

import reshard
from planners import BlockShard, Box, Mesh, Replicate, Shard as PlannedShard, TensorLayout, TensorSpec, View, concat
from reshard.errors import RankFailedError, ReshardError
from reshard.execute.exchange import Waiter
from reshard.mapping import Concat, Mapping, Rename
from reshard.ranks.group import Group
from tests.reshard.api import live_layouts
from tests.reshard.api.live_layouts import LAYOUTS, local, numbers, truth
from tests.same import bits
from tests.stories import roundtrip_jobs as jobs


def groups_for(pairs: list[tuple[str, str]]) -> dict[tuple[int, ...], Any]:
    """A process group for each set of ranks that hold something on either side of a pair."""
    sets = sorted({tuple(sorted({*LAYOUTS[a][0], *LAYOUTS[b][0]})) for a, b in pairs})
    return {ranks: dist.new_group(list(ranks)) for ranks in sets}


def held(state: dict[str, Any]) -> dict[str, set[int]]:
    """The numbers of the elements that this rank holds, by key."""
    return {key: set(local(value).reshape(-1).tolist()) for key, value in state.items()}


def lacking(source: str, target: str) -> int:
    """Bytes that this rank wants and does not hold: the least that must cross to it."""
    have, want = (held(LAYOUTS[name][1](numbers())) for name in (source, target))
    return sum(len(ids - have.get(key, set())) * live_layouts.SHAPES[key][1].itemsize for key, ids in want.items())


def pairs_job(pairs: list[tuple[str, str]], budget: int) -> list[dict[str, Any]]:
    """Redistribute between every two layouts; what each rank sent and got, and which keys came out wrong."""
    whole, other = truth(), {key: torch.zeros_like(t) for key, t in truth().items()}
    groups = groups_for(pairs)
    built = {name: build(whole) for name, (_, build) in LAYOUTS.items()}
    out = []
    for a, b in pairs:
        ranks = tuple(sorted({*LAYOUTS[a][0], *LAYOUTS[b][0]}))
        target, least = LAYOUTS[b][1](other), lacking(a, b)
        if dist.get_rank() not in ranks:
            continue
        before = {key: bits(local(t)) for key, t in built[a].items()}
        report = reshard.redistribute(built[a] or None, target, groups[ranks], max_inflight_bytes=budget)
        wrong = [key for key, value in target.items() if bits(local(value)) != bits(local(built[b][key]))]
        changed = [key for key, t in built[a].items() if bits(local(t)) != before[key]]
        out.append({"pair": (a, b), "wrong": wrong, "changed": changed, "least": least, "report": report})
    return out


# --- whole models ---


def model_job(before: str, after: str, known: dict[str, Any]) -> dict[str, Any]:
    """A model and its optimizer from one topology into another, which had other values; both gathered by torch."""
    mine, mine_optimizer = _topology(before, 7, known)
    its, its_optimizer = _topology(after, 8, jobs.train_truth(seed=1))
    source, target = jobs.sharded(mine, mine_optimizer), jobs.sharded(its, its_optimizer)
    source["optim"]["param_groups"][0]["lr"] = 0.123
    report = reshard.redistribute(source, target, check=True)
    reshard.set_state_dict(its, its_optimizer, model_state_dict=target["model"], optim_state_dict=target["optim"])
    return {"state": jobs.whole(its, its_optimizer), "report": report}


def _topology(name: str, seed: int, state: dict[str, Any]) -> tuple[Any, Any]:
    model = jobs.parallelize(jobs.build(seed), name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    jobs.fill_as_trained(model, optimizer, state)
    return model, optimizer


# --- one process group of four, many checks ---


def views_job() -> dict[str, Any]:
    """Separate q, k and v under FSDP into plain fused local tensors under TP; and what else views can do."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes, width = {"q": 16, "k": 8, "v": 8}, 6
    whole = {
        n: torch.randn(rows, width, generator=torch.Generator().manual_seed(i))
        for i, (n, rows) in enumerate(sizes.items())
    }
    whole["w"] = torch.randn(5, 12)  # every rank draws the same after the same seeds
    torch.manual_seed(3)
    whole["w"] = torch.randn(5, 12)
    source = live_layouts.placed(whole, tuple(range(world)), (world,), [Shard(1)])
    of = {n: View.of(TensorSpec(n, t.shape, "float32")) for n, t in whole.items()}
    fused = concat("qkv", [of["q"], of["k"], of["v"]])
    turned = of["w"].transpose().rename("w_t")
    padded = of["w"].pad([(0, 3), (0, 0)], value=2.5).rename("w_padded")
    twice = concat("k_twice", [of["k"], of["k"]])
    views = [fused, turned, padded, twice]
    line = Mesh({"tp": world})
    layouts = {
        "qkv": TensorLayout(fused.spec, line, [BlockShard(0, (16, 8, 8))]),
        "w_t": TensorLayout(turned.spec, line, [PlannedShard(0)]),
        "w_padded": TensorLayout(padded.spec, line, [PlannedShard(1)]),
        "k_twice": TensorLayout.from_flat_ranges(twice.spec, {r: (r * 24, r * 24 + 24) for r in range(world)}),
    }
    target = {
        "qkv": torch.zeros(32 // world, width),
        "w_t": torch.zeros(12 // world, 5),
        "w_padded": torch.zeros(8, 12 // world),
        "k_twice": torch.zeros(24),
    }
    report = reshard.redistribute(source, target, views=views, target_layouts=layouts, check=True)

    def wanted(of: dict[str, torch.Tensor], fill: float) -> dict[str, torch.Tensor]:
        return {
            "qkv": torch.cat([of[n].chunk(world)[rank] for n in "qkv"]),
            "w_t": of["w"].t().chunk(world)[rank],
            "w_padded": torch.cat([of["w"], torch.full((3, 12), fill)]).chunk(world, 1)[rank],
            "k_twice": torch.cat([of["k"], of["k"]]).reshape(-1)[rank * 24 : rank * 24 + 24],
        }

    want = wanted(whole, 2.5)
    starts = dict(zip(whole, (0, 1000, 2000, 3000)))
    ids = {n: torch.arange(float(t.numel())).view(t.shape) + starts[n] for n, t in whole.items()}
    have = {
        x
        for t in live_layouts.placed(ids, tuple(range(world)), (world,), [Shard(1)]).values()
        for x in local(t).flatten().tolist()
    }
    want_ids = {x for t in wanted(ids, -1).values() for x in t.flatten().tolist() if x >= 0}
    lacking = want_ids - have  # k goes into two targets, and twice into one of them, but crosses once
    wrong = [key for key in want if not torch.equal(target[key], want[key])]
    rules = Mapping([Concat(["q", "k", "v"], "fused", parts=(2, 1, 1)), Rename("w", "renamed")])
    fused_state = live_layouts.placed(
        {"fused": torch.zeros(32, width), "renamed": torch.zeros(5, 12)}, tuple(range(world)), (world,), [Shard(0)]
    )
    reshard.redistribute(source, fused_state, mapping=rules, check=True)
    joined = {"fused": torch.cat([whole["q"], whole["k"], whole["v"]]), "renamed": whole["w"]}
    wrong += [key for key, t in joined.items() if not torch.equal(fused_state[key].full_tensor(), t)]
    target["qkv"][0, 0] += 1
    found = reshard.verify_live(source, target, views=views, target_layouts=layouts)
    return {
        "wrong": wrong,
        "report": report,
        "least": 4 * len(lacking),
        "findings": [finding.fqn for finding in found.findings],
    }


def replay_job(steps: int) -> list[dict[str, Any]]:
    """A prepared transfer run again and again, with new values, and once with new memory."""
    every = tuple(range(dist.get_world_size()))
    torch.manual_seed(4)
    whole = {"w": torch.randn(40, 6), "x": torch.arange(7.0)}

    def rows(step: int) -> dict[str, Any]:
        return live_layouts.placed({k: t + step for k, t in whole.items()}, every, (len(every),), [Shard(0)])

    source = rows(0)
    target = live_layouts.placed({k: torch.zeros_like(t) for k, t in whole.items()}, every, (len(every),), [Shard(1)])
    source["lr"], target["lr"] = 0.0, -1.0
    prepared = reshard.prepare(source, target, max_inflight_bytes=1024)
    out = []
    for step in range(steps):
        for key in whole:
            local(source[key]).copy_(
                local(live_layouts.placed({key: whole[key] + step}, every, (len(every),), [Shard(0)])[key])
            )
        source["lr"] = float(step)
        if step == steps - 1:  # such as an optimizer that loads a state does
            source["w"]._local_tensor = source["w"]._local_tensor.clone()
        report = prepared.run()
        want = live_layouts.placed({k: t + step for k, t in whole.items()}, every, (len(every),), [Shard(1)])
        wrong = [key for key in whole if not torch.equal(local(target[key]), local(want[key]))]
        out.append({"wrong": wrong, "lr": target["lr"], "planned": report.planned, "sent": report.bytes_sent})
    again = reshard.redistribute(source, target, max_inflight_bytes=1024)
    return [*out, {"wrong": [], "lr": target["lr"], "planned": again.planned, "sent": again.bytes_sent}]


def kinds_job() -> dict[str, Any]:
    """Casts, names, ties, ShardedTensors, meta targets, per-rank values, keys that only one side has."""
    rank, world = dist.get_rank(), dist.get_world_size()
    every, out = tuple(range(world)), {}
    torch.manual_seed(5)
    w = torch.randn(9, 4)

    def rows(tensor: torch.Tensor) -> Any:
        return live_layouts.placed({"t": tensor}, every, (world,), [Shard(0)])["t"]

    def columns(tensor: torch.Tensor) -> Any:
        return live_layouts.placed({"t": tensor}, every, (world,), [Shard(1)])["t"]

    half = columns(torch.zeros(9, 4, dtype=torch.bfloat16))
    narrow = reshard.redistribute({"w": rows(w)}, {"w": half}, dtype_policy="cast", check=True)
    out["narrow"] = torch.equal(local(half), local(columns(w.bfloat16()))), narrow.cast, narrow.bytes_moved
    double = columns(torch.zeros(9, 4, dtype=torch.float64))
    wide = reshard.redistribute({"w": rows(w)}, {"w": double}, dtype_policy="cast", check=True)
    out["wide"] = torch.equal(local(double), local(columns(w.double()))), wide.bytes_moved

    tied = torch.zeros(9, 4)
    renamed = {"nest": {"embed": tied, "head": tied}}
    moved = reshard.redistribute({"w": rows(w)}, renamed, mapping={"nest.embed": "w", "nest.head": "w"})
    out["tied"] = torch.equal(tied, w), moved.bytes_received, moved.moved

    bounds = [0, 1, 4, 9, 9][: world + 1]
    pieces = _sharded_tensor(w, bounds)
    there = columns(torch.zeros(9, 4))
    reshard.redistribute({"w": pieces}, {"w": there})
    out["from sharded"] = torch.equal(local(there), local(columns(w)))
    empty = _sharded_tensor(torch.zeros(9, 4), bounds)
    reshard.redistribute({"w": there}, {"w": empty}, check=True)
    out["to sharded"] = all(torch.equal(shard.tensor, _slice(w, shard)) for shard in empty.local_shards())

    meta = {"w": torch.empty(9, 4, device="meta")}
    prepared = reshard.prepare({"w": rows(w)}, meta)
    try:
        reshard.redistribute({"w": w + rank}, meta)  # replicas that differ
    except reshard.errors.KeyMismatchError:
        out["refused meta"] = meta["w"].is_meta
    prepared.run()
    out["meta"] = torch.equal(meta["w"], w)

    lazy = torch.zeros(9, 4, dtype=torch.complex64)
    value = torch.complex(w, w)
    reshard.redistribute({"w": value.conj()}, {"w": lazy})
    out["conjugate"] = torch.equal(lazy, value.conj().resolve_conj())

    old = {"seed": reshard.PerRank(rank), "w": torch.ones(3)}
    new = {"seed": reshard.PerRank(-1), "w": torch.zeros(3)}
    its = reshard.redistribute(old, new)
    out["per rank"] = new["seed"].value == rank, its.moved
    lone = {"w": torch.zeros(3), **({"own": reshard.PerRank(-1)} if rank == 1 else {})}
    its = reshard.redistribute(old, lone, strict=False)
    out["lone"] = its.missing, its.unexpected, lone["w"].tolist()
    try:
        reshard.redistribute(old, lone)
    except reshard.ReshardError as error:
        out["lone error"] = str(error)

    one, strided = torch.zeros(world * 2, 2), torch.zeros(8, 2)  # one element, of a stride that is not 1
    ours = live_layouts.mesh(every, (world,))
    of_one = {"shape": torch.Size([world, 1]), "stride": (1, 1), "run_check": False}
    lone = DTensor.from_local(one[:1, :1] + rank, ours, [Shard(0)], **of_one)
    lone._local_tensor = torch.as_strided(one.fill_(rank), (1, 1), (3, 2))
    gathered = torch.as_strided(strided, (world, 1), (1, 2))
    reshard.redistribute({"w": lone}, {"w": gathered}, check=True)
    out["odd strides"] = gathered.reshape(-1).tolist() == list(range(world))

    some = {"w": torch.zeros(9, 4), "other": torch.ones(2)}
    partial = reshard.redistribute({"w": rows(w), "more": rows(w)}, some, strict=False)
    out["partial"] = torch.equal(some["w"], w), some["other"].tolist(), partial.missing, partial.unexpected
    return out


def _sharded_tensor(whole: torch.Tensor, bounds: list[int]) -> Any:
    from torch.distributed._shard.sharded_tensor import Shard as Piece, init_from_local_shards

    rank = dist.get_rank()
    low, high = bounds[rank : rank + 2]
    piece = Piece.from_tensor_and_offsets(whole[low:high].clone(), [low, 0], rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that the type is old
        return init_from_local_shards([piece], list(whole.shape))


def _slice(whole: torch.Tensor, shard: Any) -> torch.Tensor:
    low = shard.metadata.shard_offsets[0]
    return whole[low : low + shard.metadata.shard_sizes[0]]


# --- what is refused ---


def refusals_job() -> dict[str, Any]:
    """Every kind of bad input: the error on this rank, and whether any target changed."""
    rank, world = dist.get_rank(), dist.get_world_size()
    every = tuple(range(world))
    w = torch.arange(40.0).view(8, 5)

    def rows(tensor: torch.Tensor) -> Any:
        return live_layouts.placed({"t": tensor}, every, (world,), [Shard(0)])["t"]

    def fresh(shape: tuple[int, ...] = (8, 5), dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full(shape, -1, dtype=dtype)

    odd = rank == world - 1
    shared = torch.zeros(2 * world, 5)
    spec = TensorSpec("w", (8, 5), "float32")
    cases: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "ranks disagree about a shape": ({"w": torch.ones(3 if odd else 2)}, {"w": fresh((2,))}, {}),
        "ranks disagree about a placement": (
            {"w": live_layouts.placed({"t": w}, every, (world,), [Shard(int(odd))])["t"]},
            {"w": fresh()},
            {},
        ),
        "other names": ({"w": rows(w)}, {"v": fresh()}, {}),
        "another shape": ({"w": rows(w)}, {"w": fresh((5, 8))}, {}),
        "another dtype": ({"w": rows(w)}, {"w": fresh(dtype=torch.float64)}, {}),
        "a rank in neither side": (None if odd else {"w": w.clone()}, None if odd else {"w": fresh()}, {}),
        "other options": ({"w": rows(w)}, {"w": fresh()}, {"max_inflight_bytes": 2048 if odd else 4096}),
        "an option out of range": ({"w": rows(w)}, {"w": fresh()}, {"max_inflight_bytes": 10}),
        "a policy that is not known": ({"w": rows(w)}, {"w": fresh()}, {"dtype_policy": "guess"}),
        "replicas that have drifted": ({"w": w + odd}, {"w": fresh()}, {}),
        **{
            f"shards that have drifted, {form}": ({"w": local}, {"w": fresh()}, {"source_layouts": {"w": layout}})
            for form, local, layout in (
                ("on a mesh", w + odd, TensorLayout(spec, Mesh({"dp": world}), [Replicate()])),
                ("boxes", w + odd, TensorLayout.from_boxes(spec, {r: [Box((0, 0), (8, 5))] for r in range(world)})),
                ("flat", w.view(-1) + odd, TensorLayout.from_flat_ranges(spec, dict.fromkeys(range(world), (0, 40)))),
            )
        },
        "values that differ": ({"w": rows(w), "lr": rank}, {"w": fresh(), "lr": -1}, {}),
        "a tensor for a number": ({"w": rows(w)}, {"w": 3.0}, {}),
        "a number for a tensor": ({"w": 3.0}, {"w": fresh()}, {}),
        "a mapping to nowhere": ({"w": rows(w)}, {"w": fresh()}, {"mapping": {"u": "w"}}),
        "a view of what is not there": (
            {"w": rows(w)},
            {"v": fresh()},
            {"views": [View.of(TensorSpec("u", (8, 5), "float32")).rename("v")]},
        ),
        "a source without memory": (
            {"w": torch.empty(8, 5, device="meta")},
            {"w": fresh()},
            {"check_replicas": False},
        ),
        "memory that is shared": ({"w": shared[: 2 * world - 1]}, {"w": shared[1:]}, {}),
        "a layout that is not so": (
            {"w": rows(w)},
            {"w": fresh((3, 3))},
            {"target_layouts": {"w": TensorLayout(spec, Mesh({"tp": world}), [PlannedShard(0)])}},
        ),
        "a hole": (
            {"w": w[:1].clone()},
            {"w": fresh()},
            {"source_layouts": {"w": TensorLayout.from_boxes(spec, {r: [Box((r, 0), (1, 5))] for r in range(world)})}},
        ),
        "memory that ties two sources": ({"a": rows(w), "b": rows(w + 1)}, dict.fromkeys(("a", "b"), fresh()), {}),
    }
    out: dict[str, Any] = {}
    for name, (source, target, options) in cases.items():
        started = time.perf_counter()
        try:
            reshard.redistribute(source, target, **options)
            error: Any = None
        except Exception as caught:
            error = caught
        kept = name == "memory that is shared" or all(
            bool((t == -1).all()) for t in (target or {}).values() if isinstance(t, torch.Tensor)
        )
        out[name] = type(error).__name__, str(error), kept, time.perf_counter() - started
    reshard.redistribute({"w": rows(w)}, {"w": fresh()}, check=True)  # and the group still serves
    return out


def uncounted_job() -> dict[str, Any]:
    """Layouts that lack elements, or have some twice: what a transfer moves, and what a check of it says."""
    spec, w, out = TensorSpec("w", (10,), "float32"), torch.arange(10.0), dict[str, Any]()
    rank = dist.get_rank()
    twice = TensorLayout.from_boxes(spec, {0: [Box((0,), (6,))], 1: [Box((4,), (6,))]})
    flat = TensorLayout.from_flat_ranges(spec, {0: (0, 6), 1: (4, 10)})
    some = TensorLayout.from_boxes(spec, {0: [Box((0,), (6,))]})
    part = w[:6] if rank == 0 else w[4:]
    cases: dict[str, tuple[Any, torch.Tensor, dict[str, Any]]] = {
        "source": (part.clone(), torch.zeros(10), {"source_layouts": {"w": twice}}),
        "flat source": (part.clone(), torch.zeros(10), {"source_layouts": {"w": flat}}),
        "target": (w, torch.zeros(6), {"target_layouts": {"w": twice}}),
        "part": (w, torch.zeros(6 if rank == 0 else 0), {"target_layouts": {"w": some}}),
    }
    for name, (source, target, layouts) in cases.items():
        words = []
        for call, options in ((reshard.redistribute, {"check": True}), (reshard.verify_live, {})):
            try:
                call({"w": source}, {"w": target}, **options, **layouts)
            except reshard.errors.LayoutError as error:
                words.append(str(error))
        untouched = not target.any()
        reshard.redistribute({"w": source}, {"w": target}, **layouts)
        out[name] = words, untouched, target.tolist()
    return out


def failure_job(how: str) -> dict[str, Any]:
    """One rank fails or dies while bytes move: what the others learn, and when."""
    rank, world = dist.get_rank(), dist.get_world_size()
    every = tuple(range(world))
    torch.manual_seed(6)
    w = torch.randn(64, 64)
    source = live_layouts.placed({"w": w, "x": w}, every, (world,), [Shard(0)])
    target = live_layouts.placed({"w": w * 0, "x": w * 0}, every, (world,), [Shard(1)])
    prepared = reshard.prepare(source, target, max_inflight_bytes=2048, delta=how == "is dead, delta")
    prepared.run()
    if how.startswith("is dead"):
        if rank == 1:
            os._exit(3)
        time.sleep(0.7)  # by now the others' connections to it are closed
    elif rank == 1:
        step = prepared._exchanges[0]._rounds[2]
        if how == "raises":
            step.unpacks.insert(0, (torch.zeros(2), torch.zeros(3)))
        else:
            step.unpacks.insert(0, _Deadly())
    started = time.perf_counter()
    try:
        prepared.run()
        error: Any = None
    except Exception as caught:
        error = caught
    return {
        "type": type(error).__name__,
        "message": str(error),
        "rank": getattr(error, "rank", None),
        "targets": getattr(error, "targets", None),
        "seconds": time.perf_counter() - started,
    }


def again_job() -> tuple[str, bool]:
    """One rank fails before it sends or receives what the others have sent. Then other values move over the same
    process group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    every = tuple(range(world))
    first, second = numbers()["w"], -numbers()["w"]
    source = live_layouts.placed({"w": first}, every, (world,), [Shard(1)])
    target = live_layouts.placed({"w": first * 0}, every, (world,), [Shard(0)])
    prepared = reshard.prepare(source, target)
    if rank == 1:
        prepared._exchanges[0]._rounds[0].packs.insert(0, (torch.zeros(2), torch.zeros(3)))
    try:
        prepared.run()
        said = ""
    except Exception as caught:
        said = type(caught).__name__
    source = live_layouts.placed({"w": second}, every, (world,), [Shard(1)])
    target = live_layouts.placed({"w": second * 0}, every, (world,), [Shard(0)])
    wanted = live_layouts.placed({"w": second}, every, (world,), [Shard(0)])
    reshard.redistribute(source, target, timeout=10.0)
    return said, bits(local(target["w"])) == bits(local(wanted["w"]))


def collectives_job(how: str) -> tuple[str, list[int]]:
    """Rank 1 fails, in "last" and "delta" after its last message, when the others wait for it to come to the end. Then
    the job sums numbers of its own over the same process group, at last when the group's time for one message is over.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    group, every = dist.new_group(timeout=timedelta(seconds=6)), tuple(range(world))
    source = live_layouts.placed(numbers(), every, (world,), [Shard(1)])
    target = live_layouts.placed(numbers(), every, (world,), [Shard(0)])
    prepared = reshard.prepare(source, target, group, delta=how == "delta")
    prepared.run()
    if rank == 1:
        exchange, bad = prepared._exchanges[0], (torch.zeros(2), torch.zeros(3))
        rounds = exchange._rounds if how != "delta" else []
        {"first": lambda: rounds[0].packs, "last": lambda: rounds[-1].unpacks, "delta": lambda: exchange._copies}[
            how
        ]().append(bad)
    said, sums = _end_of(prepared), []
    for step in range(3):
        if step == 2:
            time.sleep(7.0)
        one = torch.tensor([10 * step + rank], dtype=torch.uint8)
        dist.all_reduce(one, group=group)
        sums.append(int(one))
    return said, sums


def late_job(dim: int, late: int) -> tuple[str, bool, str]:
    """Of ranks 1 and 2 one fails, and the other sends only when all have given up, and rank 0 has filled its target
    again. What ranks hold of dim 0 is received into the target itself, what they hold of dim 1 into a buffer."""
    rank, world = dist.get_rank(), dist.get_world_size()
    group, every = dist.new_group(), tuple(range(world))
    source = live_layouts.placed({"w": torch.ones(9, 9)}, every, (world,), [Shard(dim)])
    target = {"w": torch.zeros(9, 9)}
    prepared = reshard.prepare(source, target, group)
    prepared.run()
    store = dist.distributed_c10d._get_default_store()
    exchange = prepared._exchanges[0]
    if rank == 3 - late:
        exchange._rounds[0].packs.append((torch.zeros(2), torch.zeros(3)))
    elif rank == late:
        exchange._pace = lambda nbytes: store.wait(["filled"], timedelta(seconds=60))
    said = _end_of(prepared)
    if rank == 0:
        target["w"].fill_(7.0)
        store.set("filled", "")
    store.set(f"ended {rank}", "")
    store.wait([f"ended {other}" for other in every], timedelta(seconds=60))
    one = torch.tensor([rank])
    try:
        dist.all_reduce(one, group=group, async_op=True).wait(timedelta(seconds=20))
        found = str(int(one))
    except RuntimeError:
        found = "refused"
    return said, bool((target["w"] == 7.0).all()), found


def _end_of(prepared: Any) -> str:
    """How a run ends. Nothing of it is left but what the library keeps."""
    said = ""
    try:
        prepared.run()
    except Exception as caught:
        said = type(caught).__name__
    gc.collect()
    return said


class _Deadly:
    """Ends the process when it is used."""

    def __iter__(self) -> Any:
        os._exit(3)


# --- what fingerprints find in a running job ---


def flight_job() -> dict[str, Any]:
    """Fingerprints of one state under many layouts; a change, a swap and a drift, each on one rank only."""
    rank, world = dist.get_rank(), dist.get_world_size()
    every = tuple(range(world))
    whole = truth()
    layouts = {
        "rows": live_layouts.placed(whole, every, (world,), [Shard(0)]),
        "columns": live_layouts.placed(whole, every, (world,), [Shard(1)]),
        "grid": live_layouts.placed(whole, every, (2, world // 2), [Shard(1), Shard(0)]),
        "copies": {key: t.clone() for key, t in whole.items()},
        "last": {key: t.clone() for key, t in whole.items()} if rank == world - 1 else None,
    }
    pairs = [(a, b) for a in layouts for b in layouts if (a, b) != ("last", "last")]
    out: dict[str, Any] = {
        "same": [reshard.verify_live(layouts[a], layouts[b]).ok for a, b in pairs],
    }
    rows, columns = layouts["rows"], layouts["columns"]
    if rank == world - 1:
        held = local(columns["w"])
        held[[0, 1]] = held[[1, 0]]
    out["swap"] = [(finding.fqn, finding.message) for finding in reshard.verify_live(rows, columns).findings]
    if rank == 1:
        layouts["copies"]["b"].view(torch.int16)[3] ^= 1
    try:
        reshard.verify_live(layouts["copies"], rows)
        out["drift"] = "", ""
    except Exception as error:
        out["drift"] = type(error).__name__, str(error)
    return out


def lost_message_job(seconds: float) -> str:
    """The last message of rank 2 to rank 1 is lost. Rank 0 has all of its own, goes on, and ends."""
    rank, every = dist.get_rank(), (0, 1, 2, 3)
    source = live_layouts.placed({"w": torch.ones(9, 9)}, every, (4,), [Shard(0)])
    target = live_layouts.placed({"w": torch.zeros(9, 9)}, every, (4,), [Shard(1)])
    prepared = reshard.prepare(source, target)
    prepared.run()
    store = dist.distributed_c10d._get_default_store()
    prepared._group._deadline_s = seconds
    meet, begun = Waiter.meet, Waiter._begun

    def losing(self: Waiter) -> None:
        with mock.patch.object(Waiter, "_begun", lambda waiter, ops: begun(waiter, [op for op in ops if op.peer != 1])):
            meet(self)

    gone = mock.patch.object(Group, "barrier", side_effect=RankFailedError("rank 0 is gone", rank=0))
    end = ""
    with gone, mock.patch.object(Waiter, "meet", losing) if rank == 2 else nullcontext():
        try:
            prepared.run()
        except ReshardError as error:
            end = str(error)
    store.set(f"ended {rank}", "")
    store.wait([f"ended {other}" for other in every], timedelta(seconds=100))
    return end


def hang_job(seconds: float) -> str:
    """One rank comes to its second transfer only when the others have given it up, however long that takes them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    every = tuple(range(world))
    torch.manual_seed(6)
    source = live_layouts.placed({"w": torch.randn(9, 9)}, every, (world,), [Shard(0)])
    target = live_layouts.placed({"w": torch.zeros(9, 9)}, every, (world,), [Shard(1)])
    prepared = reshard.prepare(source, target)
    prepared.run()
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait([f"gave up {other}" for other in every if other != rank], timedelta(seconds=100))
        return ""
    # only now, so that a slow machine does not miss it where nobody hangs
    prepared._group._deadline_s = seconds
    end = ""
    try:
        prepared.run()
    except Exception as error:
        end = f"{type(error).__name__} from {type(error.__cause__).__name__}: {error}"
    store.set(f"gave up {rank}", "")
    return end
