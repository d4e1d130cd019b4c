"""Meshes, layouts, plans, schedules and estimates as versioned JSON text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from planners.errors import CodecError
from planners.geometry.layout import LAYOUT_KINDS, MALFORMED, Kind

VERSION = 1
"""Version of the JSON form. Texts of a higher version are refused."""


def to_json(value: object) -> dict[str, Any]:
    """Return `value` as plain data, as `dumps` writes it. Raises CodecError for values without a JSON form."""
    for name, kind in _kinds():
        if type(value) is kind.type:
            return {"reshard": name, "version": VERSION, **kind.encode(value)}
    raise CodecError(f"a {type(value).__name__} cannot be serialized to JSON. Serializable types: {_names()}")


def from_json(data: object) -> Any:
    """Inverse of `to_json`. Raises CodecError for anything that `to_json` cannot have made."""
    if not isinstance(data, Mapping) or "reshard" not in data:
        raise CodecError("this JSON holds no layout or plan: the key 'reshard' is missing")
    version = data.get("version")
    if version != VERSION:
        raise CodecError(f"this {data['reshard']!r} is of version {version!r}; this library reads version {VERSION}")
    kind = next((kind for name, kind in _kinds() if name == data["reshard"]), None)
    if kind is None:
        raise CodecError(f"unknown kind {data['reshard']!r}. Known kinds: {_names()}")
    try:
        return kind.decode(data)
    except CodecError:
        raise
    except MALFORMED as error:
        raise CodecError(f"this {data['reshard']!r} is malformed or was edited: {error}") from error


def dumps(value: object, *, indent: int | None = None) -> str:
    """Serialize a mesh, layout, or plan to JSON text. `loads` returns an equal value."""
    return json.dumps(to_json(value), indent=indent, separators=None if indent else (",", ":"))


def loads(text: str | bytes) -> Any:
    """Deserialize a value that `dumps` wrote.

    Verifies a plan with explicitly listed items. Raises CodecError if the text is not JSON, has another
    version, or was edited and is no longer consistent.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CodecError(f"not JSON: {error}") from error
    return from_json(data)


def _kinds() -> Iterator[tuple[str, Kind]]:
    """Yield what has a JSON form, by name."""
    yield from LAYOUT_KINDS.items()
    from planners.plans.plan_codec import PLAN_KINDS  # all plans and their proofs, which layouts do without

    yield from PLAN_KINDS.items()


def _names() -> str:
    return ", ".join(name for name, _ in _kinds())
