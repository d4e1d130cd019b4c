"""`verify`: is this layout or plan right? Exact, cheap enough to be always on, and concrete about what is wrong.

Where the form is a product, each dim is proved on its own: if the segments of every dim tile what each owner holds
exactly once and agree on global coordinates, so do their products. Everything else is listed and swept.
"""

from __future__ import annotations

from collections.abc import Iterator

from planners.errors import PlanError
from planners.findings import Finding, Report
from planners.geometry.box import Box
from planners.geometry.layout import StateLayout, TensorLayout
from planners.geometry.overlap import tiling_fault
from planners.plans.copies import CopyPlan, verify_copies
from planners.plans.load import LoadPlan, verify_load
from planners.plans.rounds import Schedule, verify_schedule, verify_transfer
from planners.plans.save import SavePlan, verify_save
from planners.plans.transfer import TransferPlan

__all__ = ["verify"]


def verify(subject: object) -> Report:
    """Prove a layout or plan right, or say what is wrong with it. The report's `covers` says what "right" is. That a
    layout is the one that was meant is never said: `Topology.uncut_axes` tells of axes that cut nothing.

    A layout is right if its regions tile every tensor, each element once per group of replicas. A load plan is right
    if every wanted element is written exactly once, from the saved element with the same global coordinates (or the one
    that a view makes it of), out of a chunk that its owner holds, or is a constant that a view declares. A save plan
    is right if every element is written exactly once, by a rank that holds it. A transfer plan is right if every needed
    element arrives exactly once, from a rank that holds it. A schedule is right if its plan is, if no rank sends to two
    or receives from two in one round, if its budget is kept, and if every byte of the plan travels once. A plan of
    copies is right if what each rank writes is on so many other hosts.

    Raises PlanError for a value of which nothing can be proved.
    """
    if isinstance(subject, TensorLayout):
        subject = StateLayout({subject.fqn: subject})
    if isinstance(subject, StateLayout):
        covers = "its regions tile every tensor, each element once per group of replicas"
        return Report(repr(subject), tuple(_layout_findings(subject)), len(subject), covers=covers)
    if isinstance(subject, LoadPlan):
        return verify_load(subject)
    if isinstance(subject, SavePlan):
        return verify_save(subject)
    if isinstance(subject, TransferPlan):
        return verify_transfer(subject)
    if isinstance(subject, Schedule):
        return verify_schedule(subject)
    if isinstance(subject, CopyPlan):
        return verify_copies(subject)
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
