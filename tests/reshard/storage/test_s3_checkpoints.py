"""Whole checkpoints in an object store: round trips over a bad network, and a writer killed at every single request."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import traceback
import uuid
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest
import torch

from reshard import latest_complete, prune, verify
from reshard.api.load import load
from reshard.api.save import save
from reshard.errors import StorageError
from reshard.execute.host_assignment import REMOTE_SEGMENT_BYTES
from reshard.storage import open_storage
from tests import gloo
from tests.reshard.storage.s3_server import FlakyProxy, S3Server
from tests.reshard.storage.small_parts import open_in_small_parts
from tests.states import model_and_optimizer_of, more_than_a_part_of


def _blank() -> dict[str, Any]:
    return {"model": {"w": torch.zeros(1400, 1000), "b": torch.zeros(3), "none": torch.empty(0, 4)}, "step": 0}


def _loaded_step(url: str) -> int:
    """The step of a checkpoint that is whole: of one save in all its parts."""
    target = _blank()
    load(target, url)
    step = int(target["step"])
    expected = more_than_a_part_of(step)
    assert all(torch.equal(target["model"][key], expected["model"][key]) for key in expected["model"])
    return step


def test_round_trip(s3: S3Server) -> None:
    url = f"s3://bucket/{uuid.uuid4().hex}"
    for step in (1, 2):
        save(more_than_a_part_of(step), url)
        assert _loaded_step(url) == step
    generations = {name.split("/")[0] for name in open_storage(url).list("data-")}
    assert len(generations) == 1, "the replaced one is gone"


def test_a_load_asks_for_nothing_twice(proxy: FlakyProxy) -> None:
    url = f"s3://bucket/{uuid.uuid4().hex}"
    save(more_than_a_part_of(1), url)
    proxy.requests.clear()
    assert _loaded_step(url) == 1
    segments = -(-4 * 1_400_000 // REMOTE_SEGMENT_BYTES)
    # the list, the manifest, a header, its checksums; no object is asked for its size, which the list has told
    assert proxy.requests == [b"GET"] * (4 + segments)


@pytest.mark.parametrize("name", ["a b", "step#1?x", "a%20b", "ü=1+1"])
def test_folders_are_found_and_pruned_whatever_their_names(name: str, s3: S3Server) -> None:
    url = f"s3://bucket/{uuid.uuid4().hex}/{quote(name)}"
    save({"w": torch.ones(3)}, f"{url}/step-1")
    above = open_storage(url)
    above.publish("step-1/README", b"mine")
    found = latest_complete(f"{url}/")
    assert found is not None
    assert verify(found).ok
    save({"w": torch.ones(3)}, f"{url}/step-2")
    assert prune(url, keep_last=1) == [found]
    assert [one for one in above.list() if not one.startswith("step-2/")] == ["step-1/README"]


def test_a_url_whose_path_would_be_cut_off_is_refused(s3: S3Server) -> None:
    for sign in "#?":
        with pytest.raises(StorageError, match="write %23 for '#' and %3F"):
            save({"w": torch.ones(3)}, f"s3://bucket/{uuid.uuid4().hex}{sign}1")


def test_save_and_load_over_a_bad_network(proxy: FlakyProxy) -> None:
    url = f"s3://bucket/{uuid.uuid4().hex}"
    proxy.throttle, proxy.drop = 3, 2
    save(more_than_a_part_of(1), open_in_small_parts(url))
    assert proxy.throttle == proxy.drop == 0
    proxy.throttle, proxy.drop, proxy.drop_after = 2, 2, 1000
    assert _loaded_step(url) == 1
    assert proxy.throttle == proxy.drop == 0


class _Dying:
    """The functions of obstore, until request number `last`: then the process dies, before it or after it."""

    def __init__(self, api: Any, last: int, after: bool) -> None:
        self._api = api
        self._numbers = itertools.count(1)
        self._last = last
        self._after = after

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            number = next(self._numbers)
            if number == self._last and not self._after:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return getattr(self._api, name)(*args, **kwargs)
            finally:
                if number == self._last:
                    os.kill(os.getpid(), signal.SIGKILL)

        return call


def _save_and_die(url: str, step: int, last: int, after: bool) -> int:
    storage = open_in_small_parts(url)
    storage._api = _Dying(storage._api, last, after)
    save(more_than_a_part_of(step), storage)
    return 0


def _forked(call: Callable[..., int], *args: Any) -> int:
    """What `call` returns in a fork of this process, or minus the signal that killed it; 255 if it raised."""
    pid = os.fork()
    if pid == 0:
        code = 255
        try:
            code = call(*args)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _die_at_every_request(url: str, after: bool) -> int:
    """In a process that never uses obstore itself, whose threads no fork would get. Returns how many writers died."""
    assert _forked(_save_and_die, url, 1, 0, False) == 0
    step = 1
    # after one request is before the next: so every other one is enough
    for deaths, last in enumerate(range(1, 100, 2)):
        end = _forked(_save_and_die, url, step + 1, last, after)
        found = _forked(_loaded_step, url)
        assert found in (step, step + 1), (last, end, found)
        if end == 0:
            assert found == step + 1
            return deaths
        assert end == -signal.SIGKILL, (last, end)
        step = found
    raise AssertionError("a save of so few files cannot take so many requests")


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_writer_killed_at_any_request_leaves_the_old_or_the_new(s3: S3Server, after: bool) -> None:
    url = f"s3://bucket/{uuid.uuid4().hex}"
    (deaths,) = gloo.run(_die_at_every_request, 1, url, after, init=False)
    assert deaths >= 5
    names = open_storage(url).list()
    assert len({name.split("/")[0] for name in names if name.startswith("data-")}) == 1, "no garbage grows"
    assert sum(names.values()) < 1.1 * 4 * 1_400_000


PAUSED = """
import os, signal, sys
import reshard
from reshard.errors import ReshardError
from reshard.native import commit
from tests.states import model_and_optimizer_of

look = commit.Generation._check_current

def look_and_stop(generation, check):
    look(generation, check)
    looked.append(1)
    if len(looked) == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGSTOP)

looked = []
commit.Generation._check_current = look_and_stop
try:
    reshard.save(model_and_optimizer_of(2), "s3://bucket/paused")
except ReshardError as error:
    print(error)
    sys.exit(7)
"""


def test_a_paused_save_that_wakes_up_publishes_nothing(s3):
    """Not even between the last look and the write, which is one on condition."""
    save(model_and_optimizer_of(1), "s3://bucket/paused")
    child = subprocess.Popen([sys.executable, "-c", PAUSED, "2"], stdout=subprocess.PIPE, text=True)
    try:
        _, status = os.waitpid(child.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        save(model_and_optimizer_of(3), "s3://bucket/paused")
    finally:
        os.kill(child.pid, signal.SIGCONT)
    said, _ = child.communicate(timeout=60)
    assert child.returncode == 7, said
    assert "published" in said
    target = model_and_optimizer_of(-1)
    load(target, "s3://bucket/paused")
    assert target["optim"]["step"] == 3
