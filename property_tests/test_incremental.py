"""Saves that write what changed: whatever changes, however the ranks are cut, whichever checkpoints are removed
between, each that is left is what was saved, to the bit."""

from __future__ import annotations

import uuid
from types import SimpleNamespace
from unittest import mock

import torch
from hypothesis import given, settings, strategies as st

import reshard
from planners.errors import PlanError
from planners.geometry.layout import StateLayout, TensorLayout, TensorSpec
from planners.plans.save import plan_writes
from planners.testing.strategies import boxes, layouts, shapes, specs
from property_tests.budget import examples
from reshard.api import save_job
from reshard.api.options import SaveOptions
from reshard.api.save_job import base_at, choose_base, doubtful
from reshard.api.staging import ToWrite
from reshard.live.fingerprints import add_tallies, digests_of, pack_tally
from reshard.native import commit, data_file as blocks, reuse
from reshard.native.commit import Generation
from reshard.native.data_file import Entry
from reshard.ranks.global_state import GlobalState
from reshard.ranks.liveness import release_lease
from reshard.storage import open_storage
from tests.same import bits


def save_by_ranks(state: dict[str, torch.Tensor], layout: StateLayout, path: str) -> int:
    """What the ranks of a layout do in `reshard.save(state, path, base="auto")`, one after another; how many bytes they
    did not write."""
    storage, plan = open_storage(path), plan_writes(layout)
    choice = choose_base(path, "auto", layout, by_print=True)
    base = base_at(path, choice.folder, choice.save_id) if choice.save_id is not None else None
    census, replaces = GlobalState(layout), commit.counting(storage)
    generation = Generation(storage, commit.new_save_id(), commit.begin(), census, plan, None, replaces)
    commit.claim(storage, generation.save_id)
    data = {}
    for rank in range(layout.world_size):
        entries = [Entry(layout[i.fqn].spec, i.box, state[i.fqn][i.box.slices]) for i in plan.items(rank)]
        data[rank] = ToWrite.in_place(entries)
    same: list[str] = []
    if choice.by_print:
        assert base is not None
        data = {rank: one.summed_up() for rank, one in data.items()}
        now = digests_of(add_tallies([pack_tally(one.prints, layout) for one in data.values()]), layout)
        before = base.facts.manifest.fingerprints
        same = [fqn for fqn in doubtful(base, layout, now) if now[fqn] == before[fqn]]
    written, tallies, reused = {}, [], 0
    for rank, one in data.items():
        group = SimpleNamespace(rank=0, ranks=[rank], job_rank=rank, check=lambda: None)
        job = save_job.SaveJob(group, storage, path, generation, SaveOptions(base="auto"), choice, base)  # type: ignore[arg-type]
        written[rank], kept, found = save_job.write(job, one, same)
        tallies.append(pack_tally(found, layout))
        reused += kept
    generation.publish(written, add_tallies(tallies))
    generation.tidy()
    release_lease(generation.save_id)
    return reused


def assert_holds(path: str, state: dict[str, torch.Tensor]) -> None:
    checkpoint = reshard.open(path)
    for fqn, tensor in state.items():
        assert bits(checkpoint[fqn][...]) == bits(tensor), f"{path}: {fqn}"
    report = reshard.verify(path)
    assert report.ok, report


def remove(path: str) -> None:
    """As `rm -rf` does."""
    storage = open_storage(path)
    for name in storage.list():
        storage.delete(name)


def random_tensor(spec: TensorSpec, seed: int) -> torch.Tensor:
    made = torch.randint(0, 2, (spec.numel * spec.itemsize,), dtype=torch.uint8, generator=torch.manual_seed(seed))
    return made.view(getattr(torch, spec.dtype)).reshape(spec.shape)


@settings(max_examples=examples(25))
@given(data=st.data())
def test_every_checkpoint_that_is_left_is_what_was_saved(data: st.DataObject) -> None:
    tensors = [data.draw(specs(f"w{i}", shapes(max_dims=3, max_size=9))) for i in range(data.draw(st.integers(1, 3)))]
    state = {spec.fqn: random_tensor(spec, i) for i, spec in enumerate(tensors)}
    kept: dict[str, dict[str, torch.Tensor]] = {}
    root = f"memory://incremental-{uuid.uuid4().hex}"
    few = data.draw(st.sampled_from([8, 64, 1 << 20]))
    with (
        mock.patch.multiple(blocks, DIGEST_BLOCK_BYTES=few, PROBE_BYTES=1),
        mock.patch.multiple(reuse, PROBE_BYTES=1),
        mock.patch.multiple(reuse, LEAST_LIVE=data.draw(st.sampled_from([0.0, 0.25, 0.9]))),
    ):
        layout = None
        for step in range(data.draw(st.integers(2, 5))):
            if layout is None or data.draw(st.booleans()):
                layout = StateLayout({spec.fqn: data.draw(layouts(spec).filter(_can_be_saved)) for spec in tensors})
            path = f"{root}/step-{data.draw(st.integers(0, 2)) if step else 0}"
            save_by_ranks(state, layout, path)
            kept[path] = {fqn: tensor.clone() for fqn, tensor in state.items()}
            for each, wanted in kept.items():
                assert_holds(each, wanted)
            if len(kept) > 1 and data.draw(st.booleans()):
                gone = data.draw(st.sampled_from(sorted(kept)))
                remove(gone)
                del kept[gone]
            if len(kept) > 1 and data.draw(st.booleans()):
                for name in reshard.prune(root, keep_last=1):
                    del kept[name]
            for spec in tensors:
                if data.draw(st.booleans()):
                    region = data.draw(boxes(spec.shape))
                    state[spec.fqn][region.slices] = random_tensor(spec, step + 7)[region.slices]
    remove(root)


def _can_be_saved(layout: TensorLayout) -> bool:
    """Ranks whose regions overlap without being equal cannot save."""
    try:
        plan_writes(StateLayout({layout.fqn: layout}))
    except PlanError:
        return False
    return True


@settings(max_examples=examples(25))
@given(data=st.data())
def test_what_did_not_change_is_not_written(data: st.DataObject) -> None:
    tensors = [data.draw(specs(f"w{i}", shapes(max_dims=3, max_size=9))) for i in range(2)]
    state = {spec.fqn: random_tensor(spec, i) for i, spec in enumerate(tensors)}
    first, second = (
        StateLayout({spec.fqn: data.draw(layouts(spec).filter(_can_be_saved)) for spec in tensors}) for _ in range(2)
    )
    root = f"memory://incremental-{uuid.uuid4().hex}"
    with mock.patch.multiple(blocks, DIGEST_BLOCK_BYTES=data.draw(st.sampled_from([8, 1 << 20]))):
        save_by_ranks(state, first, f"{root}/step-1")
        assert save_by_ranks(state, second, f"{root}/step-2") == sum(tensor.nbytes for tensor in state.values())
    assert_holds(f"{root}/step-2", state)
    remove(root)


@settings(max_examples=examples(40))
@given(data=st.data())
def test_no_damage_to_a_base_ends_a_save_or_gets_into_it_unseen(data: st.DataObject) -> None:
    tensors = [data.draw(specs(f"w{i}", shapes(max_dims=3, max_size=9))) for i in range(data.draw(st.integers(1, 3)))]
    state = {spec.fqn: random_tensor(spec, i) for i, spec in enumerate(tensors)}
    root = f"memory://incremental-{uuid.uuid4().hex}"
    few = data.draw(st.sampled_from([8, 64, 1 << 20]))
    with (
        mock.patch.multiple(blocks, DIGEST_BLOCK_BYTES=few, PROBE_BYTES=1),
        mock.patch.multiple(reuse, PROBE_BYTES=1, LEAST_LIVE=0.0),
    ):
        for step in range(3):
            layout = StateLayout({spec.fqn: data.draw(layouts(spec).filter(_can_be_saved)) for spec in tensors})
            if step == 2:
                remove(f"{root}/step-0")
                base = open_storage(f"{root}/step-1")
                files = sorted(base.list())  # how many, and how long, depends on times and ids: nothing is drawn by it
                file = files[data.draw(st.integers(0, 1 << 16)) % len(files)]
                was = base.read(file)
                at = data.draw(st.integers(0, 1 << 16)) % max(len(was), 1)
                byte = data.draw(st.integers(0, 255))
                base.publish(file, data.draw(st.sampled_from(_DAMAGES))(was, at, byte))
            save_by_ranks(state, layout, f"{root}/step-{step}")
            changed = data.draw(st.sampled_from(tensors))
            region = data.draw(boxes(changed.shape))
            if step < 2:
                state[changed.fqn][region.slices] = random_tensor(changed, step + 7)[region.slices]
    if is_elements(file, was, at) and not reshard.verify(f"{root}/step-2").ok:
        remove(root)
        return
    assert_holds(f"{root}/step-2", state)
    remove(root)


_DAMAGES = [
    lambda was, at, byte: was[:at] + bytes([byte]) + was[at + 1 :],
    lambda was, at, _: was[:at] + bytes(len(was[at : at + 4096])) + was[at + 4096 :],
    lambda was, at, _: was[:at],
    lambda was, at, byte: was + bytes([byte]),
    lambda *_: b"",
]


def is_elements(file: str, was: bytes, at: int) -> bool:
    """Whether the damage is in the elements, which no save reads."""
    return file.endswith(".safetensors") and at >= 8 + int.from_bytes(was[:8], "little")
