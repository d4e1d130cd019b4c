"""All storages do the same thing: whatever is done to them in whatever order, they hold and answer alike."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from typing import Any

from hypothesis import settings, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from property_tests.budget import examples
from reshard.errors import CheckpointNotFoundError, ReshardError, StorageError
from reshard.storage import LocalStorage, MemoryStorage, Storage

NAMES = st.lists(st.sampled_from(["a", "b", "ab", "é", "a b", "data.bin"]), min_size=1, max_size=3).map("/".join)
DATA = st.binary(max_size=40)


class _Stop(Exception):
    pass


class Agreement(RuleBasedStateMachine):
    """The model is a dict; folders need care only since a local file cannot also be a folder."""

    names = Bundle("names")

    @initialize()
    def start(self) -> None:
        self.folder = tempfile.mkdtemp()
        self.model: dict[str, bytes] = {}
        self.storages: list[Storage] = [LocalStorage(f"{self.folder}/root"), MemoryStorage()]

    def teardown(self) -> None:
        shutil.rmtree(getattr(self, "folder", ""), ignore_errors=True)

    def everywhere(self, call: Callable[[Storage], Any], expected: Any) -> None:
        for storage in self.storages:
            try:
                answer = call(storage)
            except ReshardError as error:
                answer = type(error)
            assert answer == expected, storage

    def fits(self, name: str) -> bool:
        """Whether no object is where `name` needs a folder, nor below it."""
        return not any(other.startswith(f"{name}/") or name.startswith(f"{other}/") for other in self.model)

    @rule(target=names, name=NAMES)
    def pick(self, name: str) -> str:
        return name

    @rule(name=names, pieces=st.lists(DATA, max_size=3))
    def create(self, name: str, pieces: list[bytes]) -> None:
        if not self.fits(name):
            return

        def call(storage: Storage) -> None:
            with storage.create(name) as out:
                for piece in pieces:
                    out.write(piece)

        self.everywhere(call, StorageError if name in self.model else None)
        self.model.setdefault(name, b"".join(pieces))

    @rule(name=names, data=DATA)
    def interrupted_create(self, name: str, data: bytes) -> None:
        if not self.fits(name) or name in self.model:
            return

        def call(storage: Storage) -> str:
            try:
                with storage.create(name) as out:
                    out.write(data)
                    raise _Stop
            except _Stop:
                return "stopped"

        self.everywhere(call, "stopped")

    @rule(name=names, data=DATA)
    def publish(self, name: str, data: bytes) -> None:
        if self.fits(name):
            self.everywhere(lambda storage: storage.publish(name, data), None)
            self.model[name] = data

    @rule(name=names)
    def delete(self, name: str) -> None:
        if self.fits(name):
            self.everywhere(lambda storage: storage.delete(name), None)
            self.model.pop(name, None)

    @rule(name=names, start=st.integers(-1, 50), length=st.integers(-1, 50))
    def read(self, name: str, start: int, length: int) -> None:
        if not self.fits(name):
            return
        data = self.model.get(name)
        if data is None:
            self.everywhere(lambda storage: storage.read(name), CheckpointNotFoundError)
            self.everywhere(lambda storage: storage.size(name), CheckpointNotFoundError)
            return
        inside = start >= 0 and length >= 0 and start + length <= len(data)
        expected = data[start : start + length] if inside else StorageError
        self.everywhere(lambda storage: storage.read(name, start, length), expected)
        self.everywhere(lambda storage: bytes(storage.mapped(name) or b""), data)

    @rule(prefix=st.sampled_from(["", "a", "a/", "ab", "a/b", "b/a/", "é", "data"]))
    def list(self, prefix: str) -> None:
        expected = {name: len(data) for name, data in sorted(self.model.items()) if name.startswith(prefix)}
        self.everywhere(lambda storage: list(storage.list(prefix).items()), list(expected.items()))

    @invariant()
    def same(self) -> None:
        if hasattr(self, "model"):
            self.everywhere(lambda storage: storage.list(), {name: len(data) for name, data in self.model.items()})


TestAgreement = Agreement.TestCase
TestAgreement.settings = settings(deadline=None, max_examples=examples(60, most=2_000), stateful_step_count=30)
