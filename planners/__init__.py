"""Plans for moving sharded tensors between layouts: pure geometry, with numpy and networkx only.

Everything here is a function of plain values: no torch, no files, no processes, no clock.

Each name is imported on first use, as in `reshard`: a load needs a third of the modules. So no module may have the name
of a function; importing it would hide the function.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from planners.notebooks import draw_pages_with

if TYPE_CHECKING:
    from planners.errors import CodecError, CoverageError, LayoutMismatchError, PlanError, ProofError
    from planners.findings import Finding, Report
    from planners.geometry.box import Box
    from planners.geometry.byte_ranges import ByteRuns, Window
    from planners.geometry.layout import StateLayout, TensorLayout, TensorSpec
    from planners.geometry.mesh import BlockShard, Mesh, Placement, Replicate, Shard, StridedShard
    from planners.geometry.topologies import (
        LLAMA_TP_DIMS,
        Home,
        Rule,
        Topology,
        ddp,
        even_ranges,
        expert_parallel,
        flat_layouts,
        flat_offsets,
        fsdp,
        fsdp_tp,
        hsdp,
        pipelined,
    )
    from planners.geometry.views import View, concat, inverse, stack, viewed
    from planners.plans.codec import dumps, loads
    from planners.plans.copy_peers import CopyPlan, plan_copies
    from planners.plans.cost import Cluster, Comparison, Estimate, compare_topologies, estimate
    from planners.plans.load import FillItem, LoadPlan, ReadItem, ReadItems, plan_reads
    from planners.plans.plan import verify
    from planners.plans.relay import plan_relay
    from planners.plans.save import SavePlan, WriteItem, WriteItems, plan_writes
    from planners.plans.schedule import Message, Schedule, schedule
    from planners.plans.transfer import TransferItem, TransferItems, TransferPlan, plan_transfers
    from planners.reports.text import PlanDiff, PlanStats, diff, explain, format_plan, summarize
    from planners.testing.replay import replay

_PUBLIC = {
    "errors": "CodecError CoverageError LayoutMismatchError PlanError ProofError",
    "findings": "Finding Report",
    "geometry.box": "Box",
    "geometry.byte_ranges": "ByteRuns Window",
    "geometry.layout": "StateLayout TensorLayout TensorSpec",
    "geometry.mesh": "BlockShard Mesh Placement Replicate Shard StridedShard",
    "geometry.topologies": (
        "Home LLAMA_TP_DIMS Rule Topology ddp even_ranges expert_parallel flat_layouts flat_offsets fsdp "
        "fsdp_tp hsdp pipelined"
    ),
    "geometry.views": "View concat inverse stack viewed",
    "plans.codec": "dumps loads",
    "plans.copy_peers": "CopyPlan plan_copies",
    "plans.cost": "Cluster Comparison Estimate compare_topologies estimate",
    "plans.load": "FillItem LoadPlan ReadItem ReadItems plan_reads",
    "plans.plan": "verify",
    "plans.schedule": "Message Schedule schedule",
    "plans.save": "SavePlan WriteItem WriteItems plan_writes",
    "plans.relay": "plan_relay",
    "plans.transfer": "TransferItem TransferItems TransferPlan plan_transfers",
    "reports.text": "PlanDiff PlanStats diff explain format_plan summarize",
    "testing.replay": "replay",
}
"""The public names of each module."""

_HOME = {name: module for module, names in _PUBLIC.items() for name in names.split()}

__all__ = [
    "LLAMA_TP_DIMS", "BlockShard", "Box", "ByteRuns", "Cluster", "CodecError", "Comparison", "CopyPlan",
    "CoverageError", "Estimate", "FillItem", "Finding", "Home", "LayoutMismatchError", "LoadPlan", "Mesh", "Message",
    "Placement", "PlanDiff", "PlanError", "PlanStats", "ProofError", "ReadItem", "ReadItems", "Replicate", "Report",
    "Rule", "SavePlan", "Schedule", "Shard", "StateLayout", "StridedShard", "TensorLayout", "TensorSpec", "Topology",
    "TransferItem", "TransferItems", "TransferPlan", "View", "Window", "WriteItem", "WriteItems",
    "compare_topologies", "concat", "ddp", "diff", "dumps", "estimate", "even_ranges", "expert_parallel", "explain",
    "flat_layouts", "flat_offsets", "format_plan", "fsdp", "fsdp_tp", "hsdp", "inverse", "loads", "pipelined",
    "plan_copies", "plan_reads", "plan_relay", "plan_transfers", "plan_writes", "replay", "schedule", "stack",
    "summarize", "verify", "viewed",
]  # fmt: skip


if not TYPE_CHECKING:  # which would take any name for one of ours

    def __getattr__(name: str) -> Any:
        if name == "to_html":
            from planners.errors import warn_renamed

            warn_renamed("planners.to_html(plan)", "plan.to_html()")
            return _page_of
        if name not in _HOME:
            from planners.errors import did_you_mean

            raise AttributeError(f"module 'planners' has no attribute {name!r}{did_you_mean(name, _HOME)}")
        value = getattr(importlib.import_module(f"planners.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def _page_of(plan: Any, **options: Any) -> str:
    from planners.reports.plan_pages import to_html

    return to_html(plan, **options)


def _text_of(plan: Any) -> str:
    from planners.reports.text import format_plan

    return format_plan(plan, items=False)


draw_pages_with(_page_of, _text_of)


def __dir__() -> list[str]:
    return sorted(__all__)
