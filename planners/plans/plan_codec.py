"""Topologies, views, plans, schedules and estimates as plain data, see `planners.plans.codec`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar, get_type_hints

import numpy as np

from planners.errors import CodecError, PlanError
from planners.geometry.box import Box
from planners.geometry.layout import Kind, TensorSpec, state_from_json, state_to_json
from planners.geometry.mesh import Mesh
from planners.geometry.topologies import Home, Rule, Topology
from planners.geometry.views import Fill, Patch, View, ViewGeometry
from planners.plans.cost import Cluster, Estimate
from planners.plans.load import LoadPlan, ReadItem
from planners.plans.plan import Plan, verify
from planners.plans.save import SavePlan, WriteItem
from planners.plans.schedule import Schedule, schedule
from planners.plans.transfer import TransferItem, TransferPlan

T = TypeVar("T")


# A value of named fields is a row of its fields, in which a box is two lists: offsets
# and sizes.


def _row(fields: Iterable[Any]) -> list[Any]:
    row: list[Any] = []
    for value in fields:
        row += map(list, value) if isinstance(value, Box) else [list(value) if isinstance(value, tuple) else value]
    return row


@lru_cache
def _types(kind: type[object]) -> tuple[object, ...]:
    return tuple(get_type_hints(kind).values())


def _of_row(kind: type[T], row: Iterable[Any]) -> T:
    """Inverse of `_row`. Raises ValueError or IndexError for a row of another length."""
    cells, fields = list(row), list[Any]()
    for its_type in _types(kind):  # type: ignore[arg-type]  # mypy forgets that types are hashable
        cell = cells.pop(0)
        if its_type is Box:
            fields.append(Box(cell, cells.pop(0)))
        else:
            fields.append(tuple(cell) if isinstance(cell, list) else cell)
    if cells:
        raise ValueError(f"{len(cells)} fields too many")
    return kind(*fields)


def _fields(value: Any) -> dict[str, Any]:
    """A dataclass of numbers and arrays of them."""
    found = {name: getattr(value, name) for name in value.__dataclass_fields__}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in found.items()}


# Views.


def _views_json(views: Iterable[View]) -> dict[str, Any]:
    """Views that differ in names only share one geometry."""
    geometries: dict[ViewGeometry, int] = {}
    table = {
        v.spec.fqn: [v.spec.dtype, geometries.setdefault(v.geometry, len(geometries)), [s.fqn for s in v.sources]]
        for v in views
    }
    return {"geometries": [_geometry_json(geometry) for geometry in geometries], "views": table}


def _geometry_json(geometry: ViewGeometry) -> dict[str, Any]:
    return {
        "shape": list(geometry.shape),
        "sources": [list(shape) for shape in geometry.source_shapes],
        "patches": [_row((p.target, p.tensor, p.source, p.dims)) for p in geometry.patches],
        "fills": [_row((fill.target, fill.value)) for fill in geometry.fills],
    }


def _views(data: Mapping[str, Any]) -> dict[str, View]:
    parts = [
        (tuple(_of_row(Patch, p) for p in row["patches"]), tuple(_of_row(Fill, fill) for fill in row["fills"]))
        for row in data["geometries"]
    ]
    views = {}
    for fqn, (dtype, number, names) in data["views"].items():
        row = data["geometries"][number]
        sources = tuple(TensorSpec(name, shape, dtype) for name, shape in zip(names, row["sources"], strict=True))
        views[fqn] = View(TensorSpec(fqn, row["shape"], dtype), sources, *parts[number])
    return views


def _view(data: Mapping[str, Any]) -> View:
    (view,) = _views(data).values()
    return view


# Plans: their layouts with a digest, and the items that were listed by hand.


def _plan_json(plan: Plan[Any]) -> dict[str, Any]:
    return {"digest": _digest(plan), **{side: state_to_json(layout) for side, layout in plan.sides.items()}}


def _digest(plan: Plan[Any]) -> str:
    """Return a digest of what a plan is made for: its layouts, and the views between them."""
    views = _views_json(plan.views.values()) if isinstance(plan, LoadPlan) and plan.views else None
    told = "" if views is None else hashlib.sha256(json.dumps(views, sort_keys=True).encode()).hexdigest()
    return "".join(layout.digest() for layout in plan.sides.values()) + told


def _same_digest(data: Mapping[str, Any], plan: Plan[Any]) -> None:
    if data["digest"] != _digest(plan):
        raise PlanError("it was made for other layouts (the digests differ)")


def _proven(subject: object, what: str) -> None:
    report = verify(subject)
    if not report.ok:
        raise CodecError(f"the proof of this {what} failed: {report.findings[0]}", fqn=report.findings[0].fqn)


def _items_json(plan: Plan[Any], row: Callable[[Any], Sequence[Any]]) -> dict[str, Any]:
    return {str(rank): [_row(row(item)) for item in items] for rank, items in plan.explicit.items()}


def _load_plan(data: Mapping[str, Any]) -> LoadPlan:
    items = {int(rank): [_of_row(ReadItem, row) for row in rows] for rank, rows in data["items"].items()}
    plan = LoadPlan(state_from_json(data["saved"]), state_from_json(data["wanted"]), items, _views(data["views"]))
    _same_digest(data, plan)
    _proven(plan, "load plan")
    return plan


def _save_plan(data: Mapping[str, Any]) -> SavePlan:
    items = {int(rank): [_of_row(WriteItem, row) for row in rows] for rank, rows in data.get("items", {}).items()}
    plan = SavePlan(state_from_json(data["layout"]), data["divide_above_bytes"], data["ranks_per_host"], items)
    _same_digest(data, plan)
    if items:
        _proven(plan, "save plan")
    return plan


def _transfer_json(plan: TransferPlan) -> dict[str, Any]:
    return {
        **_plan_json(plan),
        "missing": list(plan.missing),
        "ranks_per_host": plan.ranks_per_host,
        "items": _items_json(plan, lambda item: item[:2] + item[3:]),  # it is listed for its receiver
    }


def _transfer_plan(data: Mapping[str, Any]) -> TransferPlan:
    before, after, missing = state_from_json(data["before"]), state_from_json(data["after"]), set(data["missing"])
    explicit = {
        int(rank): [_of_row(TransferItem, [*row[:2], int(rank), *row[2:]]) for row in rows]
        for rank, rows in data["items"].items()
    }
    names = [fqn for fqn in after if fqn not in missing]
    plan = TransferPlan(before, after, names, data["ranks_per_host"], explicit)
    _same_digest(data, plan)
    _proven(plan, "transfer plan")
    return plan


def _schedule_json(rounds: Schedule) -> dict[str, Any]:
    """Columns are omitted if they equal those that `schedule` makes, as they usually do."""
    usual = rounds == schedule(rounds.plan, max_inflight_bytes=rounds.max_inflight_bytes)
    return {
        "plan": _transfer_json(rounds.plan),
        "max_inflight_bytes": rounds.max_inflight_bytes,
        "columns": None if usual else [column.tolist() for column in rounds.columns()],
    }


def _schedule(data: Mapping[str, Any]) -> Schedule:
    plan, budget, columns = _transfer_plan(data["plan"]), data["max_inflight_bytes"], data["columns"]
    if columns is None:
        return schedule(plan, max_inflight_bytes=budget)
    a, b, c, d, e = (np.array(column, dtype=np.int64) for column in columns)
    rounds = Schedule(plan, budget, (a, b, c, d, e))
    _proven(rounds, "schedule")
    return rounds


def _estimate(data: Mapping[str, Any]) -> Estimate:
    values: dict[str, Any] = {name: data[name] for name in Estimate.__dataclass_fields__}
    for name, value in values.items():
        values[name] = np.array(value) if isinstance(value, list) else value
    return Estimate(**values | {"cluster": Cluster(**data["cluster"])})


def _topology(data: Mapping[str, Any]) -> Topology:
    rules, homes = (Rule.parse(*row) for row in data["rules"]), (Home.parse(*row) for row in data["homes"])
    return Topology(Mesh.parse(data["mesh"]), tuple(rules), tuple(homes), tuple(data["even"]))


PLAN_KINDS: dict[str, Kind] = {
    "topology": Kind(
        Topology,
        lambda t: {
            "mesh": str(t.mesh),
            "rules": [[rule.pattern, rule.text, rule.optional] for rule in t.rules],
            "homes": [[home.pattern, home.text, home.optional] for home in t.homes],
            "even": list(t.even),
        },
        _topology,
    ),
    "view": Kind(View, lambda v: _views_json([v]), _view),
    "load_plan": Kind(
        LoadPlan,
        lambda p: {**_plan_json(p), "views": _views_json(p.views.values()), "items": _items_json(p, lambda item: item)},
        _load_plan,
    ),
    "save_plan": Kind(
        SavePlan,
        lambda p: {
            **_plan_json(p),
            "divide_above_bytes": p.divide_above_bytes,
            "ranks_per_host": p.ranks_per_host,
            **({"items": _items_json(p, lambda item: item)} if p.explicit else {}),
        },
        _save_plan,
    ),
    "transfer_plan": Kind(TransferPlan, _transfer_json, _transfer_plan),
    "schedule": Kind(Schedule, _schedule_json, _schedule),
    "cluster": Kind(Cluster, _fields, lambda d: Cluster(**{name: d[name] for name in Cluster.__slots__ if name in d})),
    "estimate": Kind(Estimate, lambda e: _fields(e) | {"cluster": _fields(e.cluster)}, _estimate),
}
"""Kinds of values by the name that their texts bear."""
