"""The items of DCP files: what a byte range of a `.distcp` file holds, and where in it the elements are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from planners.geometry.box import Box
from planners.geometry.layout import TensorSpec
from reshard.errors import DamagedCheckpointError, FormatError, ReshardError
from reshard.formats.pickles.reader import load_pickle
from reshard.formats.pickles.torch_objects import plain
from reshard.formats.safetensors.header import Header, looks_like_header, read_header
from reshard.formats.stored.source import DecodedSource, Files, FileSource, Source
from reshard.formats.stored.tensor import Place
from reshard.formats.torch_save.file import TorchFile
from reshard.formats.torch_save.zip_archive import ZIP_MAGIC, TorchArchive, locate_item, read_head
from reshard.state.dtypes import dtype_from_name

__all__ = ["Item", "Items", "Undo"]

Undo = Callable[[tuple[str, ...], int, bytes], bytes]
"""(descriptors of transforms, as they are to be undone; the most bytes that may come out; the bytes of an item) -> what
was transformed."""

_MOST_BYTES = 1 << 28
"""The most that an object, or what surrounds a tensor, may have once it is decompressed."""
_PIECE_BYTES = 1 << 14


@dataclass(frozen=True, slots=True)
class Item:
    """A byte range of a file, and the transforms that its bytes went through, the last one first."""

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()

    @property
    def stop(self) -> int:
        """One past its last byte."""
        return self.offset + self.length


class Items:
    """Looks into the items of one checkpoint."""

    def __init__(self, files: Files, folder: str, undo: Undo | None = None) -> None:
        """`undo`: of transforms that the caller knows; without it, zstandard is known."""
        self._files, self._undo = files, undo
        self._folder = folder
        self._slot = DecodedSource.Slot()
        self._headers: dict[str, Header | None] = {}

    def locator(self, spec: TensorSpec, box: Box, item: Item) -> Callable[[], Place]:
        """A function that finds where the elements of the chunk `box` of a tensor are."""

        def locate() -> Place:
            try:
                dtype_from_name(spec.dtype)  # which the item asks for by name, and this torch may not have
                place, dtype = self._locate(spec, box, item)
            except ReshardError as error:
                raise type(error)(f"tensor {spec.fqn!r}, chunk {box}: {error}") from None
            if dtype != spec.dtype:
                raise DamagedCheckpointError(
                    f"tensor {spec.fqn!r}, chunk {box}: .metadata says {spec.dtype}, but {item.file} holds {dtype} at "
                    f"byte {item.offset}; the checkpoint contradicts itself"
                )
            if place.window.sizes != box.sizes:
                raise DamagedCheckpointError(
                    f"tensor {spec.fqn!r}, chunk {box}: .metadata says shape {list(box.sizes)}, but {item.file} holds "
                    f"{list(place.window.sizes)} at byte {item.offset}; the checkpoint contradicts itself"
                )
            return place

        return locate

    def object(self, key: str, item: Item | None) -> Any:
        """A non-tensor item, as plain data. Raises DamagedCheckpointError or UnsafeDataError."""
        if item is None:
            raise DamagedCheckpointError(f"the object {key!r} is in no file of the checkpoint")
        source, start, length = self._payload(item, _MOST_BYTES)
        try:
            if bytes(source.read(start, min(4, length))) == ZIP_MAGIC:
                return TorchArchive(source, start, length).object()
            return plain(load_pickle(source.read(start, length), where=source.label))
        except ReshardError as error:
            raise type(error)(f"object {key!r}: {error}") from None

    def file(self, key: str, item: Item | None) -> TorchFile:
        """A non-tensor item as a file of `torch.save`, whose tensors are not read. Raises DamagedCheckpointError."""
        if item is None:
            raise DamagedCheckpointError(f"the object {key!r} is in no file of the checkpoint")
        source, start, length = self._payload(item, _MOST_BYTES)
        archive = TorchArchive(source, start, length)
        return TorchFile(source, archive.value(), archive.place)

    def _payload(self, item: Item, most_bytes: int) -> tuple[Source, int, int]:
        """The bytes of an item, with transforms undone; damage if these are more than `most_bytes`."""
        file = self._files[self._folder + item.file]
        if not item.transforms:
            return file, item.offset, item.length
        if len(item.transforms) == 1 and item.transforms[0].startswith("stream.zstd"):
            decode = partial(_unzstd, most_bytes)
        elif self._undo is not None:
            decode = partial(self._undo, item.transforms, most_bytes)
        else:
            raise FormatError(
                f"{file.label}: the transforms {list(item.transforms)} are not known; known is stream.zstd, and what "
                "is registered in reshard.dcp.FileSystemReader(_extension_registry=...)"
            )
        source = DecodedSource(file, item.offset, item.length, ", ".join(item.transforms), decode, self._slot)
        return source, 0, source.nbytes

    def _locate(self, spec: TensorSpec, box: Box, item: Item) -> tuple[Place, str]:
        key = spec.fqn
        source, start, length = self._payload(item, _MOST_BYTES + 2 * box.numel * spec.itemsize)
        header = self._headers.get(source.name) if isinstance(source, FileSource) else None
        if header is None:
            head = read_head(source, start, length)
            if not head.startswith(ZIP_MAGIC) and isinstance(source, FileSource):
                header = self._header(source)
            if header is None:
                return locate_item(source, start, length, head)
        if key not in header.entries:
            raise DamagedCheckpointError(f"{source.label}: this safetensors file has no tensor {key!r}")
        said = header.saved_offsets().get(key)
        if said is not None and tuple(said) != box.offsets:
            # torch keeps one chunk of a key in a file, and loses the others
            raise DamagedCheckpointError(
                f"{source.label}: it holds the chunk of {key!r} at {said}, not at {box.offsets}"
            )
        return header.place(key), header.entries[key].dtype

    def _header(self, source: FileSource) -> Header | None:
        """The header, if the file as a whole is a safetensors file; DCP's own offsets mean nothing then."""
        if source.name not in self._headers:
            head = bytes(source.read(0, min(9, source.nbytes)))
            self._headers[source.name] = read_header(source) if looks_like_header(head, source.nbytes) else None
        return self._headers[source.name]


def _unzstd(most_bytes: int, data: bytes) -> bytes:
    try:
        import zstandard
    except ImportError:
        raise FormatError("these items are compressed by zstd: install the extra reshard[zstd] to read them") from None
    try:
        reader = zstandard.ZstdDecompressor().decompressobj()
        pieces, size = [], 0
        for start in range(0, len(data), _PIECE_BYTES):
            pieces.append(reader.decompress(data[start : start + _PIECE_BYTES]))
            size += len(pieces[-1])
            if size > most_bytes:  # a few bytes can stand for very many
                raise DamagedCheckpointError(f"a zstd item holds more than the {most_bytes} bytes that it may need")
        if not reader.eof:
            raise DamagedCheckpointError("a zstd item is cut short")
        return b"".join(pieces)
    except zstandard.ZstdError as error:
        raise DamagedCheckpointError(f"a zstd item is damaged: {error}") from None
