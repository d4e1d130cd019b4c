"""Plans for moving sharded tensors between layouts: pure geometry, with numpy and networkx only.

Everything here is a function of plain values: no torch, no files, no processes, no clock.

Names are imported when first used, as those of `reshard` are: a load needs a third of the modules. So no module may
have the name of a function, which it would hide as soon as it is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "BlockShard": "placement",
    "Box": "box",
    "ByteRuns": "byteruns",
    "Cluster": "cost",
    "CodecError": "errors",
    "Comparison": "cost",
    "CoverageError": "errors",
    "Estimate": "cost",
    "FillItem": "load_plan",
    "Finding": "findings",
    "Home": "topology",
    "LLAMA_TP_DIMS": "presets",
    "LayoutMismatchError": "errors",
    "LoadPlan": "load_plan",
    "Mesh": "mesh",
    "Message": "scheduling",
    "Placement": "placement",
    "PlanDiff": "differences",
    "PlanError": "errors",
    "PlanStats": "stats",
    "ProofError": "errors",
    "ReadItem": "load_plan",
    "ReadItems": "load_plan",
    "Replicate": "placement",
    "Report": "findings",
    "Rule": "topology",
    "SavePlan": "save_plan",
    "Schedule": "scheduling",
    "Shard": "placement",
    "StateLayout": "layout",
    "StridedShard": "placement",
    "TensorLayout": "layout",
    "TensorSpec": "layout",
    "Topology": "topology",
    "TransferItem": "transfer_plan",
    "TransferItems": "transfer_plan",
    "TransferPlan": "transfer_plan",
    "View": "view",
    "Window": "byteruns",
    "WriteItem": "save_plan",
    "WriteItems": "save_plan",
    "compare_topologies": "cost",
    "concat": "view",
    "ddp": "presets",
    "diff": "differences",
    "dumps": "codec",
    "estimate": "cost",
    "even_ranges": "flat",
    "expert_parallel": "presets",
    "explain": "render",
    "flat_layouts": "flat",
    "flat_offsets": "flat",
    "format_plan": "render",
    "fsdp": "presets",
    "fsdp_tp": "presets",
    "hsdp": "presets",
    "inverse": "view",
    "loads": "codec",
    "pipelined": "presets",
    "plan_reads": "load_plan",
    "plan_relay": "relay",
    "plan_transfers": "transfer_plan",
    "plan_writes": "save_plan",
    "replay": "replaying",
    "schedule": "scheduling",
    "stack": "view",
    "summarize": "stats",
    "to_html": "html",
    "verify": "proof",
    "viewed": "view",
}
"""Where each public name lives."""

__all__ = list(_HOME)

if TYPE_CHECKING:
    from planners.box import Box as Box
    from planners.byteruns import ByteRuns as ByteRuns
    from planners.byteruns import Window as Window
    from planners.codec import dumps as dumps
    from planners.codec import loads as loads
    from planners.cost import Cluster as Cluster
    from planners.cost import Comparison as Comparison
    from planners.cost import Estimate as Estimate
    from planners.cost import compare_topologies as compare_topologies
    from planners.cost import estimate as estimate
    from planners.differences import PlanDiff as PlanDiff
    from planners.differences import diff as diff
    from planners.errors import CodecError as CodecError
    from planners.errors import CoverageError as CoverageError
    from planners.errors import LayoutMismatchError as LayoutMismatchError
    from planners.errors import PlanError as PlanError
    from planners.errors import ProofError as ProofError
    from planners.findings import Finding as Finding
    from planners.findings import Report as Report
    from planners.flat import even_ranges as even_ranges
    from planners.flat import flat_layouts as flat_layouts
    from planners.flat import flat_offsets as flat_offsets
    from planners.html import to_html as to_html
    from planners.layout import StateLayout as StateLayout
    from planners.layout import TensorLayout as TensorLayout
    from planners.layout import TensorSpec as TensorSpec
    from planners.load_plan import FillItem as FillItem
    from planners.load_plan import LoadPlan as LoadPlan
    from planners.load_plan import ReadItem as ReadItem
    from planners.load_plan import ReadItems as ReadItems
    from planners.load_plan import plan_reads as plan_reads
    from planners.mesh import Mesh as Mesh
    from planners.placement import BlockShard as BlockShard
    from planners.placement import Placement as Placement
    from planners.placement import Replicate as Replicate
    from planners.placement import Shard as Shard
    from planners.placement import StridedShard as StridedShard
    from planners.presets import LLAMA_TP_DIMS as LLAMA_TP_DIMS
    from planners.presets import ddp as ddp
    from planners.presets import expert_parallel as expert_parallel
    from planners.presets import fsdp as fsdp
    from planners.presets import fsdp_tp as fsdp_tp
    from planners.presets import hsdp as hsdp
    from planners.presets import pipelined as pipelined
    from planners.proof import verify as verify
    from planners.relay import plan_relay as plan_relay
    from planners.render import explain as explain
    from planners.render import format_plan as format_plan
    from planners.replaying import replay as replay
    from planners.save_plan import SavePlan as SavePlan
    from planners.save_plan import WriteItem as WriteItem
    from planners.save_plan import WriteItems as WriteItems
    from planners.save_plan import plan_writes as plan_writes
    from planners.scheduling import Message as Message
    from planners.scheduling import Schedule as Schedule
    from planners.scheduling import schedule as schedule
    from planners.stats import PlanStats as PlanStats
    from planners.stats import summarize as summarize
    from planners.topology import Home as Home
    from planners.topology import Rule as Rule
    from planners.topology import Topology as Topology
    from planners.transfer_plan import TransferItem as TransferItem
    from planners.transfer_plan import TransferItems as TransferItems
    from planners.transfer_plan import TransferPlan as TransferPlan
    from planners.transfer_plan import plan_transfers as plan_transfers
    from planners.view import View as View
    from planners.view import concat as concat
    from planners.view import inverse as inverse
    from planners.view import stack as stack
    from planners.view import viewed as viewed


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'planners' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"planners.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
