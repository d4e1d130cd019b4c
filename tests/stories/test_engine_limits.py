"""What the engine takes: memory, time, threads; and what it says of subsets and of its progress."""

from __future__ import annotations

import gc
import logging
import threading
import time

import pytest
import torch

import reshard
from planners.geometry.box import Box
from planners.geometry.layout import StateLayout, TensorLayout, TensorSpec
from planners.geometry.mesh import Mesh, Shard
from planners.plans.codec import to_json
from reshard.errors import KeyMismatchError, OptionError, StorageError
from reshard.native import manifest as native
from reshard.native.reader import open as open_native
from reshard.ranks.progress import listening
from reshard.storage import open_storage
from reshard.storage.memory import MemoryStorage
from reshard.stored.source import Files
from tests import traced
from tests.faulty import Faulty
from tests.storages import Remote

MIB = 1 << 20


def peak_bytes(work) -> int:
    """The most that numpy and Python had at once while `work` ran, beyond what they had before.

    It runs twice and is measured the second time: what is imported and kept at first use, which depends on the tests
    that ran before, is no memory of a save or load.
    """
    work()
    gc.collect()
    with traced.peak() as peak:
        work()
    return peak.nbytes


class TestMemory:
    budget = 2 * MIB

    @pytest.fixture(scope="class")
    @classmethod
    def path(cls, tmp_path_factory):
        path = tmp_path_factory.mktemp("memory") / "c"
        reshard.save({"w": torch.arange(8 * MIB, dtype=torch.float32).reshape(2048, 4096)}, path)
        return path

    @pytest.mark.host_only("devices take pinned memory")
    def test_a_load_into_place_takes_next_to_nothing(self, path):
        target = {"w": torch.zeros(2048, 4096)}

        assert peak_bytes(lambda: reshard.load(target, path, check=False)) < MIB
        assert target["w"][-1, -1] == 8 * MIB - 1

    @pytest.mark.parametrize("threads", [1, 4])
    def test_a_cast_stays_within_the_budget(self, path, threads):
        target = {"w": torch.zeros(2048, 4096, dtype=torch.float64)}

        peak = peak_bytes(
            lambda: reshard.load(
                target, path, dtype_policy="cast", threads=threads, memory_budget_bytes=self.budget, check=False
            )
        )

        assert peak < self.budget + MIB
        assert torch.equal(target["w"], torch.arange(8 * MIB, dtype=torch.float64).reshape(2048, 4096))

    @pytest.mark.parametrize(("budget", "check"), [(2 * MIB, False), (MIB, True)])
    def test_a_storage_without_views_stays_within_the_budget(self, path, budget, check):
        target = {"w": torch.zeros(4096, 2048).t()}
        storage = Remote(path)

        peak = peak_bytes(lambda: reshard.load(target, storage, threads=2, memory_budget_bytes=budget, check=check))

        assert peak < budget + MIB  # what a simulated device is asked counts, too, until it is done
        assert torch.equal(target["w"], torch.arange(8 * MIB, dtype=torch.float32).reshape(2048, 4096))

    def test_a_save_of_what_is_strided_stays_within_the_budget(self, tmp_path):
        strided = torch.arange(8 * MIB, dtype=torch.float32).reshape(2048, 4096).t()

        peak = peak_bytes(
            lambda: reshard.save(
                {"w": strided},
                tmp_path / "c",
                memory_budget_bytes=self.budget,
                fingerprints=False,
                check_replicas=False,
            )
        )

        assert peak < self.budget + MIB
        assert torch.equal(reshard.open(tmp_path / "c")["w"][...], strided)

    def test_a_single_huge_row_is_staged_in_pieces_too(self, tmp_path):
        row = torch.arange(4 * MIB, dtype=torch.float32)[::2].reshape(1, 2 * MIB)

        peak = peak_bytes(
            lambda: reshard.save({"w": row}, tmp_path / "c", memory_budget_bytes=self.budget, fingerprints=False)
        )

        assert peak < self.budget + MIB
        assert torch.equal(reshard.open(tmp_path / "c")["w"][...], row)

    def test_budgets_that_are_too_small_are_refused(self, path, tmp_path):
        with pytest.raises(OptionError, match="at least 131072"):
            reshard.load({"w": torch.zeros(2048, 4096)}, path, memory_budget_bytes=1000)
        with pytest.raises(OptionError, match="memory_budget_bytes"):
            reshard.save({"w": torch.zeros(1)}, tmp_path / "c", memory_budget_bytes=0)


class TestSubset:
    @pytest.fixture
    def state(self):
        return {"model": {"w": torch.ones(3), "b": torch.ones(2)}, "optim": {"m": torch.ones(3), "lr": 0.1, "none": {}}}

    def blank(self):
        return {
            "model": {"w": torch.zeros(3), "b": torch.zeros(2)},
            "optim": {"m": torch.zeros(3), "lr": 0.0, "none": {}},
        }

    def test_only_what_was_selected_is_saved_and_declared(self, state, tmp_path):
        report = reshard.save(state, tmp_path, select=["model.*", "*.lr"])

        assert report.select == ("model.*", "*.lr")
        assert "select=['model.*', '*.lr']" in repr(report)
        checkpoint = reshard.open(tmp_path)
        assert set(checkpoint) == {"model.w", "model.b"}
        assert dict(checkpoint.objects) == {"optim.lr": 0.1}
        assert native.read_manifest(open_storage(tmp_path)).subset == ["model.*", "*.lr"]

    def test_a_load_is_strict_over_the_subset_and_reports_the_rest(self, state, tmp_path):
        reshard.save(state, tmp_path, select=["model.*"])
        target = self.blank()

        report = reshard.load(target, tmp_path)

        assert set(report.excluded) == {"optim.m", "optim.lr"}  # an empty dict has nothing to fill
        assert report.missing == ()
        assert target["model"]["w"].tolist() == [1, 1, 1]
        assert target["optim"]["m"].tolist() == [0, 0, 0]
        target["model"]["new"] = torch.zeros(1)
        with pytest.raises(KeyMismatchError, match=r"model\.new"):
            reshard.load(target, tmp_path)
        with pytest.raises(KeyMismatchError, match=r"\n  no key matches strict='modle\.\*'\n(.|\n)*model\.new"):
            reshard.load(target, tmp_path, strict={"modle.*": "partial", "optim.*": "strict"})
        del target["model"]["new"], target["model"]["b"]
        with pytest.raises(KeyMismatchError, match=r"unexpected(.|\n)*model\.b"):
            reshard.load(target, tmp_path)

    def test_a_mapped_key_is_outside_only_if_its_name_in_the_checkpoint_is(self, state, tmp_path):
        reshard.save(state, tmp_path, select=["model.*"])
        target = {"w": torch.zeros(3), "lost": torch.zeros(1)}
        with pytest.raises(KeyMismatchError, match=r"missing(.|\n)*lost"):
            reshard.load(target, tmp_path, strict="subset", mapping={"w": "model.w", "lost": "model.lost"})
        report = reshard.load(target, tmp_path, strict="subset", mapping={"w": "model.w", "lost": "optim.m"})
        assert report.excluded == ("lost",)

    def test_save_and_convert_select_by_the_same_words(self, state, tmp_path):
        """One glob or several, and `!` for what is left out."""
        reshard.save(state, tmp_path / "all")
        for name, select, wanted in (
            ("one", "model.*", {"model.w", "model.b"}),
            ("but", ["model.*", "!*.b"], {"model.w"}),
            ("rest", ("!optim.*",), {"model.w", "model.b"}),
        ):
            saved = reshard.save(state, tmp_path / name, select=select)
            made = reshard.convert(
                tmp_path / "all", tmp_path / f"{name}-made", select=iter(select) if name == "but" else select
            )
            assert saved.select == ((select,) if name == "one" else tuple(select))
            assert set(reshard.open(tmp_path / name)) == set(reshard.open(tmp_path / f"{name}-made")) == wanted
            assert made.tensors == saved.tensors == len(wanted)
        target = self.blank()
        report = reshard.load(target, tmp_path / "but")  # what was left out is not missing
        assert set(report.excluded) == {"model.b", "optim.m", "optim.lr"}
        assert (target["model"]["w"].tolist(), target["model"]["b"].tolist()) == ([1, 1, 1], [0, 0])
        for call in (reshard.save, lambda _, path, select: reshard.convert(tmp_path / "all", path, select=select)):
            with pytest.raises(OptionError, match="select must be a glob or a list of globs, but contains 3"):
                call(state, tmp_path / "bad", select=["model.*", 3])
        assert not (tmp_path / "bad").exists()

    def test_a_glob_that_fits_nothing_is_an_error(self, state, tmp_path):
        with pytest.raises(KeyMismatchError, match="'modle"):
            reshard.save(state, tmp_path, select=["model.*", "modle.*"])
        with pytest.raises(OptionError, match="select must be a glob or a list of globs, got 3"):
            reshard.save(state, tmp_path, select=3)  # type: ignore[arg-type]
        assert not list(tmp_path.iterdir())


class TestProgress:
    def test_every_phase_tells_of_itself_and_logs_one_line_if_it_did_anything(self, tmp_path, caplog):
        events = []
        with caplog.at_level(logging.INFO, logger="reshard"), listening(events.append):
            reshard.save({"w": torch.ones(1000)}, tmp_path)
            reshard.load({"w": torch.zeros(1000)}, tmp_path)

        ends = [(event.phase, event.done_bytes, event.total_bytes) for event in events if event.kind == "finished"]
        assert [phase for phase, _, _ in ends] == ["write", "check", "read"]
        assert ends[0][1:] == ends[2][1:] == (4000, 4000)
        assert ends[1][1] == 0, "opening compares the only block"
        assert [record.message.partition(":")[0] for record in caplog.records] == ["write", "read"]

    def test_nothing_is_logged_that_nobody_asked_for(self, tmp_path, capfd):
        reshard.save({"w": torch.ones(1000)}, tmp_path)
        reshard.load({"w": torch.zeros(1000)}, tmp_path)

        assert capfd.readouterr() == ("", "")


class TestAsync:
    def test_later_changes_are_not_saved(self, tmp_path):
        state = {"w": torch.ones(1000, 100), "strided": torch.ones(10, 10).t(), "step": 1, "list": [1]}

        pending = reshard.async_save(state, tmp_path)
        for tensor in (state["w"], state["strided"]):
            tensor.zero_()
        state["step"] = 2
        state["list"].append(2)
        pending.result(30)

        assert (reshard.open(tmp_path)["w"][...] == 1).all()
        assert (reshard.open(tmp_path)["strided"][...] == 1).all()
        assert reshard.open(tmp_path).objects == {"step": 1, "list.0": 1}

    def test_only_so_many_are_in_flight_and_errors_are_raised(self, tmp_path):
        gate = threading.Event()

        def slow(verb: str, name: str) -> None:
            if verb == "commit":
                assert gate.wait(30)

        def broken(verb: str, name: str) -> None:
            if verb == "commit":
                raise StorageError("no space left")

        first = reshard.async_save({"w": torch.ones(3)}, Faulty(open_storage(tmp_path / "a"), slow))
        threading.Timer(0.2, gate.set).start()
        begin = time.monotonic()
        second = reshard.async_save({"w": torch.ones(3)}, Faulty(open_storage(tmp_path / "b"), broken))
        assert first.done()
        assert time.monotonic() - begin > 0.1
        with pytest.raises(StorageError, match="no space left"):
            second.result(30)
        reshard.async_save({"w": torch.ones(3)}, tmp_path / "c").result(30)
        assert reshard.open(tmp_path / "c")["w"][0] == 1

    @pytest.mark.not_simulated("its device gives no address twice")
    def test_two_hundred_saves_leave_memory_and_threads_as_they_were(self, tmp_path):
        state = {"w": torch.ones(256, 1024), "step": 0}

        def rss() -> int:
            gc.collect()
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * 4096

        for i in range(200):
            state["step"] = i
            reshard.async_save(state, tmp_path).result(60)
            if i == 20:
                before, threads = rss(), threading.active_count()

        assert rss() - before < 8 * MIB
        give_up = time.monotonic() + 30
        while threading.active_count() > threads and time.monotonic() < give_up:
            time.sleep(0.01)  # a result is there a moment before its thread has ended
        assert threading.active_count() <= threads
        assert reshard.open(tmp_path).objects["step"] == 199
        assert len(list(tmp_path.glob("data-*"))) == 1

    def test_the_interpreter_is_left_to_the_training_loop(self, tmp_path):
        state = {"w": torch.ones(64 * MIB // 4)}
        pending = reshard.async_save(state, tmp_path)

        turns, longest, last = 0, 0.0, time.perf_counter()
        while not pending.done():
            sum(range(200))
            now = time.perf_counter()
            turns, longest, last = turns + 1, max(longest, now - last), now
        pending.result(30)

        assert turns > 100
        assert longest < 1.0, f"the loop stood still for {longest:.3f} s"


class TestScale:
    def test_thousands_of_nests_of_plain_values_are_matched_in_one_pass(self, tmp_path):
        def nest(count, full):
            rows = {str(i): {"a": i * full, "t": torch.full((1,), float(full)), "u": {}} for i in range(count)}
            return rows | ({k: v | {"u": {"x": {"y": int(k)}}, "l": (1, [])} for k, v in rows.items()} if full else {})

        seconds = []
        for count in (500, 4000):
            reshard.save(nest(count, 1), tmp_path / str(count))
            target = {key: row | {"l": ()} for key, row in nest(count, 0).items()}
            begin = time.process_time()
            reshard.load(target, tmp_path / str(count), threads=1)
            seconds.append(time.process_time() - begin)
            assert target[str(count - 1)]["u"] == {"x": {"y": count - 1}}
            assert target["7"]["l"] == (1, [])
        assert seconds[1] < 8 * 4 * seconds[0], "eight times as many take about eight times as long"

    def test_a_manifest_of_a_million_chunks_opens_at_once_and_lists_none_of_them(self):
        ranks, tensors = 1024, 1000
        mesh = Mesh({"dp": ranks}, None)
        names = [f"layers.{i}.w" for i in range(tensors)]
        specs = [TensorSpec(name, (ranks * 4, 64), "float32") for name in names]
        layout = to_json(StateLayout({spec.fqn: TensorLayout(spec, mesh, (Shard(0),)) for spec in specs}))
        folder = "data-0123456789ab-0123456789ab"
        files = {str(r): native.FileRecord(f"{folder}/{r:05d}.safetensors", MIB, 1024, "0" * 32) for r in range(ranks)}
        manifest = native.Manifest(
            save_id=folder.removeprefix("data-"),
            created_unix_s=0.0,
            writer="test",
            divide_above_bytes=8 * MIB,
            files=files,
            layout={key: value for key, value in layout.items() if key not in ("reshard", "version")},
        )
        storage = MemoryStorage()
        storage.publish(native.MANIFEST, native.encode_sealed(manifest))
        found = {native.MANIFEST: 1}
        for record in files.values():
            found[record.name], found[f"{record.name}.sums"] = MIB, 8

        with traced.peak() as peak:
            contents = open_native(Files(storage, found))
            tensor = contents.tensors["layers.500.w"]
            row = next(tensor.meeting(Box((2000, 0), (1, 64))))

        assert peak.nbytes < 20 * MIB, "a million chunks would take hundreds of MiB"
        assert row[0].owner == 500
        assert len(storage.read(native.MANIFEST)) < 400_000, "it must not grow with tensors times ranks"
        assert len(tensor.chunks) == ranks
