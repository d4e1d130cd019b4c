"""In-memory checkpoints, for jobs that lose and gain hosts. See docs/elastic.md."""

from typing import TYPE_CHECKING

from reshard.api.elastic import *  # noqa: F403
from reshard.api.elastic import __all__ as __all__
from reshard.errors import renamed_in

if not TYPE_CHECKING:
    __getattr__ = renamed_in(__name__, {"KeepReport": "TierSaveReport", "RecoverReport": "TierRestoreReport"})
