"""Meshes, layouts, plans, schedules and estimates as versioned JSON text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from planners.box import Box
from planners.cost import Cluster, Estimate
from planners.errors import CodecError, PlanError
from planners.forms import BoxesForm, FlatForm, Form, ProductForm
from planners.layout import StateLayout, TensorLayout, TensorSpec
from planners.load_plan import LoadPlan, ReadItem
from planners.mesh import Mesh
from planners.patches import Fill, Patch, ViewGeometry
from planners.placement import parse_placements
from planners.save_plan import SavePlan
from planners.schedule import Schedule, schedule
from planners.topology import Home, Rule, Topology
from planners.transfer_plan import TransferItem, TransferPlan
from planners.view import View

__all__ = ["VERSION", "dumps", "from_json", "loads", "to_json"]

VERSION = 1
"""Version of the JSON form; texts of a higher one are refused."""


@dataclass(frozen=True, slots=True)
class _Kind:
    type: type
    encode: Callable[[Any], dict[str, Any]]
    decode: Callable[[Mapping[str, Any]], Any]


def to_json(value: object) -> dict[str, Any]:
    """`value` as plain data: what `dumps` writes. Raises CodecError for what has no JSON form."""
    for name, kind in _KINDS.items():
        if type(value) is kind.type:
            return {"reshard": name, "version": VERSION, **kind.encode(value)}
    raise CodecError(f"a {type(value).__name__} has no JSON form; these have: {', '.join(_KINDS)}")


def from_json(data: object) -> Any:
    """Inverse of `to_json`. Raises CodecError for anything that `to_json` cannot have made."""
    if not isinstance(data, Mapping) or "reshard" not in data:
        raise CodecError("this JSON holds no layout or plan: the key 'reshard' is missing")
    version = data.get("version")
    if version != VERSION:
        raise CodecError(f"this {data['reshard']!r} is of version {version!r}; this library reads version {VERSION}")
    kind = _KINDS.get(data["reshard"])
    if kind is None:
        raise CodecError(f"unknown kind {data['reshard']!r}; known are: {', '.join(_KINDS)}")
    try:
        return kind.decode(data)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise CodecError(f"this {data['reshard']!r} is malformed or was edited: {error}") from error


def dumps(value: object, *, indent: int | None = None) -> str:
    """JSON text of a mesh, layout or plan. `loads` gives an equal value back."""
    return json.dumps(to_json(value), indent=indent, separators=None if indent else (",", ":"))


def loads(text: str | bytes) -> Any:
    """The value that `dumps` wrote.

    Raises CodecError for a text that is no JSON, of another version, or edited so that it no longer holds together;
    a plan whose items were listed explicitly is verified.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise CodecError(f"not JSON: {error}") from error
    return from_json(data)


def form_to_json(form: Form) -> dict[str, Any]:
    if isinstance(form, ProductForm):
        return {"mesh": str(form.mesh), "placements": ",".join(map(str, form.placements))}
    if isinstance(form, BoxesForm):
        rows = [[rank, [[list(box.offsets), list(box.sizes)] for box in its]] for rank, its in form.boxes]
        return {"boxes": rows, "world_size": form.world_size}
    if isinstance(form, FlatForm):
        return {"flat": [list(row) for row in form.ranges], "world_size": form.world_size}
    raise CodecError(f"a {type(form).__name__} has no JSON form")


def form_from_json(data: Mapping[str, Any]) -> Form:
    if "mesh" in data:
        return ProductForm.make(Mesh.parse(data["mesh"]), parse_placements(data["placements"]))
    if "boxes" in data:
        return BoxesForm.make({rank: [Box(*box) for box in its] for rank, its in data["boxes"]}, data["world_size"])
    return FlatForm.make({rank: (start, stop) for rank, start, stop in data["flat"]}, data["world_size"])


def _state_json(state: StateLayout) -> dict[str, Any]:
    forms: dict[Form, int] = {}
    tensors = {
        fqn: [layout.spec.dtype, list(layout.spec.shape), forms.setdefault(layout.form, len(forms))]
        for fqn, layout in state.items()
    }
    return {"world_size": state.world_size, "forms": [form_to_json(form) for form in forms], "tensors": tensors}


def _state(data: Mapping[str, Any]) -> StateLayout:
    forms = [form_from_json(form) for form in data["forms"]]
    tensors = {}
    for fqn, (dtype, shape, form) in data["tensors"].items():
        if not 0 <= form < len(forms):
            raise CodecError(f"form {form} of {len(forms)} does not exist", fqn=fqn)
        tensors[fqn] = TensorLayout.of(TensorSpec(fqn, shape, dtype), forms[form])
    return StateLayout(tensors, data["world_size"])


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
    plan = LoadPlan(_state(data["saved"]), _state(data["wanted"]), _items(data["items"]), views)
    _same_digest(data, _load_digest(plan))
    _proven(plan, "load plan")
    return plan


def _load_digest(plan: LoadPlan) -> str:
    """Of all that a plan is made for: both layouts, and the views between them."""
    views = hashlib.sha256(json.dumps(_views_json(plan.views.values()), sort_keys=True).encode()).hexdigest()
    return plan.saved.digest() + plan.wanted.digest() + (views if plan.views else "")


def _save_plan(data: Mapping[str, Any]) -> SavePlan:
    plan = SavePlan(_state(data["layout"]), data["divide_above_bytes"], data["ranks_per_host"])
    _same_digest(data, plan.layout.digest())
    return plan


def _transfer_json(plan: TransferPlan) -> dict[str, Any]:
    return {
        "digest": plan.before.digest() + plan.after.digest(),
        "before": _state_json(plan.before),
        "after": _state_json(plan.after),
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
    before, after, missing = _state(data["before"]), _state(data["after"]), set(data["missing"])
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
    from planners.proof import verify

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


def _tensor(data: Mapping[str, Any]) -> TensorLayout:
    return TensorLayout.of(TensorSpec(data["fqn"], data["shape"], data["dtype"]), form_from_json(data["form"]))


def _topology(data: Mapping[str, Any]) -> Topology:
    rules = [Rule.parse(pattern, text, optional) for pattern, text, optional in data["rules"]]
    homes = [Home.parse(pattern, text, optional) for pattern, text, optional in data["homes"]]
    return Topology(Mesh.parse(data["mesh"]), tuple(rules), tuple(homes), tuple(data["even"]))


_KINDS: dict[str, _Kind] = {
    "mesh": _Kind(Mesh, lambda m: {"mesh": str(m)}, lambda d: Mesh.parse(d["mesh"])),
    "tensor_layout": _Kind(
        TensorLayout,
        lambda t: {
            "fqn": t.fqn,
            "shape": list(t.spec.shape),
            "dtype": t.spec.dtype,
            "form": form_to_json(t.form),
        },
        _tensor,
    ),
    "state_layout": _Kind(StateLayout, _state_json, _state),
    "topology": _Kind(
        Topology,
        lambda t: {
            "mesh": str(t.mesh),
            "rules": [[rule.pattern, rule.text, rule.optional] for rule in t.rules],
            "homes": [[home.pattern, home.text, home.optional] for home in t.homes],
            "even": list(t.even),
        },
        _topology,
    ),
    "view": _Kind(View, lambda v: _views_json([v]), _view),
    "load_plan": _Kind(
        LoadPlan,
        lambda p: {
            "digest": _load_digest(p),
            "saved": _state_json(p.saved),
            "wanted": _state_json(p.wanted),
            "views": _views_json(p.views.values()),
            "items": _items_json(p),
        },
        _load_plan,
    ),
    "save_plan": _Kind(
        SavePlan,
        lambda p: {
            "digest": p.layout.digest(),
            "layout": _state_json(p.layout),
            "divide_above_bytes": p.divide_above_bytes,
            "ranks_per_host": p.ranks_per_host,
        },
        _save_plan,
    ),
    "transfer_plan": _Kind(TransferPlan, _transfer_json, _transfer_plan),
    "schedule": _Kind(Schedule, _schedule_json, _schedule),
    "cluster": _Kind(
        Cluster, _cluster_json, lambda d: Cluster(**{name: d[name] for name in Cluster.__slots__ if name in d})
    ),
    "estimate": _Kind(Estimate, _estimate_json, _estimate),
}
