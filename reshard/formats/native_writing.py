"""How the library's own format is written, like all others: by conversions."""

from __future__ import annotations

from reshard.formats.format import Writing
from reshard.native.writer import NativeWriter

WRITING = Writing(NativeWriter, is_sharded=True, is_split=True)
