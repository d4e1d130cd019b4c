"""Casts that destroy elements are refused, or counted and reported."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor

import reshard
from reshard import dcp
from reshard.errors import KeyMismatchError, NormalizationError
from reshard.live.dtypes import BY_NAME, overflowing
from reshard.mapping import Cast, Mapping
from tests import gloo

INF, NAN = float("inf"), float("nan")
W = torch.tensor([[1e5, 300.0], [-1e30, INF], [NAN, 1.0]])


@pytest.mark.parametrize(
    ("values", "old", "new", "count"),
    [
        ([1e5, 65504.0, -7e4, INF, NAN], "float32", "float16", 2),
        ([70000.0, 65536.0, 65280.0], "bfloat16", "float16", 2),
        ([3.4e38, -3.4e38, 3.38e38], "float32", "bfloat16", 2),
        ([449.0, 448.0, -INF, NAN], "float32", "float8_e4m3fn", 2),
        ([INF, -INF, NAN, 1.0], "float32", "float8_e4m3fn", 2),
        ([512.0, 448.0, INF], "float8_e5m2", "float8_e4m3fn", 2),
        ([INF, 57344.0], "float8_e5m2", "float8_e5m2fnuz", 1),
        ([241.0, -INF], "float64", "float8_e4m3fnuz", 2),
        ([INF, -INF], "float64", "float8_e5m2", 0),
        ([1e39, 1e38], "float64", "float32", 1),
        ([2**31, 2**31 - 1, -(2**31), -(2**31) - 1], "int64", "int32", 2),
        ([-1, 0, 300], "int16", "uint8", 2),
        ([-1, 5], "int8", "uint64", 1),
        ([2**63, 2**64 - 1, 2**63 - 1], "uint64", "int64", 2),
        ([2**64 - 1, 7, 70000], "uint64", "float16", 2),
        ([40000, 7], "uint16", "int16", 1),
        ([2**31, 7], "uint32", "int32", 1),
        ([65505, 7], "int64", "float16", 1),
        ([2, 1, 0], "int64", "bool", 1),
        ([1e300 + 1j, 1 - 1e300j, 1 + 1j, 1e300 + 1e300j], "complex128", "complex64", 3),
        ([1e38, -1e38], "float16", "float64", 0),
        ([2**40], "int64", "float32", 0),
        ([], "float32", "float16", 0),
    ],
)
def test_elements_beyond_the_range_of_a_dtype_are_counted(values: list[Any], old: str, new: str, count: int) -> None:
    elements = torch.tensor(values, dtype=BY_NAME[old])
    strided = torch.stack((elements, elements), dim=-1)[..., 0]
    assert overflowing(elements, BY_NAME[new]) == count
    assert overflowing(strided, BY_NAME[new]) == count
    if elements.is_complex():
        assert overflowing(elements.conj(), BY_NAME[new]) == count


def test_what_is_counted_is_what_torch_changes() -> None:
    names = [name for name in BY_NAME if not name.endswith(("_x2", "e8m0fnu", "bool")) and "complex" not in name]
    for old in (BY_NAME[name] for name in names):
        limits = (torch.finfo if old.is_floating_point else torch.iinfo)(old)
        extremes = torch.tensor([limits.max, limits.min, 1], dtype=old)
        if old.is_floating_point:
            extremes = torch.cat((extremes, torch.tensor([INF, -INF, NAN]).to(old)))
        before = extremes.to(torch.float64)
        for new in (BY_NAME[name] for name in names if old.is_floating_point <= ("float" in name)):
            became = extremes.to(new).to(torch.float64)
            off = before.isfinite() & ((became - before).abs() > before.abs() * 0.1)
            changed = off | (before.isfinite() & ~became.isfinite()) | (before.isinf() & (became != before))
            assert overflowing(extremes, new) >= int(changed.sum()), (old, new)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_load_reports_what_overflows(threads: int, tmp_path: Path, caplog: Any) -> None:
    reshard.save({"w": W, "i": torch.tensor([2**40, 3]), "v": torch.ones(2), "n": torch.tensor(1e5)}, tmp_path)
    target = {
        "n": torch.tensor(0.0).half(),
        "w": W.half(),
        "i": torch.zeros(2, dtype=torch.int32),
        "v": torch.zeros(2).half(),
    }
    assert reshard.load(target, tmp_path, dtype_policy="cast", dry_run=True).ok

    report = reshard.load(target, tmp_path, dtype_policy="cast", threads=threads, memory_budget_bytes=128 << 10)

    assert (report.ok, report.overflowed) == (False, {"n": 1, "w": 2, "i": 1})
    said = "1 element of 'n', 2 elements of 'w' do not fit into float16; 1 element of 'i' does not fit into int32"
    assert said in repr(report)
    assert f"{tmp_path} was loaded, but the report is not ok: {said}" in caplog.text
    wide = {
        "n": torch.tensor(0.0).bfloat16(),
        "w": W.double(),
        "i": torch.zeros(2).long(),
        "v": torch.zeros(2).bfloat16(),
    }
    report = reshard.load(wide, tmp_path, dtype_policy="cast")
    assert (report.ok, report.overflowed) == (True, {})


def test_a_load_that_only_reads_a_part_reports_that_part(tmp_path: Path) -> None:
    reshard.save({"w": W, "v": W.clone()}, tmp_path)
    report = reshard.load({"w": W.half()}, tmp_path, strict="subset", dtype_policy="cast")
    assert report.overflowed == {"w": 2}


def test_a_load_through_a_mapping_reports_what_overflows_on_its_way(tmp_path: Path) -> None:
    reshard.save({"w": W}, tmp_path)
    mapping = Mapping([Cast("w", "float16")])
    report = reshard.load({"w": W.half()}, tmp_path, mapping=mapping)
    assert (report.ok, report.overflowed) == (False, {"w": 2})
    assert "2 elements of 'w' do not fit into a dtype of the mapping" in repr(report)
    mapped = mapping.apply(reshard.open(tmp_path))
    assert mapped["w"][...].isinf().any()
    for _ in range(2):  # what was read before does not count
        assert reshard.load({"w": W.half()}, mapped).overflowed == {"w": 2}
    with pytest.raises(NormalizationError, match="a cast would drop fractions"):
        Mapping([Cast("w", "int8")]).apply(reshard.open(tmp_path))["w"]


@pytest.mark.parametrize("new", [torch.int8, torch.bool])
def test_casts_that_drop_fractions_are_refused(new: torch.dtype, tmp_path: Path) -> None:
    reshard.save({"w": W, "c": W.to(torch.complex64)}, tmp_path / "c")
    for key, zeros in ("w", W.to(new)), ("c", torch.zeros_like(W)):
        with pytest.raises(KeyMismatchError, match=rf"{key}: saved as .* \(a cast would drop fractions or") as caught:
            reshard.load({key: zeros}, tmp_path / "c", dtype_policy="cast", strict="subset")
        assert "'cast'" not in str(caught.value)
    with pytest.raises(KeyMismatchError, match=r"w: has dtype float32 .*a cast would drop fractions") as caught:
        reshard.redistribute({"w": W}, {"w": W.to(new)}, dtype_policy="cast")
    assert "'cast'" not in str(caught.value)


def test_the_engine_casts_as_torch_does(tmp_path: Path) -> None:
    dcp.save({"w": torch.tensor([1.0, 2.5])}, checkpoint_id=str(tmp_path), no_dist=True)
    target = {"w": torch.zeros(2, dtype=torch.int64)}
    dcp.load(target, checkpoint_id=str(tmp_path), no_dist=True)
    assert target["w"].tolist() == [1, 2]


@pytest.mark.parametrize("options", [{}, {"workers": 2, "max_shard_bytes": 8}, {"onto": "fsdp=2"}], ids=str)
def test_a_conversion_reports_what_overflows(options: Any, tmp_path: Path, caplog: Any) -> None:
    reshard.save({"w": W, "n": torch.tensor([2**40]), "v": W.clone()}, tmp_path / "in")
    with caplog.at_level(logging.WARNING):
        report = reshard.convert(tmp_path / "in", tmp_path / "out", dtype="float16", **options)
    assert report.overflowed == {"w": 2, "v": 2}
    assert report.warnings == ("2 elements of 'v', 2 elements of 'w' do not fit into float16",)
    assert report.warnings[0] in repr(report)
    assert report.warnings[0] in caplog.text
    report = reshard.convert(tmp_path / "in", tmp_path / "out", dtype="bfloat16", overwrite=True)
    assert (report.overflowed, report.warnings) == ({}, ())


def test_a_conversion_reports_what_an_earlier_cast_lost(tmp_path: Path) -> None:
    reshard.save({"w": W}, tmp_path / "in")
    mapping = Mapping([Cast("w", "float16")]) | Mapping([Cast("w", "float32")])
    assert reshard.convert(tmp_path / "in", tmp_path / "out", mapping=mapping).overflowed == {"w": 2}


def test_setting_a_model_reports_what_overflows() -> None:
    model = torch.nn.Linear(2, 3, bias=False).half()
    (cast,) = reshard.set_model_state_dict(model, {"weight": W}).cast
    assert (cast.overflowed, str(cast)) == (2, "weight: float32 -> float16, 2 elements out of range")


def across_ranks(path: str) -> list[Any]:
    mesh = DeviceMesh("cpu", [0, 1])
    rows, whole = ([[place]] for place in (Shard(0), Replicate()))
    big = torch.tensor([[1e5, 1.0], [2e5, 3e5]])
    state = {"w": distribute_tensor(big, mesh, *rows)}
    reshard.save(state, path)

    def target(placements: Any, dtype: torch.dtype = torch.float16) -> Any:
        return {"w": distribute_tensor(torch.zeros(2, 2, dtype=dtype), mesh, placements)}

    out: list[Any] = []
    for placements in (*rows, *whole):
        for once in ("rank", "host", "job"):
            report = reshard.load(target(placements), path, dtype_policy="cast", read_once=once)  # type: ignore[arg-type]
            out.append((report.overflowed, report.ok))
        out.append(reshard.redistribute(state, target(placements), dtype_policy="cast").overflowed)
    prepared = reshard.prepare(state, target(*rows), dtype_policy="cast", delta=True)
    out.append(prepared.run().overflowed)
    state["w"].to_local().fill_(1)
    out.append(prepared.run().overflowed)
    model = torch.nn.Linear(2, 2, bias=False).half()
    model.weight = torch.nn.Parameter(target(*rows)["w"])
    (cast,) = reshard.set_model_state_dict(model, {"weight": distribute_tensor(big, mesh, *rows)}).cast
    out.append(cast.overflowed)
    return out


@pytest.mark.gloo
def test_ranks_report_what_overflows(tmp_path: Path) -> None:
    for rank, found in enumerate(gloo.run(across_ranks, 2, str(tmp_path / "c"))):
        mine, every = {"w": 1 + rank}, {"w": 3}
        loads = [
            (mine, False),
            (mine, False),
            (every, False),
            mine,
            (every, False),
            (every, False),
            (every, False),
            mine,
        ]
        assert found == [*loads, mine, {}, 1 + rank]


def test_a_source_with_other_memory_is_counted_there() -> None:
    source, target = {"w": W.clone()}, {"w": W.half()}
    prepared = reshard.prepare(source, target, dtype_policy="cast")
    assert prepared.run().overflowed == {"w": 2}
    source["w"].data = torch.ones_like(W)
    assert prepared.run().overflowed == {}
    assert "fit into" not in repr(prepared.run())
