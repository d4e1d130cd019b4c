"""Re-exports torch's storages for Hugging Face files. The writer here also deletes files of earlier saves.

The reader is torch's own. It does not detect changed bytes: the files have no checksums.
"""

import json
import logging
import re
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import hf_storage as _torch
from torch.distributed.checkpoint.hf_storage import *  # noqa: F403

__getattr__ = partial(getattr, _torch)

_log = logging.getLogger("reshard")
_WRITTEN = re.compile(r"(shard-\d+-)?model-\d+-of-\d+\.safetensors")
"""Names that torch's writer gives its files."""


class HuggingFaceStorageWriter(_torch.HuggingFaceStorageWriter):  # type: ignore[no-redef]
    """torch's writer, which also deletes files of an earlier save that the new one does not
    replace. Readers would take them for parts of this checkpoint. It deletes them once the new
    files are complete, and logs a warning with their names."""

    def finish(self, metadata: Any, results: Any) -> None:
        """Finish the save. One rank calls it after all ranks have written."""
        written = {one.storage_data.relative_path for rank in results for one in rank}
        self._remove_others(self.path, written)  # before all files are consolidated
        super().finish(metadata, results)
        if whole := getattr(self, "consolidated_output_path", None):
            names = Path(whole, _torch._metadata_fn)  # type: ignore[attr-defined]
            index = json.loads(names.read_text(encoding="utf-8"))
            self._remove_others(whole, set(index["weight_map"].values()))

    def _remove_others(self, folder: Any, written: set[str]) -> None:
        for file in map(str, self.fs.ls(folder)):
            name = file.rpartition("/")[2]
            if _WRITTEN.fullmatch(name) and name not in written:
                _log.warning("%s: %s was left by an earlier save, and was deleted", folder, name)
                self.fs.rm_file(self.fs.concat_path(folder, name))
