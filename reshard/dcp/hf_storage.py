"""torch's own: storages of safetensors files in Hugging Face's layout; the writer leaves no files of older saves."""

import re
from functools import partial
from typing import Any

from torch.distributed.checkpoint import hf_storage as _torch
from torch.distributed.checkpoint.hf_storage import *  # noqa: F403

__getattr__ = partial(getattr, _torch)

_WRITTEN = re.compile(r"(shard-\d+-)?model-\d+-of-\d+\.safetensors")
"""How torch's writer calls its files."""


class HuggingFaceStorageWriter(_torch.HuggingFaceStorageWriter):  # type: ignore[no-redef]
    """torch's. What it wrote before into the same folder, from other ranks or into other files, is removed: readers
    would take it for parts of this checkpoint."""

    def finish(self, metadata: Any, results: Any) -> None:
        """On one rank, when all have written."""
        self._remove_others(self.path, {one.storage_data.relative_path for rank in results for one in rank})
        if whole := getattr(self, "consolidated_output_path", None):
            self._remove_others(whole, set())  # they are written next
        super().finish(metadata, results)

    def _remove_others(self, folder: Any, written: set[str]) -> None:
        for file in map(str, self.fs.ls(folder)):
            name = file.rpartition("/")[2]
            if _WRITTEN.fullmatch(name) and name not in written:
                self.fs.rm_file(self.fs.concat_path(folder, name))
