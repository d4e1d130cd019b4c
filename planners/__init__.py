"""Plans for moving sharded tensors between layouts: pure geometry, with numpy and networkx only.

Everything here is a function of plain values: no torch, no files, no processes, no clock.

Names are imported when first used, as those of `reshard` are: a load needs a third of the modules. So no module may
have the name of a function, which it would hide as soon as it is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "BlockShard": "geometry.placement",
    "Box": "geometry.box",
    "ByteRuns": "geometry.byteruns",
    "Cluster": "reports.cost",
    "CodecError": "errors",
    "Comparison": "reports.cost",
    "CoverageError": "errors",
    "Estimate": "reports.cost",
    "FillItem": "load.plan",
    "Finding": "findings",
    "Home": "topologies.topology",
    "LLAMA_TP_DIMS": "topologies.presets",
    "LayoutMismatchError": "errors",
    "LoadPlan": "load.plan",
    "Mesh": "geometry.mesh",
    "Message": "transfer.rounds",
    "Placement": "geometry.placement",
    "PlanDiff": "reports.diff",
    "PlanError": "errors",
    "PlanStats": "reports.summary",
    "ProofError": "errors",
    "ReadItem": "load.plan",
    "ReadItems": "load.plan",
    "Replicate": "geometry.placement",
    "Report": "findings",
    "Rule": "topologies.topology",
    "SavePlan": "save.plan",
    "Schedule": "transfer.rounds",
    "Shard": "geometry.placement",
    "StateLayout": "geometry.layout",
    "StridedShard": "geometry.placement",
    "TensorLayout": "geometry.layout",
    "TensorSpec": "geometry.layout",
    "Topology": "topologies.topology",
    "TransferItem": "transfer.plan",
    "TransferItems": "transfer.plan",
    "TransferPlan": "transfer.plan",
    "View": "views.view",
    "Window": "geometry.byteruns",
    "WriteItem": "save.plan",
    "WriteItems": "save.plan",
    "compare_topologies": "reports.cost",
    "concat": "views.view",
    "ddp": "topologies.presets",
    "diff": "reports.diff",
    "dumps": "reports.codec",
    "estimate": "reports.cost",
    "even_ranges": "topologies.flat_buffers",
    "expert_parallel": "topologies.presets",
    "explain": "reports.text",
    "flat_layouts": "topologies.flat_buffers",
    "flat_offsets": "topologies.flat_buffers",
    "format_plan": "reports.text",
    "fsdp": "topologies.presets",
    "fsdp_tp": "topologies.presets",
    "hsdp": "topologies.presets",
    "inverse": "views.view",
    "loads": "reports.codec",
    "pipelined": "topologies.presets",
    "plan_reads": "load.plan",
    "plan_relay": "transfer.hierarchical",
    "plan_transfers": "transfer.plan",
    "plan_writes": "save.plan",
    "replay": "testing.replay",
    "schedule": "transfer.rounds",
    "stack": "views.view",
    "summarize": "reports.summary",
    "to_html": "reports.html",
    "verify": "proof",
    "viewed": "views.view",
}
"""Where each public name lives."""

__all__ = list(_HOME)

if TYPE_CHECKING:
    from planners.errors import CodecError as CodecError
    from planners.errors import CoverageError as CoverageError
    from planners.errors import LayoutMismatchError as LayoutMismatchError
    from planners.errors import PlanError as PlanError
    from planners.errors import ProofError as ProofError
    from planners.findings import Finding as Finding
    from planners.findings import Report as Report
    from planners.geometry.box import Box as Box
    from planners.geometry.byteruns import ByteRuns as ByteRuns
    from planners.geometry.byteruns import Window as Window
    from planners.geometry.layout import StateLayout as StateLayout
    from planners.geometry.layout import TensorLayout as TensorLayout
    from planners.geometry.layout import TensorSpec as TensorSpec
    from planners.geometry.mesh import Mesh as Mesh
    from planners.geometry.placement import BlockShard as BlockShard
    from planners.geometry.placement import Placement as Placement
    from planners.geometry.placement import Replicate as Replicate
    from planners.geometry.placement import Shard as Shard
    from planners.geometry.placement import StridedShard as StridedShard
    from planners.load.plan import FillItem as FillItem
    from planners.load.plan import LoadPlan as LoadPlan
    from planners.load.plan import ReadItem as ReadItem
    from planners.load.plan import ReadItems as ReadItems
    from planners.load.plan import plan_reads as plan_reads
    from planners.proof import verify as verify
    from planners.reports.codec import dumps as dumps
    from planners.reports.codec import loads as loads
    from planners.reports.cost import Cluster as Cluster
    from planners.reports.cost import Comparison as Comparison
    from planners.reports.cost import Estimate as Estimate
    from planners.reports.cost import compare_topologies as compare_topologies
    from planners.reports.cost import estimate as estimate
    from planners.reports.diff import PlanDiff as PlanDiff
    from planners.reports.diff import diff as diff
    from planners.reports.html import to_html as to_html
    from planners.reports.summary import PlanStats as PlanStats
    from planners.reports.summary import summarize as summarize
    from planners.reports.text import explain as explain
    from planners.reports.text import format_plan as format_plan
    from planners.save.plan import SavePlan as SavePlan
    from planners.save.plan import WriteItem as WriteItem
    from planners.save.plan import WriteItems as WriteItems
    from planners.save.plan import plan_writes as plan_writes
    from planners.testing.replay import replay as replay
    from planners.topologies.flat_buffers import even_ranges as even_ranges
    from planners.topologies.flat_buffers import flat_layouts as flat_layouts
    from planners.topologies.flat_buffers import flat_offsets as flat_offsets
    from planners.topologies.presets import LLAMA_TP_DIMS as LLAMA_TP_DIMS
    from planners.topologies.presets import ddp as ddp
    from planners.topologies.presets import expert_parallel as expert_parallel
    from planners.topologies.presets import fsdp as fsdp
    from planners.topologies.presets import fsdp_tp as fsdp_tp
    from planners.topologies.presets import hsdp as hsdp
    from planners.topologies.presets import pipelined as pipelined
    from planners.topologies.topology import Home as Home
    from planners.topologies.topology import Rule as Rule
    from planners.topologies.topology import Topology as Topology
    from planners.transfer.hierarchical import plan_relay as plan_relay
    from planners.transfer.plan import TransferItem as TransferItem
    from planners.transfer.plan import TransferItems as TransferItems
    from planners.transfer.plan import TransferPlan as TransferPlan
    from planners.transfer.plan import plan_transfers as plan_transfers
    from planners.transfer.rounds import Message as Message
    from planners.transfer.rounds import Schedule as Schedule
    from planners.transfer.rounds import schedule as schedule
    from planners.views.view import View as View
    from planners.views.view import concat as concat
    from planners.views.view import inverse as inverse
    from planners.views.view import stack as stack
    from planners.views.view import viewed as viewed


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'planners' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"planners.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
