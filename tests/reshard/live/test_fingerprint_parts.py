"""Fingerprints from parts: what is refused, streams of boxes, layouts, whole states and process groups."""

from __future__ import annotations

import operator
import resource
import warnings

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist

from planners.geometry.box import Box
from planners.geometry.layout import Part, TensorLayout, TensorSpec
from planners.geometry.mesh import Mesh, Replicate, Shard, StridedShard
from reshard.api.fingerprint import fingerprint, holdings, join
from reshard.errors import FormatError, LayoutError, ReplicaDriftError
from reshard.live import (
    fingerprint_arithmetic as fold_module,
    fingerprint_arithmetic as tiling_module,
    fingerprints as words_module,
)
from reshard.live.compiled_kernel import PRIME
from reshard.live.fingerprint_arithmetic import PUBLIC
from reshard.live.fingerprints import Fingerprinter, Partial, add_tallies, digests_of, pack_tally, partial
from tests import gloo
from tests.bits import random_bits, select

# --- parts and errors -------------------------------------------------------------------------------------------------


def alone(data: bytes) -> list[bytes]:
    """The exchange of a single process."""
    return [data]


def test_a_missing_or_doubled_part_is_an_error():
    tensor = torch.arange(12.0).view(3, 4)
    top, rest = partial(tensor[:1], Box((0, 0), (1, 4)), (3, 4)), partial(tensor[1:], Box((1, 0), (2, 4)), (3, 4))
    with pytest.raises(LayoutError, match=r"hold 8 elements.*\(3, 4\) has 12: a part is missing"):
        rest.digest("float32", (3, 4))
    with pytest.raises(LayoutError, match=r"hold 16 elements.*counted twice"):
        (top + rest + top).digest("float32", (3, 4))

    assert partial(tensor) == top + rest == rest + top == Partial.total([top, Partial(), rest])
    assert top == Partial.from_bytes(top.to_bytes())
    with pytest.raises(FormatError, match="20 bytes, got 3"):
        Partial.from_bytes(b"abc")
    with pytest.raises(FormatError, match="no partial fingerprint"):
        Partial((PRIME, 0), 1)


@pytest.mark.parametrize("shape", [(2100, 96), (3, 4100, 64), (20, 300, 200), (70, 2300, 64)])
def test_narrow_rows_have_the_same_fingerprint_whichever_way_they_are_summed_up(shape, monkeypatch):
    """Row by row, or many rows as columns together: that depends on how many numbers either takes."""
    tensor = random_bits(shape, torch.bfloat16, torch.Generator().manual_seed(7))
    found = {}
    for thin in (1, 10**9, tiling_module.THIN):
        monkeypatch.setattr(tiling_module, "THIN", thin)
        found[thin] = partial(tensor)
    assert len(set(found.values())) == 1
    if tensor.ndim == 2:  # by the definition
        rows, columns = (PUBLIC.at(dim, np.arange(size)).tolist() for dim, size in enumerate((shape[0], shape[1] // 2)))
        words = tensor.view(torch.int32).tolist()
        for lane, wanted in enumerate(found[1].sums):
            sums = (r * sum(map(operator.mul, columns[lane], row)) for r, row in zip(rows[lane], words, strict=True))
            assert sum(sums) % PRIME == wanted


def test_tallies_add_up_as_their_parts_do():
    tallies = [
        {
            number: Partial(((PRIME - 1 - rank) % PRIME, number), 10 * rank)
            for number in range(rank % 3, 7, 1 + rank % 2)
        }
        for rank in range(9)
    ]
    totals = [Partial.total(tally[n] for tally in tallies if n in tally) for n in range(7)]
    layouts = {n: TensorLayout(TensorSpec("w", (it.count,), "int8"), "dp=1", "R") for n, it in enumerate(totals)}
    wanted = {n: total.digest("int8", (total.count,)) for n, total in enumerate(totals)}
    packed = [pack_tally(tally, range(7)) for tally in tallies]
    halves = [add_tallies(packed[:4]), pack_tally({}, range(7)), add_tallies(packed[4:])]
    assert digests_of(add_tallies(halves), layouts) == digests_of(add_tallies(packed), layouts) == wanted
    empty = dict.fromkeys(range(7), TensorLayout(TensorSpec("w", (0, 3), "int8"), "dp=1", "R"))
    assert digests_of(add_tallies([pack_tally({}, range(7))]), empty) == dict.fromkeys(
        empty, "rf1:int8[0,3]:" + "0" * 24
    )
    with pytest.raises(FormatError, match="28 bytes"):
        digests_of(b"abc", layouts)


@pytest.mark.parametrize(
    ("positions", "match"),
    [
        (Box((0, 0), (2, 3)), "does not fit|neither"),  # another size
        ([[(0, 2)], [(0, 2), (1, 3)]], "disjoint"),  # column 1 twice
        ([[(0, 2)], [(3, 7)]], "within 0 to 6"),  # beyond the end
        ([[(0, 2)]], "does not fit"),  # a dim too few
        ([Box((0, 0), (1, 4)), Box((2, 1), (1, 4))], "add up one partial per box"),  # no product
        ([Box((0, 0), (1, 4)), Box((2,), (4,))], "same dims"),
        ([1, 2], "positions are a Box"),
        (7, "positions are a Box"),
    ],
)
def test_positions_that_do_not_fit(positions, match):
    with pytest.raises(LayoutError, match=match):
        partial(torch.zeros(2, 4), positions, (4, 6))


def test_tensors_without_plain_elements_are_refused():
    with pytest.raises(FormatError, match="meta"):
        partial(torch.empty(3, device="meta"))
    with pytest.raises(FormatError, match="sparse_coo"):
        partial(torch.eye(3).to_sparse())
    with pytest.raises(FormatError, match="not supported"):
        partial(torch.zeros(3, dtype=torch.bits8))


def test_a_stream_of_boxes():
    """Reading a tensor box by box, from bytes and from tensors."""
    tensor = random_bits((9, 7), torch.float16, torch.Generator().manual_seed(8))
    reader = Fingerprinter("float16", (9, 7))
    for start in range(0, 9, 2):
        rows = tensor[start : start + 2]
        data = bytes(rows.contiguous().view(torch.uint8).flatten().tolist())
        box = Box((start, 0), tuple(rows.shape))
        if start % 4:
            reader.add(rows, box)
        else:
            reader.add_bytes(data if start else bytearray(data), box)
    reader.add_bytes(b"", Box((9, 0), (0, 7)))

    assert fingerprint({"t": tensor})["t"] == reader.digest()
    with pytest.raises(LayoutError, match="7 elements of 2 bytes, got 3 bytes"):
        reader.add_bytes(b"abc", Box((0, 0), (1, 7)))
    with pytest.raises(LayoutError, match=r"torch.float32 does not belong to a tensor of dtype torch.float16"):
        reader.add(torch.zeros(1, 7), Box((0, 0), (1, 7)))
    with pytest.raises(LayoutError, match="a part is missing"):
        Fingerprinter(torch.float32, (2,)).digest()


def test_devices_without_exact_float64_are_served_by_the_cpu(monkeypatch):
    """What a device that cannot multiply exactly does: the pieces are copied over, and the sums are the same."""
    tensor = random_bits((50, 70), torch.float32, torch.Generator().manual_seed(9))
    whole = partial(tensor)
    assert words_module.float64_is_exact(torch.device("cpu"))
    assert not words_module.float64_is_exact(torch.device("meta"))  # computes nothing
    monkeypatch.setattr(words_module, "float64_is_exact", lambda device: False)
    monkeypatch.setattr(words_module, "_COPY_WORDS", 100)

    assert whole == partial(tensor)


def test_a_device_that_is_nearly_full_takes_less_at_a_time(monkeypatch):
    monkeypatch.setattr(fold_module, "kernel", lambda: None)
    tensor = random_bits((900, 700), torch.float32, torch.Generator().manual_seed(9))
    whole, made, real = partial(tensor), [], torch.empty

    def empty(*sizes, **kwargs):
        if kwargs.get("dtype") == torch.float64 and len(sizes) == 1:
            made.append(sizes[0])
            if sizes[0] > 1 << 15:
                raise torch.OutOfMemoryError("full")
        return real(*sizes, **kwargs)

    monkeypatch.setattr(fold_module, "CPU_WORDS", 1 << 14)
    monkeypatch.setattr(fold_module, "DEVICE_WORDS", 1 << 20)
    monkeypatch.setattr(torch, "empty", empty)
    chunk, height = fold_module._chunk(900, 700, torch.device("meta"))
    assert len(made) > 1
    assert chunk.numel() == height * 700 <= 1 << 15
    monkeypatch.setattr(fold_module, "_chunk", lambda _, columns, __: (real(columns * 7, dtype=torch.float64), 7))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert partial(tensor) == whole


@pytest.mark.parametrize("words", [1 << 18, 1 << 14])
def test_one_thread_and_several_find_the_same(words, monkeypatch):
    """They are two loops: of rows that are runs of memory, of columns cut off, of a transposed tensor, and of axes that
    are no one row."""
    monkeypatch.setattr(fold_module, "kernel", lambda: None)
    monkeypatch.setattr(fold_module, "CPU_WORDS", words)
    tensor = random_bits((3, 70, 40, 21), torch.float32, torch.Generator().manual_seed(9))
    for one in (
        tensor,
        tensor[:, 3:, :17],
        tensor.permute(2, 0, 3, 1),
        tensor[..., ::2],
        tensor[1, 2, 3, :1],
        tensor[0, 0, 0, 0],
    ):
        found = []
        for threads in (1, 2):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            found.append(partial(one))
        assert found[0] == found[1] == partial(one.contiguous())


def test_whether_a_device_is_exact_is_tried_again_where_algorithms_must_be_deterministic(monkeypatch):
    """CUDA refuses matrix products then, without a setting of its own."""
    asked = []
    monkeypatch.setattr(words_module, "_tried", lambda device, strict: asked.append(strict))
    for strict in (False, True):
        torch.use_deterministic_algorithms(strict)
        try:
            words_module.float64_is_exact(torch.device("cpu"))
        finally:
            torch.use_deterministic_algorithms(False)
    assert asked == [False, True]


# --- whole states -----------------------------------------------------------------------------------------------------


def test_layouts_of_the_planners():
    """Every rank's own tensors under product, explicit and flat layouts, joined as a process group would."""
    shape = (6, 10)
    tensor = random_bits(shape, torch.bfloat16, torch.Generator().manual_seed(4))
    spec = TensorSpec("w", shape, "bfloat16")
    mesh = Mesh({"dp": 3, "tp": 2})
    layouts = [
        TensorLayout(spec, mesh, [Shard(0), Shard(1)]),
        TensorLayout(spec, mesh, [StridedShard(0, 2), Shard(0)]),
        TensorLayout(spec, mesh, [Replicate(), Shard(1)]),
        TensorLayout(spec, mesh, [Shard(1), Shard(1)]),
        TensorLayout(spec, Mesh({"dp": 16}), [Shard(0)]),
        TensorLayout.from_flat_ranges(spec, {0: (0, 7), 1: (7, 33), 2: (33, 33), 3: (33, 60)}),
    ]
    whole = fingerprint({"w": tensor}, exchange=alone)
    for layout in layouts:
        payloads = []
        for rank in range(layout.world_size):
            parts = layout.parts(rank)
            if parts and parts[0].flat_start is not None:
                local = torch.cat([tensor[box.slices].reshape(-1) for box in layout.boxes(rank)])
            else:
                local = select(tensor, [list(dim) for dim in parts[0].dims]) if parts else tensor[:0]
            payloads.append(holdings({"w": local}, {"w": layout}, rank))
            boxes = layout.boxes(rank)
            assert Partial.total(Partial.from_bytes(h.sums) for h in payloads[-1]) == partial(local, boxes, shape)

        assert whole == join([msgpack(held) for held in payloads])


def msgpack(held: object) -> bytes:
    return msgspec.msgpack.encode(held)


def test_states_are_nested_and_hold_other_things():
    weight = torch.randn(3, 2)
    state = {"model": {"w": weight, "tied": weight}, "optim": [{"step": 3, "m": torch.zeros(())}], "name": "x"}
    found = fingerprint(state)

    assert list(found) == ["model.w", "model.tied", "optim.0.m"]
    assert found["model.w"] == found["model.tied"] == fingerprint({"w": weight})["w"]
    assert fingerprint({}) == {}


def test_what_ranks_disagree_about():
    def payload(tensor: torch.Tensor) -> bytes:
        return msgpack(holdings({"w": tensor}, None, 0))

    one, two = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])
    with pytest.raises(ReplicaDriftError, match=r"w: ranks 4, 6 vs\. rank 5"):
        join([payload(one), payload(two), payload(one)], ranks=[4, 5, 6])
    with pytest.raises(LayoutError, match=r"float32\[2\] on rank 0, but float64\[2\] on rank 1"):
        join([payload(one), payload(one.double())])
    spec = TensorSpec("w", (4,), "float32")
    layout = {"w": TensorLayout(spec, Mesh({"dp": 2}), [Shard(0)])}
    with pytest.raises(LayoutError, match=r"tensor 'w': the parts .* hold 2 elements.*missing"):
        fingerprint({"w": one}, layouts=layout, rank=0, exchange=alone)
    with pytest.raises(LayoutError, match="no layout is given for 1 tensor: v"):
        fingerprint({"v": one}, layouts=layout, exchange=alone)
    with pytest.raises(LayoutError, match=r"tensor 'w' on rank 1: .*\(3,\) does not fit"):
        fingerprint({"w": torch.zeros(3)}, layouts=layout, rank=1, exchange=alone)
    overlapping = TensorLayout.from_boxes(spec, {0: [Box((0,), (2,))], 1: [Box((1,), (3,))]})
    held = [msgpack(holdings({"w": torch.zeros(n)}, {"w": overlapping}, rank)) for rank, n in enumerate((2, 3))]
    with pytest.raises(LayoutError, match=r"hold 5 elements.*counted twice"):
        join(held)
    assert Part(((),)).numel == 0


def _sharded_tensor(whole):
    """The rows of each rank, given as two shards."""
    from torch.distributed._shard.sharded_tensor import Shard as LocalShard, init_from_local_shards

    rank, shards = dist.get_rank(), []
    for rows in torch.arange(whole.shape[0]).tensor_split(4)[rank].tensor_split(2):
        if rows.numel():
            shards.append(LocalShard.from_tensor_and_offsets(whole[rows], [int(rows[0]), 0], rank))
    return init_from_local_shards(shards, *whole.shape)


def _on_a_group(shape):
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import Replicate as R, Shard as S, distribute_tensor

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        whole = torch.randn(shape)
        state = {}
        for i, placements in enumerate([(S(0), S(1)), (S(0), S(0)), (R(), S(1)), (R(), R()), (S(1), R())]):
            state[f"w{i}"] = distribute_tensor(whole, mesh, placements)
        pair = DeviceMesh("cpu", [1, 3])
        state["outsiders"] = distribute_tensor(whole, pair, [S(0)])  # ranks 0 and 2 hold a DTensor of no element
        state["two ranks"] = distribute_tensor(whole, mesh["tp"], [S(1)]) if dist.get_rank() < 2 else None
        state["sharded"] = _sharded_tensor(whole)
        state["plain"] = whole.clone()
        if dist.get_rank() == 2:
            state["mine"] = torch.arange(3.0)  # a stage's own tensor
        good = fingerprint({"layer": state})
        state["w2"].to_local().view(-1)[0] += 1.0 if dist.get_rank() == 3 else 0.0
        try:
            fingerprint({"layer": state})
        except ReplicaDriftError as error:
            drift = str(error)
        return good, drift, fingerprint({"w": whole}, exchange=alone)["w"]


@pytest.mark.gloo
def test_dtensors_on_a_process_group():
    """Every placement on every rank gives the plain tensor's fingerprint; a replica that drifted is named."""
    for good, drift, plain in gloo.run(_on_a_group, 4, (7, 10)):
        names = [f"w{i}" for i in range(5)] + ["plain", "outsiders", "two ranks", "sharded"]
        assert {f"layer.{name}": plain for name in names} == {k: v for k, v in good.items() if k != "layer.mine"}
        assert good["layer.mine"] == fingerprint({"x": torch.arange(3.0)})["x"]
        assert "layer.w2: rank 1 vs. rank 3" in drift


def _peak_bytes(nbytes):
    torch.set_num_threads(1)
    tensor = torch.ones(nbytes // 2, dtype=torch.bfloat16)
    partial(tensor[:5000])  # fill the caches, and let torch allocate what it keeps
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    n = tensor.numel()
    partial(tensor)
    partial(tensor.view(-1, 2048)[:, 1:])
    partial(tensor[1:], [[(1, n)]], (n,))
    partial(tensor.view(2048, -1).t())
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


@pytest.mark.gloo
def test_memory_does_not_grow_with_the_tensor():
    """Of 128 MiB: in place, with odd columns, at an odd address, and transposed, all within 96 MiB beside it, of
    which 64 are digits that are kept; all of it as float64 would be 512."""
    (peak,) = gloo.run(_peak_bytes, 1, 128 << 20)

    assert peak < 96 << 20
