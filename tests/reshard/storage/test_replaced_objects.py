"""Objects of a store that are replaced while a checkpoint without checksums is read: no mix of two saves."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as save_tensors

import reshard
from reshard.errors import ReshardError
from reshard.storage import open_storage


def _put(url: str, number: int) -> None:
    """One of two saves with equal files."""
    made = {"w": torch.full((8,), float(number)), "long": torch.full((40_000,), float(number))}
    files = {name: f"model-0000{i}-of-00002.safetensors" for i, name in enumerate(made, 1)}
    storage = open_storage(url)
    for name, file in files.items():
        storage.publish(file, save_tensors({name: made[name]}))
    storage.publish("model.safetensors.index.json", json.dumps({"metadata": {}, "weight_map": files}).encode())


@pytest.mark.host_only("it is about what is read from a store")
@pytest.mark.parametrize("store", ["s3", "google", "azure"])
def test_objects_that_are_replaced_after_they_were_listed_are_not_read_as_one(
    store: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    server = request.getfixturevalue(store)
    url = server if isinstance(server, str) else f"s3://bucket/{uuid.uuid4().hex}"
    target = {"w": torch.zeros(8), "long": torch.zeros(40_000)}

    def both(checkpoint: Any) -> None:
        assert (checkpoint["w"][0], checkpoint["long"][0]) in ((1, 1), (2, 2))

    ways: list[Callable[[Any], Any]] = [
        lambda checkpoint: checkpoint["long"][5:9],
        lambda checkpoint: reshard.load(target, checkpoint),
        lambda checkpoint: reshard.convert(checkpoint, tmp_path / "out"),
        lambda checkpoint: reshard.verify(checkpoint).raise_if_failed(),
    ]
    for number, way in enumerate(ways):
        _put(url, 1)
        opened, fresh = reshard.open(url), reshard.open(url)
        if number:
            assert opened["w"][0] == 1
        time.sleep(1.1)  # times have whole seconds
        _put(url, 2)
        with pytest.raises(ReshardError, match=r"written again after it was opened"):
            way(opened)
        with pytest.raises(ReshardError, match=r"written again after it was opened"):
            both(fresh)
        both(reshard.open(url))
        time.sleep(1.1)
    assert not (tmp_path / "out").exists()
