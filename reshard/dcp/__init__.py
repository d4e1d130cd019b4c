"""The engine behind the names and signatures of `torch.distributed.checkpoint`: change one import and keep the rest.

    import reshard.dcp as dcp          # was: import torch.distributed.checkpoint as dcp

The interfaces (`StorageReader`, `StorageWriter`, `LoadPlanner`, `SavePlanner`, `Stateful` and the plan items) are
torch's own classes, so third-party planners and storages work here, and those defined here work under torch's `save`
and `load`. What is written is what torch reads, and the other way round; `load` reads all formats of `reshard.open`.
"""

from torch.distributed.checkpoint.planner import LoadPlan as LoadPlan
from torch.distributed.checkpoint.planner import LoadPlanner as LoadPlanner
from torch.distributed.checkpoint.planner import ReadItem as ReadItem
from torch.distributed.checkpoint.planner import SavePlan as SavePlan
from torch.distributed.checkpoint.planner import SavePlanner as SavePlanner
from torch.distributed.checkpoint.planner import WriteItem as WriteItem
from torch.distributed.checkpoint.stateful import Stateful as Stateful
from torch.distributed.checkpoint.storage import StorageReader as StorageReader
from torch.distributed.checkpoint.storage import StorageWriter as StorageWriter

from reshard.dcp.files import BroadcastingTorchSaveReader as BroadcastingTorchSaveReader
from reshard.dcp.files import dcp_to_torch_save as dcp_to_torch_save
from reshard.dcp.files import torch_save_to_dcp as torch_save_to_dcp
from reshard.dcp.load_planners import DefaultLoadPlanner as DefaultLoadPlanner
from reshard.dcp.load_planners import DynamicMetaLoadPlanner as DynamicMetaLoadPlanner
from reshard.dcp.loading import load as load
from reshard.dcp.loading import load_state_dict as load_state_dict
from reshard.dcp.reader import FileSystemReader as FileSystemReader
from reshard.dcp.save_planner import DefaultSavePlanner as DefaultSavePlanner
from reshard.dcp.saving import async_save as async_save
from reshard.dcp.saving import save as save
from reshard.dcp.saving import save_state_dict as save_state_dict
from reshard.dcp.writer import FileSystemWriter as FileSystemWriter
