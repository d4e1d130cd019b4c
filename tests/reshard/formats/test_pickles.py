"""The restricted reader: plain data comes out as it was, unknown classes as inert records, and nothing ever runs."""

from __future__ import annotations

import collections
import contextlib
import io
import os
import pickle
import pickletools
import struct
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reshard.errors import CorruptCheckpointError, ReshardError, UnsafeDataError
from reshard.formats.torch_save.pickles import (
    PlainDict,
    StorageRef,
    StorageType,
    TensorRef,
    load_pickle,
    load_pickle_at,
    plain,
)
from reshard.stored.contents import Record, make_record_type


def read(data: bytes) -> Any:
    return load_pickle(data, where="test")


def test_tensors_that_pickle_wrote_are_not_called_damaged() -> None:
    with pytest.raises(UnsafeDataError, match=r"written by pickle\.dump, .*save it with torch\.save or reshard\.save$"):
        read(pickle.dumps({"a": torch.nn.Linear(2, 2)}))


PLAIN = [
    None,
    True,
    0,
    -1,
    2**70,
    1.5,
    float("inf"),
    1 + 2j,
    "text \u00e9 \U0001f600",
    b"bytes \x00\xff",
    bytearray(b"\x00\xff"),
    (),
    (1,),
    [1, [2, (3,)]],
    {"a": {1: None}, (1, 2): "x"},
    {1, 2},
    frozenset({3}),
    slice(1, None, 2),
    range(3, 9, 2),
    torch.float32,
    torch.bfloat16,
    torch.Size([2, 3]),
    timedelta(days=-1, microseconds=5),
    date(2026, 11, 26),
    datetime(2026, 11, 26, 12, fold=1),
    datetime(2026, 11, 26, 12, tzinfo=timezone(timedelta(hours=2))),
]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values(value: Any, protocol: int) -> None:
    """What every protocol writes of plain values comes back equal and of the same type."""
    if isinstance(value, (torch.Size, slice, range)) and protocol < 2:
        return  # those reductions go through copyreg and no checkpoint has them

    result = read(pickle.dumps(value, protocol))

    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_the_version_of_torch_is_text(protocol: int) -> None:
    version = read(pickle.dumps(torch.torch_version.TorchVersion("2.13.0+cpu"), protocol))
    assert type(version) is str
    assert version == "2.13.0+cpu"


def test_ordered_and_default_dicts_are_plain() -> None:
    state = collections.OrderedDict(a=1)
    state._metadata = {"version": 1}  # type: ignore[attr-defined]  # as torch's modules do
    counts = collections.defaultdict(list, x=[1])

    result = read(pickle.dumps([state, counts, collections.Counter("aab")], 2))

    assert result == [{"a": 1}, {"x": [1]}, {"a": 2, "b": 1}]
    assert all(isinstance(part, dict) for part in result)


def test_references_keep_their_identity() -> None:
    shared = [1]

    result = read(pickle.dumps([shared, shared], 4))

    assert result[0] is result[1]


class Config:
    """A class of this test that must not be imported by the reader."""

    def __init__(self) -> None:
        self.rate = 0.5

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("a class of the checkpoint was run")


class Grown(list[int]):
    """A class that the reader does not know, of a kind of list, with attributes."""


class Filled(dict[str, int]):
    """The same, of a kind of dict."""


def test_what_goes_into_a_record_stays_in_that_record() -> None:
    """Elements and items are kept by the record that they were given to, and others have none."""
    grown, filled, empty = read(pickle.dumps([Grown([1, 2]), Filled(a=3), Grown()]))

    assert (list(grown.elements), list(grown.entries)) == ([1, 2], [])
    assert (list(filled.elements), list(filled.entries)) == ([], [("a", 3)])
    assert (list(empty.elements), list(empty.entries), dict(empty.kwargs)) == ([], [], {})


def test_unknown_classes_become_records() -> None:
    record = read(pickle.dumps(Config(), 2))

    assert isinstance(record, Record)
    assert record.name == "Config"
    assert record.fields == {"rate": 0.5}


def test_namespaces_paths_and_numpy_become_plain() -> None:
    import argparse

    value = {
        "args": argparse.Namespace(lr=0.1),
        "io": io.BytesIO(b"state"),
        "path": Path("/a/b"),
        "x": np.arange(6.0).reshape(2, 3),
        "n": np.int16(3),
    }
    result = plain(read(pickle.dumps(value, 4)))

    assert result["args"] == {"lr": 0.1}
    assert result["io"] == b"state"
    assert result["path"] == "/a/b"
    assert np.array_equal(result["x"], value["x"])
    assert result["x"].dtype == value["x"].dtype
    assert (result["n"], type(result["n"])) == (3, np.int16)


class Call:
    """Pickles to a call of `function` with `args`."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.args


def by_name(module: str, name: str, *args: Any, more: bytes = b"") -> bytes:
    """A protocol 2 pickle that calls `module.name`."""
    head = b"\x80\x02c" + module.encode() + b"\n" + name.encode() + b"\n"
    arguments = b"(" + b"".join(b"X" + struct.pack("<I", len(a)) + a.encode() for a in args) + b"t"
    return head + arguments + b"R" + more + b"."


def touch(path: Path) -> str:
    return f"open({str(path)!r}, 'w').write('pwned')"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "pwned"


def attacks(target: Path) -> dict[str, bytes]:
    """Pickles that create `target`, or do other harm, when a reader runs them."""
    code, shell = touch(target), f"touch {target}"
    return {
        "os.system": pickle.dumps(Call(os.system, shell)),
        "posix by name": by_name("posix", "system", shell),
        "subprocess": by_name("subprocess", "getoutput", shell),
        "exec": by_name("builtins", "exec", code),
        "exec of Python 2": by_name("__builtin__", "exec", code),
        "eval": by_name("builtins", "eval", code),
        "import": by_name("builtins", "__import__", "antigravity"),
        "open": by_name("io", "open", str(target), "w"),
        "pathlib": by_name("pathlib", "Path.touch", str(target)),
        "dotted name": b"\x80\x04\x8c\x06reshard\x8c\x0dcheckpoint.os\x93.",
        "getattr": by_name("builtins", "getattr", "os", "system"),
        "getattr of a dotted class": b"\x80\x02c__builtin__\ngetattr\n(c__builtin__\nset\nX\x03\x00\x00\x00popt R.",
        "runpy": by_name("runpy", "run_path", str(target)),
        "pdb": by_name("pdb", "run", code),
        "timeit": by_name("timeit", "timeit", code),
        "code": by_name("code", "interact"),
        "ctypes": by_name("ctypes", "CDLL", "libc.so.6"),
        "pickle in pickle": by_name("pickle", "loads", "x"),
        "torch.load": by_name("torch.serialization", "load", str(target)),
        "torch storage loader": by_name("torch.storage", "_load_from_bytes", "x"),
        "torch extension": by_name("torch.utils.cpp_extension", "load_inline", code),
        "torch jit": by_name("torch.jit", "load", str(target)),
        "numpy runstring": by_name("numpy.testing._private.utils", "runstring", code),
        "third-party": by_name("setuptools.sandbox", "run_setup", str(target)),
        "INST": b"(S'" + shell.encode() + b"'\nios\nsystem\n.",
        "OBJ": b"(cos\nsystem\nS'" + shell.encode() + b"'\no.",
        "EXT1": b"\x80\x02\x82\x01.",
        "PERSID": b"Pabc\n.",
        "NEWOBJ of a function": b"\x80\x02cos\nsystem\n)\x81.",
        "NEWOBJ_EX": b"\x80\x04cos\nsystem\n)}\x92.",
        "call a record": by_name("some.where", "thing", "x", more=b")R"),
        "call a dtype": b"\x80\x02ctorch\nfloat32\n)R.",
        "BUILD on a class": b"\x80\x02csome.where\nthing\nN}X\x08\x00\x00\x00__init__ctorch\nSize\ns\x86b.",
        "BUILD on set": b"\x80\x02c__builtin__\nset\n}X\x03\x00\x00\x00addNsb.",
        "BUILD on a function": b"\x80\x02ccollections\nOrderedDict\nN}X\x05\x00\x00\x00_callctorch\nSize\ns\x86b.",
        "BUILD on a dict": b"\x80\x02ccollections\nOrderedDict\n)R}X\x05\x00\x00\x00itemsNsb.",
        "BUILD on a storage": b"\x80\x02ctorch.storage\nUntypedStorage\n]X\x07\x00\x00\x00float32ab.",
        "huge bytearray": by_name("builtins", "bytearray", more=b"") .replace(b"(t", b"(J\xff\xff\xff\x7ft"),
        "huge memo": b"\x80\x02]r\xff\xff\xff\x7f.",
        "huge text memo": b"(lp99999999999\n.",
        "huge string": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fabc.",
        "deep key": b"\x80\x02})" + b"\x85" * 300_000 + b"K\x00s.",
        "deep member": b"\x80\x04()" + b"\x85" * 300_000 + b"\x91.",
        "deep nest": b"]" * 200_000 + b"a" * 199_999 + b".",
    }  # fmt: skip


INERT = {
    "third-party", "numpy runstring", "BUILD on a dict", "torch.load", "torch extension", "torch jit",
}  # fmt: skip
"""Attacks that leave a record of what they asked for, or plain data; all others are refused."""
NAMES = sorted(attacks(Path("/x")))


@pytest.mark.parametrize("name", NAMES)
def test_attacks_run_nothing(name: str, target: Path) -> None:
    """An attack is refused, or leaves an inert record, and does nothing else."""
    before = dict(os.environ)
    data = attacks(target)[name]

    if name in INERT:
        assert isinstance(plain(read(data)), (Record, dict))
    else:
        with pytest.raises(ReshardError, match=r"test|nested too deeply"):
            plain(read(data))
    assert not target.exists()
    assert dict(os.environ) == before


def test_the_attacks_are_real(target: Path) -> None:
    """The same bytes do harm elsewhere, so that the test above says something."""
    for name in ("os.system", "INST"):
        pickle.loads(attacks(target)[name])
        assert target.exists(), name
        target.unlink()


def test_standard_library_is_refused_by_name() -> None:
    with pytest.raises(UnsafeDataError, match=r"posix\.system.*none of it was run"):
        read(by_name("posix", "system", "true"))


def test_an_attack_changes_nothing_for_later_pickles() -> None:
    """After attempts to tamper with what the reader calls, it still reads."""
    for name in NAMES:
        if "BUILD" in name:
            with pytest.raises(ReshardError) if name != "BUILD on a dict" else contextlib.nullcontext():
                read(attacks(Path("/x"))[name])

    assert read(pickle.dumps(collections.OrderedDict(a={1}), 2)) == {"a": {1}}
    assert StorageType(None) == load_pickle(b"\x80\x02ctorch.storage\nUntypedStorage\n.", where="test")


@pytest.mark.parametrize(
    "value",
    [StorageType("float32"), StorageRef("0", "int8", 4), TensorRef(StorageRef("0", "int8", 4), 0, (4,), (1,), "int8")],
)
def test_validated_values_cannot_be_changed(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be changed"):
        value.__setstate__([1, 2, 3])


def test_records_have_frozen_classes() -> None:
    cls = make_record_type("a.b", "C")
    with pytest.raises(TypeError, match="cannot be changed"):
        cls.path = "x"
    with pytest.raises(TypeError, match="cannot be changed"):
        del cls.path


def test_several_pickles_in_a_row() -> None:
    data = pickle.dumps([1], 2) + pickle.dumps("two", 4) + b"tail"

    first, at = load_pickle_at(data, 0, where="test")
    second, stop = load_pickle_at(memoryview(data), at, where="test")

    assert (first, second, data[stop:]) == ([1], "two", b"tail")


def test_truncated_pickles_are_named() -> None:
    """Every prefix of a pickle is damage, and says so."""
    data = pickle.dumps({"a": [1, 2.5, "text", (None, b"x" * 300)], "b": torch.Size([3])}, 4)
    for stop in range(len(data)):
        with pytest.raises(CorruptCheckpointError, match="test"):
            read(data[:stop])


def test_fuzzed_pickles_give_clear_errors_only() -> None:
    """Any byte changed to any of many values: a value, or one of our errors; no crash, no memory bomb."""
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(2, 3), "n": [1, (2, 3)], "o": collections.OrderedDict(a=1)}, buffer)
    data = read_data_pkl(buffer.getvalue())
    rng = np.random.default_rng(0)
    for _ in range(4000):
        changed = bytearray(data)
        for at in rng.integers(0, len(data), rng.integers(1, 4)):
            changed[at] = rng.integers(256)
        with contextlib.suppress(ReshardError):
            plain(read(bytes(changed)))


def read_data_pkl(archive: bytes) -> bytes:
    import zipfile

    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        return file.read(next(n for n in file.namelist() if n.endswith("data.pkl")))


def test_tensors_become_references() -> None:
    data = read_data_pkl(
        _saved({"w": torch.arange(12.0).reshape(3, 4).T[1:], "z": torch.ones(2, dtype=torch.cfloat).conj()})
    )
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(data)  # a persistent id, which plain pickle cannot follow

    value = read(data)

    assert isinstance(value, PlainDict) or type(value) is dict
    assert (value["w"].size, value["w"].stride, value["w"].offset, value["w"].dtype) == ((3, 3), (1, 4), 1, "float32")
    assert value["z"].conjugate


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_tensors_that_leave_their_storage_are_damage() -> None:
    with pytest.raises(CorruptCheckpointError, match="does not fit"):
        TensorRef(StorageRef("0", "float32", 4), 1, (4,), (1,), "float32")
    with pytest.raises(CorruptCheckpointError, match="cannot be"):
        TensorRef(StorageRef("0", "float32", 4), -1, (4,), (1,), "float32")
    assert TensorRef(StorageRef("0", "float32", 0), 5, (0, 3), (3, 1), "float32").window(0).nbytes == 0


def test_a_container_that_contains_itself_is_damage() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(CorruptCheckpointError, match="contains itself"):
        plain(read(pickle.dumps(loop, 4)))


def test_shared_containers_do_not_blow_up() -> None:
    """A pickle of a few hundred bytes that stands for 2**60 elements is read as what it is: shared."""
    value: list[Any] = [1]
    for _ in range(60):
        value = [value, value]
    result = plain(read(pickle.dumps(value, 4)))
    assert result[0] is result[1]


def test_the_opcode_table_is_complete() -> None:
    """Every opcode of pickle is known to the checker: it is allowed, or forbidden by name."""
    from reshard.formats.torch_save import pickles

    known = set(pickles.COUNTED) | set(pickles.LINES) | set(pickles._FORBIDDEN) | {ord("."), ord("r")}
    for opcode in pickletools.opcodes:
        code = ord(opcode.code)
        if code not in known:
            # a byte alone may need its argument behind it
            assert pickles.RUN.match(bytes([code]) + b"\0" * 8).end() >= 1, opcode.name  # type: ignore[union-attr]


def test_records_that_cannot_be_what_they_say_are_damage_or_stay_records() -> None:
    scalar = make_record_type("numpy._core.multiarray", "scalar")()
    assert plain(scalar) is scalar
    namespace = make_record_type("argparse", "Namespace")()
    for value in ({namespace: 1}, {namespace}, frozenset({namespace})):
        with pytest.raises(CorruptCheckpointError, match="a key of a dict, or a member of a set"):
            plain(value)
