"""`verify`: is this layout or plan right? Exact, cheap enough to be always on, and concrete about what is wrong.

Where the form is a product, each dim is proved on its own: if the segments of every dim tile what each owner holds
exactly once and agree on global coordinates, so do their products. Everything else is listed and swept.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

from planners.box import Box
from planners.cover import tiling_fault
from planners.errors import PlanError
from planners.findings import Finding, Report
from planners.layout import StateLayout, TensorLayout

__all__ = ["Finding", "Report", "verify"]


def verify(subject: object) -> Report:
    """Prove a layout or plan right, or say what is wrong with it.

    A layout is right if its regions tile every tensor, each element once per group of replicas. A load plan is right
    if every wanted element is written exactly once, from the saved element with the same global coordinates (or the one
    that a view makes it of), out of a chunk that its owner holds, or is a constant that a view declares. A save plan
    is right if every element is written exactly once, by a rank that holds it. A transfer plan is right if every needed
    element arrives exactly once, from a rank that holds it. A schedule is right if its plan is, if no rank sends to two
    or receives from two in one round, if its budget is kept, and if every byte of the plan travels once.

    Raises PlanError for a value of which nothing can be proved.
    """
    if isinstance(subject, TensorLayout):
        subject = StateLayout({subject.fqn: subject})
    if isinstance(subject, StateLayout):
        return Report(repr(subject), tuple(_layout_findings(subject)), len(subject))
    for kind in type(subject).__mro__:
        judge = _JUDGES.get(f"{kind.__module__}.{kind.__qualname__}")
        if judge is not None:
            module, function, tensors = judge
            findings = getattr(importlib.import_module(f"planners.{module}"), function)
            return Report(repr(subject), tuple(findings(subject)), tensors(subject))
    raise PlanError(f"cannot verify a {type(subject).__name__}: give a layout or a plan")


def _layout_findings(layout: StateLayout) -> Iterator[Finding]:
    for names in layout.geometries().values():
        first = layout[names[0]]
        if first.product is not None:
            wrong = _product_fault(first)
        else:
            fault = tiling_fault([Box.full(first.spec.shape)], [box for _, box in first.chunks()])
            wrong = (fault.element, str(fault)) if fault is not None else None
        if wrong is not None:
            yield from (Finding(wrong[1], fqn, None, wrong[0]) for fqn in names)


def _product_fault(layout: TensorLayout) -> tuple[tuple[int, ...], str] | None:
    product = layout.product
    assert product is not None
    for d, own in enumerate(product.dims):
        wrong = own.uncovered()
        if wrong is not None:
            index = [0] * len(layout.spec.shape)
            index[d] = wrong[0]
            return tuple(index), f"index {wrong[0]} of dim {d} {wrong[1]}"
    return None


_JUDGES: dict[str, tuple[str, str, Callable[[Any], int]]] = {
    "planners.load_plan.LoadPlan": ("load_proof", "load_findings", lambda plan: len(plan.wanted)),
    "planners.save_plan.SavePlan": ("save_proof", "save_findings", lambda plan: len(plan.layout)),
    "planners.transfer_plan.TransferPlan": ("transfer_proof", "transfer_findings", lambda plan: len(plan.names)),
    "planners.scheduling.Schedule": ("transfer_proof", "schedule_findings", lambda rounds: len(rounds.plan.names)),
}
"""Class of the subject -> where its findings come from, and how many tensors it has.

By name, since a module is imported only when one of its plans is to be proved."""
