"""Drop-in replacement for `torch.distributed.checkpoint` (DCP), with the same names and signatures.
Change one import and keep the rest:

    import reshard.dcp as dcp          # was: import torch.distributed.checkpoint as dcp
    from reshard.dcp.state_dict import get_model_state_dict

Submodules have torch's names, too. The interfaces (`StorageReader`, `StorageWriter`, `LoadPlanner`,
`SavePlanner`, `Stateful`, and the plan items) are torch's own classes. Third-party planners and
storages therefore work here, and the classes defined here work with torch's `save` and `load`. Each
library reads the checkpoints that the other writes. `load` also reads every other format that
`reshard.open` reads.
"""

from functools import partial as _partial

from torch.distributed import checkpoint as _torch
from torch.distributed.checkpoint.api import CheckpointException as CheckpointException
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata as BytesStorageMetadata,
    ChunkStorageMetadata as ChunkStorageMetadata,
    Metadata as Metadata,
    TensorStorageMetadata as TensorStorageMetadata,
)
from torch.distributed.checkpoint.optimizer import (
    load_sharded_optimizer_state_dict as load_sharded_optimizer_state_dict,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan as LoadPlan,
    LoadPlanner as LoadPlanner,
    ReadItem as ReadItem,
    SavePlan as SavePlan,
    SavePlanner as SavePlanner,
    WriteItem as WriteItem,
)
from torch.distributed.checkpoint.stateful import Stateful as Stateful
from torch.distributed.checkpoint.storage import StorageReader as StorageReader, StorageWriter as StorageWriter

from reshard.dcp.default_planner import (
    DefaultLoadPlanner as DefaultLoadPlanner,
    DefaultSavePlanner as DefaultSavePlanner,
)
from reshard.dcp.engine.newer_names import newer_or_torchs
from reshard.dcp.filesystem import FileSystemReader as FileSystemReader, FileSystemWriter as FileSystemWriter
from reshard.dcp.format_utils import (
    BroadcastingTorchSaveReader as BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner as DynamicMetaLoadPlanner,
    dcp_to_torch_save as dcp_to_torch_save,
    torch_save_to_dcp as torch_save_to_dcp,
)
from reshard.dcp.hf_storage import HuggingFaceStorageWriter as HuggingFaceStorageWriter
from reshard.dcp.state_dict_loader import load as load, load_state_dict as load_state_dict
from reshard.dcp.state_dict_saver import async_save as async_save, save as save, save_state_dict as save_state_dict

__all__ = [name for name in vars(_torch) if not name.startswith("_")]

__getattr__ = newer_or_torchs
__dir__ = _partial(sorted, __all__)
