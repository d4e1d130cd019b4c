"""How many examples a law is tried on: a share of its own number by default, the profile's where that asks for more."""

from __future__ import annotations

from hypothesis import settings

DEFAULT = 200
SHARE = 0.25
"""Of a law's number, in `make test`, which is to stay below 25 minutes on two cores."""


def examples(number: int, most: int | None = None) -> int:
    """A share of `number`, or what a profile such as `nightly` wants; at most `most` where one example takes long."""
    wanted = settings.default.max_examples
    wanted = wanted if most is None else min(wanted, most)
    return max(number, wanted) if wanted > DEFAULT else max(round(SHARE * number), 1)
