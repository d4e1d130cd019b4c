"""Plans for moving sharded tensors between layouts: pure geometry, with numpy and networkx only.

Everything here is a function of plain values: no torch, no files, no processes, no clock.
"""

from planners.box import Box as Box
from planners.byteruns import ByteRuns as ByteRuns
from planners.byteruns import Window as Window
from planners.codec import dumps as dumps
from planners.codec import loads as loads
from planners.errors import CodecError as CodecError
from planners.errors import CoverageError as CoverageError
from planners.errors import LayoutMismatchError as LayoutMismatchError
from planners.errors import PlanError as PlanError
from planners.errors import ProofError as ProofError
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
from planners.proof import Finding as Finding
from planners.proof import Report as Report
from planners.proof import verify as verify
from planners.render import format_plan as format_plan
from planners.replay import replay as replay
from planners.save_plan import SavePlan as SavePlan
from planners.save_plan import WriteItem as WriteItem
from planners.save_plan import WriteItems as WriteItems
from planners.save_plan import plan_writes as plan_writes
from planners.schedule import Message as Message
from planners.schedule import Schedule as Schedule
from planners.schedule import schedule as schedule
from planners.transfer_plan import TransferItem as TransferItem
from planners.transfer_plan import TransferItems as TransferItems
from planners.transfer_plan import TransferPlan as TransferPlan
from planners.transfer_plan import plan_transfers as plan_transfers
from planners.view import View as View
from planners.view import concat as concat
from planners.view import inverse as inverse
from planners.view import stack as stack
from planners.view import viewed as viewed
