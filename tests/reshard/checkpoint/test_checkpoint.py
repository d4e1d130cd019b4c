"""`open` and what it gives: indexing means what it means in torch, and what is no checkpoint is said to be none."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import save_file

import reshard
from planners.geometry.box import Box
from planners.geometry.byte_ranges import Window
from planners.geometry.layout import StateLayout, TensorLayout, TensorSpec
from planners.geometry.mesh import Mesh, Shard
from reshard.checkpoint import Checkpoint, open as open_checkpoint, open_among
from reshard.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatError,
    KeyMismatchError,
    OptionError,
    StorageError,
)
from reshard.storage import LocalStorage, MemoryStorage, open_storage
from reshard.stored.contents import Contents
from reshard.stored.source import BytesSource, FileSource
from reshard.stored.tensor import MAX_BUFFER_BYTES, Extent, LazyTensor, StoredChunk, StoredTensor
from tests.reshard.formats.writers import DcpWriter, grid
from tests.same import same
from tests.storages import Remote


def in_memory(tensor: torch.Tensor, *pieces: int, permuted: tuple[int, ...] | None = None) -> LazyTensor:
    """A lazy tensor over chunks in memory, stored in another order of dims if `permuted`."""
    chunks = []
    for i, (offsets, part) in enumerate(grid(tensor, *pieces)):
        order = permuted or tuple(range(part.ndim))
        data = part.permute(order).contiguous().numpy().tobytes()
        window = Window.row_major(3, [part.shape[d] for d in order], part.element_size())
        back = [order.index(d) for d in range(part.ndim)]
        place = Extent(BytesSource(b"xyz" + data), window.permute(back))
        chunks.append(StoredChunk(Box(offsets, part.shape), place, i))
    return LazyTensor(
        StoredTensor(TensorSpec("t", tensor.shape, str(tensor.dtype).removeprefix("torch.")), tuple(chunks))
    )


@st.composite
def indexes(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    """An index that torch takes: ints, slices with positive steps, an Ellipsis somewhere."""
    parts: list[Any] = []
    for size in shape[: draw(st.integers(0, len(shape)))]:
        bound = st.one_of(st.none(), st.integers(-size - 2, size + 2))
        choices = [st.builds(slice, bound, bound, st.one_of(st.none(), st.integers(1, 4)))]
        if size:
            choices.append(st.integers(-size, size - 1))
        parts.append(draw(st.one_of(choices)))
    if draw(st.booleans()):
        parts.insert(draw(st.integers(0, len(parts))), ...)
        # what follows the dots counts from the end, where sizes may differ: keep to slices there
        parts = [p if isinstance(p, slice) or p is ... else slice(p, p) for p in parts]
    return tuple(parts) if draw(st.booleans()) or len(parts) != 1 else parts[0]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_indexing_is_torchs(data: st.DataObject) -> None:
    """Law: for any shape, cut, order in memory and index, the elements are those of the whole tensor."""
    shape = tuple(data.draw(st.lists(st.integers(0, 7), max_size=4)))
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
    pieces = [data.draw(st.integers(1, 3)) for _ in shape]
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    lazy = in_memory(tensor, *pieces, permuted=order)
    index = data.draw(indexes(shape))

    assert same(lazy[index], tensor[index])


def test_a_lazy_tensor_says_what_it_is() -> None:
    lazy = in_memory(torch.zeros(3, 4, dtype=torch.bfloat16).float(), 2)

    assert (lazy.shape, lazy.dtype, lazy.ndim, lazy.nbytes, lazy.numel(), len(lazy)) == (
        (3, 4),
        torch.float32,
        2,
        48,
        12,
        3,
    )
    assert repr(lazy) == "LazyTensor('t', [3, 4], float32)"
    assert [same(row, torch.zeros(4)) for row in lazy] == [True] * 3
    with pytest.raises(TypeError, match="0-d tensor 't'"):
        len(in_memory(torch.tensor(1.0)))


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (3, IndexError, "index 3 is out of bounds for dim 0 of size 3"),
        ((0, -5), IndexError, "index -5 is out of bounds for dim 1 of size 4"),
        ((0, 0, 0), IndexError, "has 2 dims, but 3 were indexed"),
        ((..., ...), IndexError, "only one Ellipsis"),
        (slice(None, None, -1), ValueError, "must be >= 1, got -1 for dim 0"),
        ([0, 1], TypeError, r"not by list; or read all of it, then index that: tensor\[\.\.\.\]\[\[0, 2\]\]"),
        (torch.tensor([0]), TypeError, "not by Tensor"),
        (None, TypeError, "not by NoneType"),
        (True, TypeError, "not by bool"),
        (1.0, TypeError, "not by float"),
    ],
)
def test_what_cannot_index_is_refused(index: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        in_memory(torch.zeros(3, 4))[index]


def test_a_tensor_knows_no_holes() -> None:
    whole = in_memory(torch.arange(12.0).reshape(3, 4), 3)
    part = LazyTensor(StoredTensor(whole.stored.spec, whole.stored.chunks[1:]))

    assert same(part[1:], whole[1:])
    with pytest.raises(
        CorruptCheckpointError,
        match=r"tensor 't' of shape \[3, 4\]: no file of the checkpoint has elements \[0:1, 1:2\]",
    ):
        part[:, 1]
    twice = LazyTensor(StoredTensor(whole.stored.spec, whole.stored.chunks + whole.stored.chunks[2:]))
    with pytest.raises(CorruptCheckpointError, match=r"Box\[2:3, 0:4\] are stored twice, in the chunk .* of writer 2"):
        twice[...]
    with pytest.raises(CorruptCheckpointError, match=r"is outside the shape \[2, 4\]"):
        StoredTensor(TensorSpec("t", (2, 4), "float32"), whole.stored.chunks)


def test_tensors_larger_than_memory_are_refused_or_sliced() -> None:
    """A value repeated 2**60 times needs few bytes in a file, and too many out of it."""
    shape = (1 << 40, 1 << 20)
    place = Extent(BytesSource(b"abcd"), Window(0, shape, (0, 0), 4))
    lazy = LazyTensor(StoredTensor(TensorSpec("t", shape, "int32"), (StoredChunk(Box.full(shape), place),)))

    with pytest.raises(CheckpointError, match=r"no memory for .* read it in slices"):
        lazy[...]
    assert same(lazy[5:7, -1], torch.frombuffer(bytearray(b"abcdabcd"), dtype=torch.int32))


def test_chunks_are_moved_and_turned_without_being_located() -> None:
    """crop, shift and derived compose, stay lazy, and read the right bytes."""
    whole = torch.arange(24.0).reshape(4, 6)
    asked: list[int] = []

    def locate() -> Extent:
        asked.append(1)
        return Extent(BytesSource(whole.numpy().tobytes()), Window.row_major(0, (4, 6), 4))

    chunk = StoredChunk(Box((0, 0), (4, 6)), locate)
    cropped = chunk.crop(Box((1, 2), (3, 3)))
    turned = cropped.derived(Box((2, 1), (3, 3)), lambda window: window.permute((1, 0))).shift((-2, -1))
    assert (turned.box, asked, turned.is_located) == (Box((0, 0), (3, 3)), [], False)

    lazy = LazyTensor(StoredTensor(TensorSpec("t", (3, 3), "float32"), (turned,)))
    assert same(lazy[...], whole[1:4, 2:5].T)
    assert asked == [1]


def test_a_place_of_another_size_is_damage() -> None:
    place = Extent(BytesSource(b"12345678"), Window.row_major(0, (2,), 4))
    with pytest.raises(
        CorruptCheckpointError, match=r"payload has shape \[2\], but the checkpoint's metadata says \[3\]"
    ):
        StoredChunk(Box((0,), (3,)), place)
    cut = LazyTensor(StoredTensor(TensorSpec("t", (3,), "int32"), (StoredChunk(Box((0,), (3,)), Extent(
        BytesSource(b"12345678", "the file"), Window.row_major(0, (3,), 4))),)))  # fmt: skip
    with pytest.raises(CorruptCheckpointError, match=r"the file: expected bytes \[0, 12\), but it has 8 bytes"):
        cut[...]


def test_large_windows_are_read_in_pieces(tmp_path: Path) -> None:
    """Without a zero-copy view no read is larger than the buffer, whatever the shape."""
    rows = MAX_BUFFER_BYTES // 4096 + 3
    data = torch.arange(rows * 1024, dtype=torch.int32).reshape(rows, 1024)
    (tmp_path / "x").write_bytes(data.numpy().tobytes())
    storage = Remote(tmp_path, max_gap_bytes=64)
    for shape in ((rows, 1024), (rows * 1024,), (1, rows * 1024, 1)):
        storage.ranges.clear()
        place = Extent(FileSource(storage, "x"), Window.row_major(0, shape, 4))
        lazy = LazyTensor(StoredTensor(TensorSpec("t", shape, "int32"), (StoredChunk(Box.full(shape), place),)))
        assert same(lazy[...], data.reshape(shape))
        assert storage.largest <= MAX_BUFFER_BYTES
        assert storage.nbytes_read == data.nbytes


@pytest.mark.parametrize("compare", [operator.eq, operator.ne, operator.lt, operator.ge])
@pytest.mark.parametrize("other", [torch.zeros(2), np.zeros(2, np.float32), 0, 0.5, in_memory(torch.zeros(2))])
def test_values_are_not_compared_before_they_are_read(compare: Any, other: Any) -> None:
    lazy = in_memory(torch.zeros(2))
    for sides in ((lazy, other), (other, lazy)):
        with pytest.raises(TypeError, match="is lazy"):
            compare(*sides)


@pytest.mark.parametrize("make", [np.asarray, np.array, torch.as_tensor, torch.tensor, bool, float, operator.neg])
def test_what_needs_the_values_says_how_to_read_them(make: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"LazyTensor\(.* is lazy: read it with \[...\] first"):
        make(in_memory(torch.zeros(2)))


@pytest.mark.parametrize("write", [reshard.save, torch.save])
def test_values_that_are_not_there(tmp_path: Path, write: Callable[..., Any]) -> None:
    write({"epoch": 3, "w": torch.zeros(2)}, tmp_path / "saved")

    objects = reshard.open(tmp_path / "saved").objects
    with pytest.raises(KeyMismatchError, match=r"there is no 'epohc': did you mean 'epoch'\?"):
        objects["epohc"]
    assert objects == {"epoch": 3}
    assert objects.get("w") is None


def test_a_value_that_is_each_rank_s_own_is_named_so(tmp_path: Path) -> None:
    reshard.save({"w": torch.zeros(2), "rng": reshard.PerRank({"seed": 1})}, tmp_path / "saved")

    found = reshard.open(tmp_path / "saved")
    for values in (found, found.objects):
        with pytest.raises(KeyMismatchError, match=r"'rng': it is a per-rank value. reshard.load gives each rank its"):
            values["rng"]
    assert found.contents.per_rank["rng"] == {0: {"seed": 1}}


def test_a_lazy_tensor_may_be_a_key_and_differs_from_what_has_no_value() -> None:
    lazy, other = in_memory(torch.zeros(2)), in_memory(torch.zeros(2))
    assert {lazy: 1, other: 2}[lazy] == 1
    assert lazy == {0: lazy}[0], "the same object"
    assert lazy not in (None, "w")


def test_names_that_are_not_there() -> None:
    lazy = in_memory(torch.zeros(2))
    checkpoint = Checkpoint(Contents({"layers.0.weight": lazy.stored}, {"epoch": 3}, format="x"), "place")

    with pytest.raises(
        KeyMismatchError, match=r"place has no tensor 'layers.0.wieght': did you mean 'layers.0.weight'\?"
    ):
        checkpoint["layers.0.wieght"]
    with pytest.raises(KeyMismatchError, match=r"^'epoch' is an object: use checkpoint\.objects\['epoch'\]$"):
        checkpoint["epoch"]
    with pytest.raises(KeyMismatchError, match="it has 1 tensor, such as"):
        checkpoint["zzz"]
    assert "zzz" not in checkpoint
    assert checkpoint.get("zzz") is None


def test_nothing_is_there(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", "memory://nothing-here"):
        with pytest.raises(CheckpointNotFoundError, match="no such file or folder"):
            open_checkpoint(path)
    (tmp_path / "step-1000").mkdir()
    with pytest.raises(CheckpointNotFoundError, match=r"step-1000 is empty: there is no checkpoint in it$"):
        open_checkpoint(tmp_path / "step-1000")
    with pytest.raises(CheckpointNotFoundError, match=rf"step-100': did you mean '{tmp_path}/step-1000'"):
        open_checkpoint(tmp_path / "step-100")
    (tmp_path / "latest").symlink_to("step-9")
    with pytest.raises(CheckpointNotFoundError, match=r"latest is a link to step-9, which is not there$"):
        open_checkpoint(tmp_path / "latest")


W = torch.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize(
    "use",
    [
        lambda lazy: torch.equal(lazy, W),
        lambda lazy: torch.equal(W, lazy),
        lambda lazy: torch.stack([W, lazy]),
        lambda lazy: torch.empty_like(W).copy_(lazy),
        lambda lazy: W - lazy,
        lambda lazy: lazy.sum(),
    ],
)
def test_a_lazy_tensor_says_how_to_read_it(use: Callable[[Any], Any]) -> None:
    with pytest.raises((TypeError, AttributeError), match=r"read it with \[\.\.\.\] first"):
        use(in_memory(W, 1, 1))


def test_an_unknown_format_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(
        FormatError, match=r"not a checkpoint in a known format. It contains notes.txt. Known formats are native, "
    ):
        open_checkpoint(tmp_path)
    with pytest.raises(FormatError, match=r" dcp, safetensors, torch_save, .*\. If you renamed files"):
        open_checkpoint(tmp_path / "notes.txt")


def test_a_folder_of_checkpoints_names_them(tmp_path: Path) -> None:
    for name in ("first", "second"):
        DcpWriter({"w": grid(torch.ones(2), 1)}).write(tmp_path / name)
        if name == "first":
            with pytest.raises(FormatError, match=r"Its subfolder 'first' seems to be a checkpoint: open that$"):
                open_checkpoint(tmp_path)
    reshard.save({"w": torch.ones(2)}, tmp_path / "third")  # whose data folder is none
    with pytest.raises(FormatError, match=r"Checkpoints seem to be in its subfolders first, second, third: open one"):
        open_checkpoint(tmp_path)
    for number in range(5):
        reshard.save({"w": torch.ones(2)}, tmp_path / f"x{number}")
    with pytest.raises(FormatError, match=r"subfolders first, second, third, x0, x1 and 3 more: open one") as of:
        open_checkpoint(tmp_path)
    assert not re.search("contains|Known formats", str(of.value))


def test_only_folders_that_open_are_named(tmp_path: Path) -> None:
    for name in ("repo/tests/data/one", "repo/tests/two"):
        reshard.save({"w": torch.ones(2)}, tmp_path / name)
    with pytest.raises(FormatError, match="to be in its subfolders repo/tests/data/one, repo/tests/two: open one"):
        open_checkpoint(tmp_path)


def test_mixtures_are_refused(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    torch.save({"w": torch.zeros(2)}, tmp_path / "b.pt")
    with pytest.raises(FormatError, match=r"files of several formats: safetensors and torch_save\. Open one"):
        open_checkpoint(tmp_path)
    assert same(open_checkpoint(tmp_path / "b.pt")["w"][...], torch.zeros(2))
    DcpWriter({"w": grid(torch.ones(2), 1)}).write(tmp_path)
    with pytest.raises(FormatError, match="dcp and safetensors and torch_save"):
        open_checkpoint(tmp_path)


def test_a_dcp_checkpoint_beside_one_of_another_kind(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save({"w": torch.ones(2)}, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    assert open_checkpoint(tmp_path).format == "rank_files"
    DcpWriter({"w": grid(torch.ones(2), 1)}).write(tmp_path)
    with pytest.raises(FormatError, match="several formats: rank_files and dcp"):
        open_checkpoint(tmp_path)


def test_storages_and_urls_of_all_kinds(tmp_path: Path) -> None:
    """A path, a file URL, a storage and memory give the same tensors."""
    value = torch.arange(6.0).reshape(2, 3)
    DcpWriter({"w": grid(value, 2)}).write(tmp_path / "a folder")
    memory = open_storage("memory://checkpoint-test")
    for file in (tmp_path / "a folder").iterdir():
        memory.publish(file.name, file.read_bytes())
    url = (tmp_path / "a folder").as_uri()
    for place in (tmp_path / "a folder", str(tmp_path / "a folder") + "/", url, memory, "memory://checkpoint-test"):
        checkpoint = open_checkpoint(place)
        assert same(checkpoint["w"][1:, ::2], value[1:, ::2])
    assert isinstance(memory, MemoryStorage)
    save_file({"w": value}, tmp_path / "a folder" / "x y.safetensors")
    assert same(open_checkpoint((tmp_path / "a folder" / "x y.safetensors").as_uri())["w"][...], value)


def test_a_single_element_of_odd_stride_is_compared_like_any_other(tmp_path):
    """Torch calls it contiguous, and yet refuses to see it as bytes."""
    odd = torch.arange(20.0).as_strided((1,), (7,))
    reshard.save({"w": odd}, tmp_path / "ckpt")

    assert reshard.compare({"w": odd}, tmp_path / "ckpt", by_fingerprint=False).ok
    assert not reshard.compare({"w": odd}, {"w": odd + 1}).ok


def test_ranks_that_open_together_miss_every_file_and_list_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reshard.save({"a": torch.arange(24.0), "b": torch.ones(3)}, tmp_path / "one")
    whole = tmp_path / "many"
    spec = TensorSpec("a", (24,), "float32")
    layout = StateLayout({"a": TensorLayout(spec, Mesh({"dp": 4}), [Shard(0)])}, 4)
    reshard.convert(tmp_path / "one", whole, onto=layout, select="a")
    monkeypatch.setattr(LocalStorage, "list", None)  # what each of many ranks would ask for thousands of files
    ranks = 3
    for place in range(ranks):
        assert same(open_among(whole, place, ranks)["a"][:], torch.arange(24.0))
    for file in whole.glob("data-*/*"):
        kept = file.read_bytes()
        for damage in (lambda file=file: file.write_bytes(kept[:-1]), file.unlink):  # noqa: B023
            damage()
            seen = []
            for place in range(ranks):
                try:
                    open_among(whole, place, ranks)
                except CorruptCheckpointError as error:
                    seen.append(str(error))
            assert len(seen) == 1
            assert file.name in seen[0]
        file.write_bytes(kept)
    victim = whole / next(file.name for file in whole.glob("data-*")) / "00003.safetensors"
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(
        CorruptCheckpointError, match="151 of its 152"
    ):  # it is another rank's to look for, but it is read
        open_among(whole, 0, 4)["a"][:]


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no float4")
def test_float4_is_compared_bit_by_bit_and_has_no_histogram(tmp_path: Path) -> None:
    """torch converts it to no other dtype."""
    raw = torch.arange(6, dtype=torch.uint8)
    reshard.save({"w": raw.view(torch.float4_e2m1fn_x2), "b": torch.ones(2)}, tmp_path)
    same, other = ({"w": (raw % n).view(torch.float4_e2m1fn_x2), "b": torch.ones(2)} for n in (6, 5))

    assert reshard.compare(tmp_path, same, measure=True).ok
    report = reshard.compare(tmp_path, other, measure=True)
    assert "element (5,): 1 of 6 elements differ; the first: 0x5 -> 0x0" in str(report)
    assert (report.measures or {})["w"].odd == 1
    assert "compare without rtol= and atol=" in str(reshard.compare(tmp_path, same, rtol=0.1))
    assert reshard.open(tmp_path).to_html(histograms="*")


def test_a_layout_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    for name in ("layout.json", "rules.txt"):
        (tmp_path / name).write_bytes(b"\xff\xfe")
        with pytest.raises(StorageError, match=f"{name} cannot be read"):
            reshard.plan(tmp_path / name, "fsdp=2")


def test_a_part_is_a_checkpoint_as_well(tmp_path: Path) -> None:
    """Tied tensors keep their first name that is left, and what is not selected is neither compared nor verified."""
    kept = torch.arange(4.0)
    state = {"model": {"a": kept, "tied": kept, "b": torch.ones(2)}, "optim": {"m": torch.zeros(3), "step": 7}}
    reshard.save(state, tmp_path / "saved")
    whole = reshard.open(tmp_path / "saved")
    part = whole.select(["model.*", "!model.a"])
    assert [*whole.select("model.*", "!model.a")] == [*part] == [*whole.select(["model.*"], "!model.a")]
    assert [*whole.select(globs=["model.*", "!model.a"])] == [*part]
    assert (set(part), dict(part.aliases), dict(part.objects)) == ({"model.tied", "model.b"}, {}, {})
    assert torch.equal(part["model.tied"][...], kept)
    assert "as selected or mapped" in str(reshard.verify(part))
    model = {"model": {"tied": kept.clone(), "b": torch.ones(2)}}
    assert reshard.compare(part, model).ok
    model["model"]["b"][1] = 2.0
    assert [found.fqn for found in reshard.compare(part, model).findings] == ["model.b"]
    assert dict(whole.select("optim.step").objects) == {"optim.step": 7}
    assert reshard.load(filled := {"optim": {"m": torch.ones(3), "step": 0}}, whole.select("optim.*")).ok
    assert filled["optim"]["step"] == 7
    with pytest.raises(KeyMismatchError, match=r"no name in .* matches 'modle\.\*'"):
        whole.select("modle.*")
    with pytest.raises(KeyMismatchError, match=r"leave no name"):
        whole.select("!*")
    with pytest.raises(OptionError, match=r"a glob or a list of globs"):
        whole.select(7)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="select is empty"):
        whole.select([])


def values_of_training() -> dict[str, Any]:
    return {
        "array": np.zeros(2),
        "set": {1},
        "bytes": bytearray(b"x"),
        "dict": {"list": [1, np.zeros(1)]},
        "own": reshard.PerRank({"seen": [1], "array": np.zeros(1)}),
        "weight": torch.ones(2),
    }


def test_states_filled_from_one_open_checkpoint_share_nothing(tmp_path: Path) -> None:
    reshard.save(values_of_training(), tmp_path / "saved")
    checkpoint, first, second = reshard.open(tmp_path / "saved"), values_of_training(), values_of_training()
    reshard.load(first, checkpoint)

    first["array"] += 1
    first["set"].add(2)
    first["bytes"] += b"y"
    first["dict"]["list"][1][:] = 9
    first["own"].value["seen"].append(9)
    first["own"].value["array"][:] = 9

    assert reshard.load(second, checkpoint).ok
    assert repr(second) == repr(values_of_training())
    assert reshard.compare(checkpoint, tmp_path / "saved").ok


def test_two_keys_filled_from_one_saved_value_do_not_share_it(tmp_path: Path) -> None:
    reshard.save({"rng": np.arange(4), "weight": torch.ones(1)}, tmp_path / "saved")
    state = {"a": np.zeros(4, dtype=int), "b": np.zeros(4, dtype=int), "weight": torch.ones(1)}

    reshard.load(state, tmp_path / "saved", mapping={"a": "rng", "b": "rng"})

    assert state["a"] is not state["b"]


def test_a_nest_has_its_keys_in_the_order_in_which_they_were_saved(tmp_path):
    """Whether they are tensors or not. Only at the top, and for what is empty, no format records it."""
    inner = {"n": 1, "w": torch.zeros(2), "name": "x", "b": torch.ones(2), "list": [1, torch.zeros(1)]}
    reshard.save({"run": {"step": 3, "model": inner}}, tmp_path)
    nest = reshard.open(tmp_path).nested()
    assert list(nest["run"]) == ["step", "model"]
    assert list(nest["run"]["model"]) == list(inner)
