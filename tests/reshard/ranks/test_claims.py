"""Who says that it is at work: what is read of a claim, also of one that was damaged."""

from __future__ import annotations

from reshard.ranks.liveness import may_be_alive, read_lease, release_lease, take_lease
from reshard.storage.memory import MemoryStorage


def test_whatever_byte_of_a_claim_was_changed_it_is_read_or_there_is_none() -> None:
    storage = MemoryStorage()
    take_lease(storage, "claim.json", "a test")
    whole = storage.read("claim.json")
    assert may_be_alive(read_lease(storage, "claim.json"), "a test")

    found = []
    for at in range(len(whole)):
        for changed in (0xFF, 0x00, whole[at] ^ 0x40):
            storage.publish("claim.json", whole[:at] + bytes([changed]) + whole[at + 1 :])
            found.append(read_lease(storage, "claim.json"))

    assert None in found
    release_lease("a test")
