"""Plans for moving sharded tensors between layouts: pure geometry, with numpy and networkx only.

Everything here is a function of plain values: no torch, no files, no processes, no clock.

Names are imported when first used, as those of `reshard` are: a load needs a third of the modules. So no module may
have the name of a function, which it would hide as soon as it is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from planners.notebooks import draw_pages_with

if TYPE_CHECKING:
    from planners.errors import CodecError, CoverageError, LayoutMismatchError, PlanError, ProofError
    from planners.findings import Finding, Report
    from planners.geometry.box import Box
    from planners.geometry.byteruns import ByteRuns, Window
    from planners.geometry.layout import StateLayout, TensorLayout, TensorSpec
    from planners.geometry.mesh import Mesh
    from planners.geometry.placement import BlockShard, Placement, Replicate, Shard, StridedShard
    from planners.load.plan import FillItem, LoadPlan, ReadItem, ReadItems, plan_reads
    from planners.proof import verify
    from planners.reports.codec import dumps, loads
    from planners.reports.cost import Cluster, Comparison, Estimate, compare_topologies, estimate
    from planners.reports.diff import PlanDiff, diff
    from planners.reports.html import to_html
    from planners.reports.summary import PlanStats, summarize
    from planners.reports.text import explain, format_plan
    from planners.save.copies import CopyPlan, plan_copies
    from planners.save.plan import SavePlan, WriteItem, WriteItems, plan_writes
    from planners.testing.replay import replay
    from planners.topologies.flat_buffers import even_ranges, flat_layouts, flat_offsets
    from planners.topologies.presets import LLAMA_TP_DIMS, ddp, expert_parallel, fsdp, fsdp_tp, hsdp, pipelined
    from planners.topologies.topology import Home, Rule, Topology
    from planners.transfer.hierarchical import plan_relay
    from planners.transfer.plan import TransferItem, TransferItems, TransferPlan, plan_transfers
    from planners.transfer.rounds import Message, Schedule, schedule
    from planners.views.view import View, concat, inverse, stack, viewed

_PUBLIC = {
    "errors": "CodecError CoverageError LayoutMismatchError PlanError ProofError",
    "findings": "Finding Report",
    "geometry.box": "Box",
    "geometry.byteruns": "ByteRuns Window",
    "geometry.layout": "StateLayout TensorLayout TensorSpec",
    "geometry.mesh": "Mesh",
    "geometry.placement": "BlockShard Placement Replicate Shard StridedShard",
    "load.plan": "FillItem LoadPlan ReadItem ReadItems plan_reads",
    "proof": "verify",
    "reports.codec": "dumps loads",
    "reports.cost": "Cluster Comparison Estimate compare_topologies estimate",
    "reports.diff": "PlanDiff diff",
    "reports.html": "to_html",
    "reports.summary": "PlanStats summarize",
    "reports.text": "explain format_plan",
    "save.copies": "CopyPlan plan_copies",
    "save.plan": "SavePlan WriteItem WriteItems plan_writes",
    "testing.replay": "replay",
    "topologies.flat_buffers": "even_ranges flat_layouts flat_offsets",
    "topologies.presets": "LLAMA_TP_DIMS ddp expert_parallel fsdp fsdp_tp hsdp pipelined",
    "topologies.topology": "Home Rule Topology",
    "transfer.hierarchical": "plan_relay",
    "transfer.plan": "TransferItem TransferItems TransferPlan plan_transfers",
    "transfer.rounds": "Message Schedule schedule",
    "views.view": "View concat inverse stack viewed",
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
    "summarize", "to_html", "verify", "viewed",
]  # fmt: skip


if not TYPE_CHECKING:  # which would take any name for one of ours

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            from difflib import get_close_matches

            near = get_close_matches(name, _HOME, n=1)
            meant = f": did you mean {near[0]!r}?" if near else ""
            raise AttributeError(f"module 'planners' has no attribute {name!r}{meant}")
        value = getattr(importlib.import_module(f"planners.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def _page_of(plan: Any) -> str:
    from planners.reports.html import to_html

    return to_html(plan)


draw_pages_with(_page_of)


def __dir__() -> list[str]:
    return sorted(__all__)
