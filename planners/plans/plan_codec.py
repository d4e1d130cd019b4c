"""Topologies, views, plans, schedules and estimates as plain data, see `planners.plans.codec`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from planners.errors import CodecError, PlanError
from planners.geometry.box import Box
from planners.geometry.json import Kind, state_from_json, state_to_json
from planners.geometry.layout import TensorSpec
from planners.geometry.mesh import Mesh
from planners.geometry.topologies import Home, Rule, Topology
from planners.geometry.views import Fill, Patch, View, ViewGeometry
from planners.plans.cost import Cluster, Estimate
from planners.plans.load import LoadPlan, ReadItem
from planners.plans.proof import verify
from planners.plans.rounds import Schedule, schedule
from planners.plans.save import SavePlan
from planners.plans.transfer import TransferItem, TransferPlan

__all__ = ["PLAN_KINDS"]


def _items_json(plan: LoadPlan) -> dict[str, Any]:
    return {
        str(rank): [
            [
                *(i.fqn, i.owner, *(list(part) for box in (i.chunk, i.source, i.target) for part in box)),
                *(i.nbytes, i.part, i.saved_as, i.dims if i.dims is None else list(i.dims)),
            ]
            for i in items
        ]
        for rank, items in plan.explicit.items()
    }


def _items(data: Mapping[str, Any]) -> dict[int, list[ReadItem]]:
    return {
        int(rank): [
            ReadItem(
                fqn, owner, Box(a, b), Box(c, d), Box(e, f), nbytes, part, name, dims if dims is None else tuple(dims)
            )
            for fqn, owner, a, b, c, d, e, f, nbytes, part, name, dims in rows
        ]
        for rank, rows in data.items()
    }


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
        "patches": [[*map(list, p.target), p.tensor, *map(list, p.source), list(p.dims)] for p in geometry.patches],
        "fills": [[*map(list, f.target), f.value] for f in geometry.fills],
    }


def _views(data: Mapping[str, Any]) -> dict[str, View]:
    parts = []
    for row in data["geometries"]:
        patches = [Patch(Box(a, b), n, Box(c, d), tuple(dims)) for a, b, n, c, d, dims in row["patches"]]
        parts.append((row, tuple(patches), tuple(Fill(Box(a, b), value) for a, b, value in row["fills"])))
    views = {}
    for fqn, (dtype, number, names) in data["views"].items():
        row, patches_, fills = parts[number]
        sources = tuple(TensorSpec(name, shape, dtype) for name, shape in zip(names, row["sources"], strict=True))
        views[fqn] = View(TensorSpec(fqn, row["shape"], dtype), sources, patches_, fills)
    return views


def _view(data: Mapping[str, Any]) -> View:
    (view,) = _views(data).values()
    return view


def _load_plan(data: Mapping[str, Any]) -> LoadPlan:
    views = _views(data["views"])
    plan = LoadPlan(state_from_json(data["saved"]), state_from_json(data["wanted"]), _items(data["items"]), views)
    _same_digest(data, _load_digest(plan))
    _proven(plan, "load plan")
    return plan


def _load_digest(plan: LoadPlan) -> str:
    """Of all that a plan is made for: both layouts, and the views between them."""
    views = hashlib.sha256(json.dumps(_views_json(plan.views.values()), sort_keys=True).encode()).hexdigest()
    return plan.saved.digest() + plan.wanted.digest() + (views if plan.views else "")


def _save_plan(data: Mapping[str, Any]) -> SavePlan:
    plan = SavePlan(state_from_json(data["layout"]), data["divide_above_bytes"], data["ranks_per_host"])
    _same_digest(data, plan.layout.digest())
    return plan


def _transfer_json(plan: TransferPlan) -> dict[str, Any]:
    return {
        "digest": plan.before.digest() + plan.after.digest(),
        "before": state_to_json(plan.before),
        "after": state_to_json(plan.after),
        "missing": list(plan.missing),
        "ranks_per_host": plan.ranks_per_host,
        "items": {
            str(rank): [
                [i.fqn, i.sender, *(list(part) for box in (i.box, i.source, i.target) for part in box), *i[6:]]
                for i in items
            ]
            for rank, items in plan.explicit.items()
        },
    }


def _transfer_plan(data: Mapping[str, Any]) -> TransferPlan:
    before, after, missing = state_from_json(data["before"]), state_from_json(data["after"]), set(data["missing"])
    explicit = {
        int(rank): [
            TransferItem(fqn, sender, int(rank), Box(a, b), Box(c, d), Box(e, f), *rest)
            for fqn, sender, a, b, c, d, e, f, *rest in rows
        ]
        for rank, rows in data["items"].items()
    }
    names = [fqn for fqn in after if fqn not in missing]
    plan = TransferPlan(before, after, names, data["ranks_per_host"], explicit)
    _same_digest(data, before.digest() + after.digest())
    _proven(plan, "transfer plan")
    return plan


def _schedule_json(rounds: Schedule) -> dict[str, Any]:
    """Columns are left out where they are those that `schedule` makes, which is mostly so."""
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


def _proven(plan: object, what: str) -> None:
    report = verify(plan)
    if not report.ok:
        raise CodecError(f"this {what} does not prove: {report.findings[0]}", fqn=report.findings[0].fqn)


def _estimate_json(cost: Estimate) -> dict[str, Any]:
    values = {name: getattr(cost, name) for name in Estimate.__dataclass_fields__ if name != "cluster"}
    plain = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}
    return {"cluster": _cluster_json(cost.cluster), **plain}


def _estimate(data: Mapping[str, Any]) -> Estimate:
    values = {name: data[name] for name in Estimate.__dataclass_fields__ if name != "cluster"}
    arrays: dict[str, Any] = {
        name: np.array(value) if isinstance(value, list) else value for name, value in values.items()
    }
    return Estimate(cluster=Cluster(**data["cluster"]), **arrays)


def _cluster_json(cluster: Cluster) -> dict[str, Any]:
    return {name: getattr(cluster, name) for name in Cluster.__slots__}


def _same_digest(data: Mapping[str, Any], found: str) -> None:
    if data["digest"] != found:
        raise PlanError("its layouts are not those that it was made for (the digest differs)")


def _topology(data: Mapping[str, Any]) -> Topology:
    rules = [Rule.parse(pattern, text, optional) for pattern, text, optional in data["rules"]]
    homes = [Home.parse(pattern, text, optional) for pattern, text, optional in data["homes"]]
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
        lambda p: {
            "digest": _load_digest(p),
            "saved": state_to_json(p.saved),
            "wanted": state_to_json(p.wanted),
            "views": _views_json(p.views.values()),
            "items": _items_json(p),
        },
        _load_plan,
    ),
    "save_plan": Kind(
        SavePlan,
        lambda p: {
            "digest": p.layout.digest(),
            "layout": state_to_json(p.layout),
            "divide_above_bytes": p.divide_above_bytes,
            "ranks_per_host": p.ranks_per_host,
        },
        _save_plan,
    ),
    "transfer_plan": Kind(TransferPlan, _transfer_json, _transfer_plan),
    "schedule": Kind(Schedule, _schedule_json, _schedule),
    "cluster": Kind(
        Cluster, _cluster_json, lambda d: Cluster(**{name: d[name] for name in Cluster.__slots__ if name in d})
    ),
    "estimate": Kind(Estimate, _estimate_json, _estimate),
}
"""Kinds of values by the name that their texts bear."""
