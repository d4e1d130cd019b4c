"""How conversions write the native format."""

from __future__ import annotations

from reshard.formats.format import Writing
from reshard.native.writer import NativeWriter

WRITING = Writing(NativeWriter, is_sharded=True, is_split=True)
