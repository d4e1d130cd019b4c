"""`Mesh`: ranks arranged along named axes."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from planners import Mesh, PlanError, fsdp

GRID = Mesh({"pp": 2, "dp": 3, "tp": 2})


def test_ranks_are_row_major():
    assert GRID.shape == (2, 3, 2)
    assert GRID.names == ("pp", "dp", "tp")
    assert [GRID.rank_at(GRID.coordinate(rank)) for rank in range(12)] == list(range(12))
    assert GRID.rank_at((1, 2, 0)) == 10
    assert 11 in GRID
    assert 12 not in GRID
    assert "0" not in GRID


def test_a_mesh_may_hold_any_distinct_ranks():
    stage = Mesh({"dp": 2, "tp": 2}, [5, 4, 9, 8])

    assert stage.rank_at((1, 0)) == 9
    assert stage.coordinate(8) == (1, 1)
    assert stage.world_size == 10
    assert stage.has_explicit_ranks
    assert 6 not in stage
    assert stage.positions(np.array([8, 5])).tolist() == [3, 0]
    assert not Mesh({"dp": 3}, [0, 1, 2]).has_explicit_ranks
    assert Mesh({"dp": 3}, [0, 1, 2]) == Mesh({"dp": 3})


def test_the_mesh_of_no_axes_is_one_rank():
    alone = Mesh({})

    assert (alone.size, alone.world_size, alone.coordinate(0), str(alone)) == (1, 1, (), "")
    assert Mesh.parse("") == alone


@pytest.mark.parametrize("text", ["dp=4,tp=2", "dp=2@6,7", "dp_shard.ep=3", ""])
def test_text_is_read_and_written(text):
    assert str(Mesh.parse(text)) == text
    assert Mesh.parse(str(Mesh.parse(text))) == Mesh.parse(text)
    assert pickle.loads(pickle.dumps(Mesh.parse(text))) == Mesh.parse(text)


@pytest.mark.parametrize("name", ["data parallel", "1d", "", "dp,tp", "dp=2,tp", "dp@x", "ärger", "größe", "dp.cp-1"])
def test_names_that_texts_cannot_hold_are_changed(name):
    """torch takes any name for a dim of a device mesh, and a save writes the mesh as text."""
    assert Mesh.parse(str(Mesh({name: 2}))) == Mesh({name: 2})


def test_submeshes_keep_the_order_asked_for():
    assert GRID.submesh("dp", at={"pp": 1, "tp": 1}).ranks.tolist() == [7, 9, 11]
    assert GRID.submesh("tp", "dp").ranks.tolist() == [0, 2, 4, 1, 3, 5]
    assert GRID.submesh("tp", "dp").axes == (("tp", 2), ("dp", 3))
    assert GRID.submesh("pp", "dp", "tp") == GRID


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mesh([("a", 2), ("a", 3)]), "the same name"),
        (lambda: Mesh({"a": 0}), "size >= 1, got 0"),
        (lambda: Mesh(4), r"needs axes with sizes, such as Mesh\(\{'dp': 4\}\), got 4$"),
        (lambda: Mesh("dp=4"), "needs axes with sizes, .* got 'dp=4'"),
        (lambda: Mesh({"dp": "2"}), r"needs axes with sizes, .* got \{'dp': '2'\}"),
        (lambda: fsdp("8"), "needs axes with sizes, .* got .*'8'"),
        (lambda: fsdp(8.0), "needs axes with sizes, .* got .*8.0"),
        (lambda: Mesh({"a": 2}, [1]), "has 2 ranks, but 1 were given"),
        (lambda: Mesh({"a": 2}, [1, 1]), "must be distinct"),
        (lambda: Mesh({"a": 2}, [-1, 1]), "must be distinct and >= 0"),
        (lambda: Mesh({"a": 2}, [0.5, 1.5]), r"must be integers below 2\*\*31, got \[0.5, 1.5\]"),
        (lambda: Mesh({"a": 2}, "ab"), "must be integers"),
        (lambda: Mesh.parse("dp:4"), "cannot read 'dp:4'"),
        (lambda: Mesh.parse("dp=4,"), "cannot read ''"),
        (lambda: Mesh.parse("dp=2@a,b"), "cannot read the ranks"),
        (lambda: GRID.coordinate(12), r"does not hold this rank \(rank 12\)"),
        (lambda: GRID.rank_at((0, 3, 0)), "is not a coordinate"),
        (lambda: GRID.rank_at((0, 0)), "is not a coordinate"),
        (lambda: GRID.submesh("cp"), "no axis 'cp'"),
        (lambda: GRID.submesh("dp", at={"pp": 2}), "outside the mesh"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(PlanError, match=message):
        make()


def test_ranks_cannot_be_written_to():
    with pytest.raises(ValueError, match="read-only"):
        GRID.ranks[0] = 1


@pytest.mark.parametrize(
    "text", ["dp=99999999999999999999", "dp=1@99999999999999999999", f"dp=1@{2**31}", "dp=100000000"]
)
def test_absurd_numbers_of_ranks_are_refused(text):
    with pytest.raises(PlanError, match=r"2\*\*31|at most 16,777,216 ranks"):
        Mesh.parse(text)
