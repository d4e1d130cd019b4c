"""Azure and Google Cloud Storage through their own clients: what works on S3 works there, down to killed writers."""

from __future__ import annotations

import base64

import pytest

import reshard
from reshard.api.save import save
from reshard.errors import CheckpointNotFoundError, StorageError
from reshard.storage import open_storage
from tests import gloo
from tests.reshard.storage.small_parts import open_in_small_parts
from tests.reshard.storage.test_objects import MIB, _pattern, _use_everything, _write
from tests.reshard.storage.test_s3_checkpoints import _die_at_every_request, _loaded_step
from tests.states import more_than_a_part_of


@pytest.fixture(params=["azure", "google"])
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(request.param)
    return found


def test_every_verb(url: str) -> None:
    storage = open_in_small_parts(url)
    assert storage.list() == {}
    _use_everything(storage)
    storage.delete("never was")
    with pytest.raises(CheckpointNotFoundError, match="there is no small"):
        storage.read("small")
    with pytest.raises(StorageError, match="too short: expected bytes"):
        storage.read("manifest.json", 1, 20)
    with storage.create("a b/ü%20#?&+") as out:
        out.write(b"")
    assert storage.list("a b/") == {"a b/ü%20#?&+": 0}


def test_nothing_is_overwritten_but_by_publishing(url: str) -> None:
    storage = open_storage(url)
    with storage.create("small") as slow:
        slow.write(b"slow")
        with storage.create("small") as fast:
            fast.write(b"fast")
        with pytest.raises(StorageError, match="already exists"):
            slow.__exit__(None, None, None)
    assert storage.read("small") == b"fast"
    with pytest.raises(StorageError, match="already exists"):
        storage.create("small")
    storage.publish("small", b"published")
    assert storage.read("small") == b"published"


def test_an_upload_given_up_shows_nothing(url: str) -> None:
    storage = open_in_small_parts(url)
    with pytest.raises(ZeroDivisionError):
        _write(storage, "big", _pattern(12 * MIB), ZeroDivisionError())
    assert storage.list() == {}
    with storage.create("big") as out:
        out.write(b"the next one")
    assert storage.read("big") == b"the next one"


def test_checkpoints_replace_each_other_and_are_pruned(url: str) -> None:
    for step in (1, 2):
        save(more_than_a_part_of(step), f"{url}/step-1")
        assert _loaded_step(f"{url}/step-1") == step
    assert len({name.split("/")[0] for name in open_storage(f"{url}/step-1").list("data-")}) == 1
    assert reshard.verify(f"{url}/step-1").ok
    reshard.async_save(more_than_a_part_of(3), f"{url}/step-2").result()
    assert reshard.latest_complete(url) == f"{url}/step-2"
    assert reshard.prune(url, keep_last=1) == [f"{url}/step-1"]
    assert {name.split("/")[0] for name in open_storage(url).list()} == {"step-2"}


def test_a_writer_killed_at_any_request(url: str) -> None:
    (deaths,) = gloo.run(_die_at_every_request, 1, f"{url}/c", True, init=False)
    assert deaths >= 5


def test_a_missing_bucket_is_told(url: str) -> None:
    missing = f"{url.partition('://')[0]}://no-such-bucket/x"
    for attempt in (open_storage(missing).list, lambda: save({"a": 1}, missing), lambda: reshard.open(missing)):
        with pytest.raises(StorageError, match="there is no such bucket or container"):
            attempt()


def test_wrong_credentials_are_told(azure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(bytes(64)).decode())
    for attempt in (open_storage(azure).list, lambda: save({"a": 1}, azure), lambda: reshard.open(azure)):
        with pytest.raises(StorageError, match="permission denied, or no credentials"):
            attempt()
