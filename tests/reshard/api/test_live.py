"""Live resharding between running ranks: every pair of a dozen layouts, whole models, views, bad input, failures."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

import reshard
from planners import TensorSpec, View, concat
from reshard.errors import KeyMismatchError, LayoutError
from reshard.live.dtypes import dtype_name
from reshard.mapping import Concat, Drop, Mapping, Rename, Resize, Split
from tests import gloo
from tests.reshard.api import live_jobs
from tests.reshard.api.live_layouts import LAYOUTS
from tests.same import assert_same
from tests.stories import roundtrip_jobs as jobs

pytestmark = pytest.mark.gloo

ALL_PAIRS = list(itertools.product(LAYOUTS, LAYOUTS))


@pytest.mark.not_simulated("hundreds of transfers of eight ranks, which take minutes there")
@pytest.mark.parametrize(("budget", "pairs"), [(1 << 20, ALL_PAIRS), (1024, ALL_PAIRS[::11])], ids=["wide", "tight"])
def test_every_pair_of_layouts_moves_each_needed_byte_once_and_no_bit_changes(budget, pairs):
    ranks = gloo.run(live_jobs.pairs_job, 8, pairs, budget, timeout_s=280)

    by_pair: dict[tuple[str, str], list[dict]] = {}
    for row in itertools.chain(*ranks):
        by_pair.setdefault(row["pair"], []).append(row)
    assert set(by_pair) == set(pairs)
    for pair, rows in by_pair.items():
        for row in rows:
            report = row["report"]
            assert not row["wrong"], pair
            assert not row["changed"], pair
            assert report.bytes_received == row["least"], pair
            assert report.buffer_bytes <= budget, pair
        moved = {row["report"].bytes_moved for row in rows}
        assert moved == {sum(row["least"] for row in rows)} == {sum(row["report"].bytes_sent for row in rows)}, pair


@pytest.mark.parametrize(("before", "after"), [("fsdp_tp", "hsdp"), ("tp", "fsdp"), ("plain", "fsdp_tp")])
def test_a_model_with_its_optimizer_goes_from_one_topology_to_another(before, after):
    known = jobs.train_truth()

    for end in gloo.run(live_jobs.model_job, 4, before, after, known):
        state = end["state"]
        assert state["optim"]["param_groups"][0]["lr"] == 0.123
        assert_same(state["model"], known["model"])
        assert_same(state["optim"]["state"], known["optim"]["state"])
        assert end["report"].missing == end["report"].unexpected == ()


def test_views_fuse_turn_pad_and_repeat_on_the_way():
    ends = gloo.run(live_jobs.views_job, 4)

    for end in ends:
        assert not end["wrong"]
        assert end["findings"] == ["qkv"]
        assert end["report"].bytes_received == end["least"] > 0


def test_a_prepared_transfer_follows_the_values_and_the_memory():
    for steps in gloo.run(live_jobs.replay_job, 4, 4):
        assert all(not step["wrong"] for step in steps)
        assert [step["lr"] for step in steps] == [0.0, 1.0, 2.0, 3.0, 3.0]
        assert [step["planned"] for step in steps] == [True, False, False, False, False]
        assert len({step["sent"] for step in steps}) == 1


def test_casts_names_ties_and_all_kinds_of_tensors():
    for rank, found in enumerate(gloo.run(live_jobs.kinds_job, 3)):
        assert found["narrow"] == (True, {"w": ("float32", "bfloat16")}, 72 - 2 * 3 * (2 + 2 + 0))
        assert found["wide"] == (True, 144 - 4 * 3 * (2 + 2 + 0))
        assert found["tied"] == (True, 36 * 4 - 3 * 4 * 4, ("nest.embed", "nest.head"))
        assert found["from sharded"]
        assert found["to sharded"]
        assert found["meta"]
        assert found["refused meta"]
        assert found["conjugate"]
        assert found["per rank"] == (True, ("w", "seed"))
        assert found["lone"] == (("own",) if rank == 1 else (), ("seed",), [1.0] * 3)
        assert "PerRank" in found["lone error"]
        assert found["odd strides"]
        assert found["partial"] == (True, [1.0, 1.0], ("other",), ("more",))


REFUSED = {
    "ranks disagree about a shape": ("LayoutError", "disagree about the source"),
    "ranks disagree about a placement": ("LayoutError", "placed differently"),
    "other names": ("KeyMismatchError", "missing"),
    "another shape": ("KeyMismatchError", "has shape [8, 5] in the source, but [5, 8] in the target"),
    "another dtype": ("KeyMismatchError", "has dtype float32 in the source, but float64 in the target"),
    "a rank in neither side": ("LayoutError", "no source or target tensors on rank 2"),
    "other options": ("LayoutError", "max_inflight_bytes: 4096 on ranks 0-1, 2048 on rank 2"),
    "an option out of range": ("OptionError", "max_inflight_bytes"),
    "a policy that is not known": ("OptionError", "dtype_policy"),
    "replicas that have drifted": ("ReplicaDriftError", "'w' (ranks 0-1 / rank 2)"),
    "shards that have drifted, on a mesh": ("ReplicaDriftError", "'w' (ranks 0-1 / rank 2)"),
    **{
        f"shards that have drifted, {form}": ("ReplicaDriftError", "replicas of 'w' differ: ranks 0-1 / rank 2. Give")
        for form in ("boxes", "flat")
    },
    "values that differ": ("ReplicaDriftError", "'lr'"),
    "a tensor for a number": ("KeyMismatchError", "is a tensor in the source, but not in the target"),
    "a number for a tensor": ("KeyMismatchError", "is a tensor in the target, but not in the source"),
    "a mapping to nowhere": ("KeyMismatchError", "named by a view or the mapping"),
    "a view of what is not there": ("KeyMismatchError", "is a view of 'u'"),
    "a source without memory": ("LayoutError", "meta"),
    "memory that is shared": ("LayoutError", "shares memory with the source"),
    "a layout that is not so": ("LayoutError", "but it passed [3, 3]"),
    "a hole": ("LayoutError", "does not contain every element of the target"),
    "memory that ties two sources": ("KeyMismatchError", "map both to the same source"),
}


def test_bad_input_is_an_error_on_all_ranks_and_nothing_moves():
    for found in gloo.run(live_jobs.refusals_job, 3):
        for name, (kind, words) in REFUSED.items():
            error, message, kept, seconds = found[name]
            assert error == kind, (name, error, message)
            assert words in message, (name, message)
            assert kept, name
            assert seconds < 15, name


def test_what_fingerprints_cannot_compare_is_refused_before_anything_moves():
    for rank, found in enumerate(gloo.run(live_jobs.uncounted_job, 2)):
        for name, (words, untouched, moved) in found.items():
            said = "does not have all elements" if name == "part" else "has some elements in several places"
            assert len(words) == 2
            assert all(said in word for word in words), name
            assert untouched, name
            wanted = range(10) if "source" in name else range(6) if rank == 0 else range(4, 10)
            assert moved == list(wanted) * (name != "part" or rank == 0), name


@pytest.mark.not_simulated("its streams block the host in a receive, so that nobody looks whether others failed")
def test_a_rank_that_fails_midway_ends_it_on_all_and_the_targets_are_named():
    for end in gloo.run(live_jobs.failure_job, 4, "raises"):
        assert end["type"] == "UndefinedTargetsError"
        assert end["rank"] == 1
        assert end["targets"] == ("w", "x")
        assert "targets are undefined: w, x" in end["message"]
        assert end["seconds"] < 10


@pytest.mark.not_simulated("its streams block the host in a receive, so that nobody looks whether others failed")
def test_what_a_failed_transfer_left_in_flight_does_not_reach_the_next_one():
    assert gloo.run(live_jobs.again_job, 3) == [("UndefinedTargetsError", True)] * 3


@pytest.mark.not_simulated("its streams block the host in a receive, so that nobody looks whether others failed")
@pytest.mark.parametrize("how", ["first", "last", "delta"])
def test_after_a_failed_transfer_the_jobs_own_collectives_are_in_step_and_nothing_runs_out_of_time(how):
    assert gloo.run(live_jobs.collectives_job, 3, how) == [("UndefinedTargetsError", [3, 33, 63])] * 3


@pytest.mark.not_simulated("its streams block the host in a receive, so that nobody looks whether others failed")
@pytest.mark.parametrize("late", [1, 2])
@pytest.mark.parametrize(("dim", "sums"), [(1, "3"), (0, "refused")], ids=["into a buffer", "into the target"])
def test_a_message_that_comes_late_blocks_none_after_it_and_changes_no_target(dim, sums, late):
    if "RESHARD_TESTS_ON_DEVICE" in os.environ:
        sums = "3"  # gloo receives for a device in the host's memory, never in the target
    ends = gloo.run(live_jobs.late_job, 3, dim, late)
    assert [(said, found) for said, _, found in ends] == [("UndefinedTargetsError", sums)] * 3
    assert ends[0][1]


@pytest.mark.not_simulated("its streams block the host in a receive, so that nobody looks whether others failed")
@pytest.mark.parametrize("how", ["dies", "is dead", "is dead, delta"])
def test_a_rank_that_dies_midway_ends_it_on_all_others(how):
    ends = gloo.outcomes(live_jobs.failure_job, 4, how, store="parent", linger_s=30)

    assert ends[1].exitcode == 3
    for end in (ends[0], ends[2], ends[3]):
        assert end.value["type"] == "UndefinedTargetsError"
        assert end.value["rank"] == 1
        assert end.value["seconds"] < 15


def test_a_state_has_the_same_fingerprints_in_every_layout_and_what_differs_is_named():
    """Resumed state that is not bit-equal shows where; replicas that drifted apart are found before they are moved."""
    for found in gloo.run(live_jobs.flight_job, 4):
        assert len(found["same"]) == 24
        assert all(found["same"])
        ((key, message),) = found["swap"]
        assert key == "w"
        assert message.startswith("differs from its source: it has the fingerprint rf1:")
        kind, words = found["drift"]
        assert kind == "ReplicaDriftError"
        assert "b: ranks 0, 2-3 vs. rank 1" in words


@pytest.mark.not_simulated("its streams block the host in a receive, so that nobody looks whether others failed")
def test_a_rank_that_hangs_ends_the_transfer_of_the_others_at_the_deadline():
    ends = gloo.run(live_jobs.hang_job, 3, 3.0)

    for end in (ends[0], ends[2]):
        assert end.startswith("UndefinedTargetsError from ")
        assert "rank 1" in end
        assert "within 3 s" in end


@pytest.mark.not_simulated("its ranks meet by the device's own collectives")
def test_who_waits_for_a_message_names_its_sender_where_others_have_gone_on_and_ended():
    ends = gloo.run(live_jobs.lost_message_job, 4, 3.0)

    assert ends[0] == ends[2] == ""
    assert "rank 0 is gone. Before that, the last message of rank 2 was not delivered within 3 s" in ends[1]
    assert "rank 0 is gone. Before that, the last message of rank 1 was not delivered within 3 s" in ends[3]


def test_without_a_process_group_a_single_process_moves_its_own():
    spec = {n: TensorSpec(n, (rows, 4), "float32") for n, rows in (("q", 4), ("k", 2))}
    source = {n: torch.randn(s.shape) for n, s in spec.items()} | {"step": 7}
    fused = concat("qk", [View.of(spec["q"]), View.of(spec["k"])])
    target = {"qk": torch.zeros(6, 4), "step": 0}

    report = reshard.redistribute(source, target, views=[fused], check=True)

    assert torch.equal(target["qk"], torch.cat([source["q"], source["k"]]))
    assert target["step"] == 7
    assert (report.bytes_moved, report.bytes_copied, report.rounds) == (0, 96, 0)


def test_of_what_a_mapping_makes_nothing_is_left_behind_unsaid():
    """As in a load: names are those that the mapping makes, of which what is dropped is none."""
    halves = Mapping([Split("w", ["a", "b"], (1, 1))])
    source = {"w": torch.arange(4.0)}
    target = {"a": torch.zeros(2)}
    with pytest.raises(KeyMismatchError, match=r"1 unexpected: not in the target of any rank:\n    b\n"):
        reshard.redistribute(source, target, mapping=halves)
    assert reshard.redistribute(source, target, mapping=halves, strict=False).unexpected == ("b",)
    assert target["a"].tolist() == [0, 1]

    rules = Mapping([Drop("w"), Resize("none", "rows", 0, 2)])
    target = {"rows": torch.ones(2, 3), "empty": torch.ones(0, 3)}
    source |= {"none": torch.ones(0, 3), "empty": torch.ones(0, 3)}
    assert not reshard.redistribute(source, target, mapping=rules).unexpected
    assert not target["rows"].any()


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_one_of_several_values_is_not_taken_for_all(kind, strict):
    """A load compares the steps of what it fuses."""
    rules = Mapping([Concat(["q", "k"], "qk")])
    states = {n: {"step": kind(at), "exp_avg": torch.ones(2, 2)} for at, n in enumerate("qk")}
    source = {"optim": {"state": states}}
    target = {"optim": {"state": {"qk": {"step": kind(7), "exp_avg": torch.zeros(4, 2)}}}}

    with pytest.raises(KeyMismatchError, match=r"optim.state.qk.step: several source values map to this key"):
        reshard.redistribute(source, target, mapping=rules, strict=strict)

    del target["optim"]["state"]["qk"]["step"]
    reshard.redistribute(source, target, mapping=rules, strict=False)
    assert target["optim"]["state"]["qk"]["exp_avg"].all()


@pytest.mark.parametrize("by_rules", [True, False])
def test_param_groups_that_list_renamed_parameters_are_refused(by_rules):
    def state(name, start):
        groups = [{"lr": float(start), "params": [name, "kept"]}]
        model = {name: torch.full((2,), start), "kept": torch.full((2,), start)}
        return {"model": model, "optim": {"param_groups": groups, "state": {"kept": {"step": start}}}}

    names = {"model.new.w": "model.old.w"}
    mapping = Mapping([Rename("old.w", "new.w")]) if by_rules else names
    source, target = state("old.w", 1), state("new.w", 2)
    with pytest.raises(KeyMismatchError, match=r"the param groups in 'optim' list: 1 \('old\.w'\)\. Leave"):
        reshard.redistribute(source, target, mapping=mapping)
    assert target["model"]["new.w"].tolist() == [2, 2]
    assert target["optim"]["state"]["kept"]["step"] == 2
    for side in (source, target):
        del side["optim"]["param_groups"]
    reshard.redistribute(source, target, mapping=mapping)
    assert target["model"]["new.w"].tolist() == [1, 1]


def test_a_rank_may_have_values_of_its_own_alone():
    target = {"rng": reshard.PerRank(0)}
    assert reshard.redistribute({"rng": reshard.PerRank(5)}, target).moved == ("rng",)
    assert target["rng"].value == 5


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.int8, 1000),
        (torch.int32, 2.5),
        (torch.int32, float("nan")),
        (torch.bool, 7),
        (torch.float16, 1e6),
        (torch.float8_e4m3fn, 1e9),
        (torch.float8_e4m3fn, float("inf")),
    ],
)
def test_a_constant_that_the_dtype_cannot_hold_is_refused_before_anything_moves(dtype, value):
    spec = TensorSpec("a", (2,), dtype_name(dtype))
    target = {"a": torch.zeros(2, dtype=dtype), "v": torch.zeros(3, dtype=dtype)}
    padded = View.of(spec).pad([(0, 1)], value=value).rename("v")
    with pytest.raises(KeyMismatchError, match=r"v: is filled with .*, which \w+ cannot hold"):
        reshard.redistribute({"a": torch.ones(2).to(dtype)}, target, views=[padded, View.of(spec)])
    assert not target["a"].float().any()


@pytest.mark.parametrize(
    ("dtype", "value", "held"),
    [
        (torch.bool, 1, 1),
        (torch.int8, -128, -128),
        (torch.bfloat16, 0.1, 0.10009765625),
        (torch.float8_e5m2, float("inf"), float("inf")),
        (torch.complex64, 2.5, 2.5),
    ],
)
def test_a_constant_is_rounded_to_floats(dtype, value, held):
    target = {"v": torch.zeros(3, dtype=dtype), "a": torch.zeros(1)}
    full = View.full(TensorSpec("v", (3,), dtype_name(dtype)), value)
    reshard.redistribute({"a": torch.ones(1)}, target, views=[full])
    assert target["v"].tolist() == [held] * 3


@pytest.mark.parametrize("seen", [torch.conj, torch._neg_view])
def test_a_tensor_seen_otherwise_is_not_its_own_source(seen):
    z = torch.tensor([1 + 2j, 3])
    with pytest.raises(LayoutError, match="shares memory with the source"):
        reshard.redistribute({"a": z}, {"a": seen(z)})
    assert z.tolist() == [1 + 2j, 3]
    reshard.redistribute({"a": seen(z)}, {"a": seen(z)})


def test_each_ranks_own_values_are_missed_like_all_others():
    def states(**of):
        sides = [{"w": torch.ones(2)}, {"w": torch.zeros(2)}]
        for side, value in zip(sides, of.values()):
            side |= value
        return sides

    own = reshard.PerRank(torch.ones(2))
    for source, target in ({"x": own}, {}), ({}, {"x": own}), ({"x": own}, {"x": 1}), ({"x": 1}, {"x": own}):
        sides = states(source=source, target=target)
        with pytest.raises(KeyMismatchError, match=r"PerRank|on all ranks|of any rank"):
            reshard.redistribute(*sides)
        report = reshard.redistribute(*sides, strict=False)
        assert (report.missing, report.unexpected) == (("x",) * bool(target), ("x",) * bool(source))
        assert sides[1].get("x") is target.get("x")  # as it was

    source, target = states(source={"x": own}, target={"x": reshard.PerRank()})
    assert reshard.redistribute(source, target).moved == ("w", "x")
    own.value.add_(1)  # training goes on
    assert target["x"].value.tolist() == [1, 1]
