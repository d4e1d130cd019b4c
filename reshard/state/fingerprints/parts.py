"""`Partial`: what one part of a tensor adds to its fingerprint, and how parts become the fingerprint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from planners.geometry.box import Box
from reshard.errors import FormatError, LayoutError
from reshard.state.dtypes import dtype_from_name, dtype_name
from reshard.state.fingerprints.fold import Sums, Term, add_sums, fold, fold_each, known, terms
from reshard.state.fingerprints.keys import LANES, PRIME, PUBLIC, Key
from reshard.state.fingerprints.words import Positions, float64_is_exact, local_parts, words_of

__all__ = ["Fingerprinter", "Partial", "comparable", "partial", "partials"]

_VERSION = "rf1"
_LANE_BYTES = 6
_COUNT_BYTES = 8
_WORD_BYTES = 4
_SMALL_BYTES = 64 << 10
_BATCH_WORDS = 1 << 16
"""Of small tensors that are summed up together: as float64 they stay in the cache."""


@dataclass(frozen=True)
class Partial:
    """The sum over some elements of a tensor. Adding those of disjoint parts, in any order, gives the whole tensor's.

    >>> a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0])
    >>> partial(a, Box((0,), (2,)), (3,)) + partial(b, Box((2,), (1,)), (3,)) == partial(torch.tensor([1.0, 2.0, 3.0]))
    True
    """

    sums: Sums = (0,) * LANES
    """One number of the field per lane."""
    count: int = 0
    """How many elements were added."""

    def __post_init__(self) -> None:
        if len(self.sums) != LANES or not all(0 <= lane < PRIME for lane in self.sums) or self.count < 0:
            raise FormatError(f"no partial fingerprint: sums {self.sums} of {self.count} elements")

    def __add__(self, other: Partial) -> Partial:
        return Partial(add_sums(self.sums, other.sums), self.count + other.count)

    @classmethod
    def total(cls, partials: Iterable[Partial]) -> Partial:
        """Their sum; of none, the partial of no elements."""
        partials = list(partials)
        return cls(add_sums(*(p.sums for p in partials)), sum(p.count for p in partials))

    def to_bytes(self) -> bytes:
        """20 bytes that another rank can read. Inverse of `from_bytes`."""
        return b"".join(s.to_bytes(_LANE_BYTES, "little") for s in self.sums) + self.count.to_bytes(
            _COUNT_BYTES, "little"
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Partial:
        """Inverse of `to_bytes`. Raises FormatError."""
        if len(data) != LANES * _LANE_BYTES + _COUNT_BYTES:
            raise FormatError(f"a partial fingerprint has {LANES * _LANE_BYTES + _COUNT_BYTES} bytes, got {len(data)}")
        lanes = [data[i * _LANE_BYTES : (i + 1) * _LANE_BYTES] for i in range(LANES)]
        return cls(
            tuple(int.from_bytes(lane, "little") for lane in lanes),
            int.from_bytes(data[LANES * _LANE_BYTES :], "little"),
        )

    def digest(self, dtype: torch.dtype | str, shape: Sequence[int], *, key: Key = PUBLIC) -> str:
        """The fingerprint, such as `"rf1:bfloat16[4096,1024]:0123456789ab0123456789ab"`.

        Raises:
            LayoutError: the parts hold more or fewer elements than a tensor of this shape: one is missing, or one of
                several replicas was counted twice.
        """
        name = dtype if isinstance(dtype, str) else dtype_name(dtype)
        numel = math.prod(shape)
        if self.count != numel:
            raise LayoutError(
                f"the parts of a fingerprint hold {self.count} elements, but shape {tuple(shape)} has {numel}: "
                f"{'a part is missing' if self.count < numel else 'a part was counted twice'}"
            )
        head = f"{_VERSION}.{key.name}" if key.name else _VERSION
        return f"{head}:{name}[{','.join(map(str, shape))}]:{''.join(f'{lane:012x}' for lane in self.sums)}"


def partial(
    tensor: torch.Tensor, positions: Positions = None, shape: Sequence[int] | None = None, *, key: Key = PUBLIC
) -> Partial:
    """What a local tensor adds to the fingerprint of the global tensor of `shape`.

    Without positions the tensor is the whole. Each replica's part must be added once only. Any device, any strides;
    extra memory is at most 50 MiB on the CPU and 200 MiB on other devices, however large the tensor.

    Raises:
        LayoutError: positions that do not fit the shapes.
        FormatError: a tensor that is not dense, has no data, or whose elements are no plain numbers.
    """
    return partials([(tensor, positions, shape)], key=key)[0]


def partials(
    parts: Iterable[tuple[torch.Tensor, Positions, Sequence[int] | None]], *, key: Key = PUBLIC
) -> list[Partial]:
    """`partial` of each (tensor, positions, shape). Devices are asked for all of them, and then waited for once; small
    tensors of the host that lie alike are summed up together."""
    given = list(parts)
    together: dict[tuple[object, ...], list[int]] = {}
    for i, (tensor, positions, shape) in enumerate(given):
        if (kind := _small_kind(tensor, positions, shape)) is not None:
            together.setdefault(kind, []).append(i)
    out: list[Partial | None] = [None] * len(given)
    with torch.no_grad():
        for alike in together.values():
            if len(alike) > 1:
                for i, found in zip(alike, _small_partials([given[i] for i in alike], key), strict=True):
                    out[i] = found
        begun = {i: _Begun.of(*given[i], key) for i, done in enumerate(out) if done is None}
        under_way: dict[torch.device, list[Term]] = {}
        for term in (term for each in begun.values() for term in each.terms):
            under_way.setdefault(term.digits.device, []).append(term)
        ended = {device: iter(known(asked)) for device, asked in under_way.items()}
    return [begun[i].end(ended) if done is None else done for i, done in enumerate(out)]


def _small_kind(tensor: torch.Tensor, positions: Positions, shape: Sequence[int] | None) -> tuple[object, ...] | None:
    """What small tensors have in common that can be seen as whole words, and are summed up alike; None for others."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
        return None
    if tensor.device.type != "cpu" or not 0 < tensor.nbytes <= _SMALL_BYTES or not tensor.is_contiguous():
        return None
    if tensor.is_conj() or tensor.is_neg():
        return None
    itemsize = tensor.itemsize
    ends = (0, tensor.shape[-1] if tensor.ndim else 1, tensor.storage_offset())
    if isinstance(positions, Box) and positions.sizes == tensor.shape and positions.sizes:
        ends = (positions.offsets[-1], positions.stops[-1], tensor.storage_offset())
    elif positions is not None and not (isinstance(positions, Box) and positions.sizes == tensor.shape):
        return None
    if any(end * itemsize % _WORD_BYTES for end in ends):
        return None
    return tensor.dtype, tensor.shape, positions, shape if shape is None else tuple(shape)


def _small_partials(
    alike: Sequence[tuple[torch.Tensor, Positions, Sequence[int] | None]], key: Key
) -> Iterator[Partial]:
    """Of tensors of one small kind. Raises as `partial` does."""
    tensor, positions, shape = alike[0]
    _refuse(tensor)
    ((piece, part),) = local_parts(tensor, positions, tuple(tensor.shape) if shape is None else tuple(shape))
    ((words, axes),) = words_of(piece, part)
    step = max(1, _BATCH_WORDS // words.numel())
    for start in range(0, len(alike), step):
        # one element may have any stride, and the tensor is contiguous all the same
        rows = [one.detach().as_strided((one.numel(),), (1,)).view(torch.int32) for one, _, _ in alike[start:][:step]]
        for sums in fold_each(torch.stack(rows), axes, key):
            yield Partial(sums, tensor.numel())


class _Begun(NamedTuple):
    """One fingerprint under way: what is known of it, and what a device has been asked."""

    sums: Sums
    terms: list[Term]
    numel: int

    @classmethod
    def of(cls, tensor: torch.Tensor, positions: Positions, shape: Sequence[int] | None, key: Key) -> _Begun:
        """Raises as `partial` does."""
        shape = tuple(tensor.shape) if shape is None else tuple(shape)
        _refuse(tensor)
        pieces = local_parts(tensor, positions, shape)
        words = (found for piece, part in pieces for found in words_of(piece, part))
        numel = sum(piece.numel() for piece, _ in pieces)
        if tensor.device.type == "cpu" or not float64_is_exact(tensor.device):
            return cls(add_sums(*(fold(piece, axes, key) for piece, axes in words)), [], numel)
        return cls(add_sums(), [term for piece, axes in words for term in terms(piece, axes, key)], numel)

    def end(self, ended: Mapping[torch.device, Iterator[Sums]]) -> Partial:
        """`ended`: the sums of all terms, in the order in which they were begun."""
        return Partial(add_sums(self.sums, *(next(ended[term.digits.device]) for term in self.terms)), self.numel)


def _refuse(tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise FormatError(
            f"a {kind} tensor of shape {tuple(tensor.shape)} has no plain elements to take a fingerprint of"
        )
    dtype_name(tensor.dtype)


def comparable(a: str, b: str) -> bool:
    """Whether two fingerprints are of the same version and key, so that they are equal where the tensors are."""
    return a.split(":", 1)[0] == b.split(":", 1)[0]


class Fingerprinter:
    """The fingerprint of one tensor that comes in boxes, in any order, each once: for readers of large files."""

    def __init__(self, dtype: torch.dtype | str, shape: Sequence[int], *, key: Key = PUBLIC) -> None:
        self.dtype = dtype_from_name(dtype) if isinstance(dtype, str) else dtype
        self.shape = tuple(shape)
        self.key = key
        self.partial = Partial()

    def add(self, tensor: torch.Tensor, positions: Positions = None) -> None:
        """Add what lies at these positions. Raises as `partial` does, and LayoutError for another dtype."""
        if tensor.dtype != self.dtype:
            raise LayoutError(f"a part of dtype {tensor.dtype} does not belong to a tensor of dtype {self.dtype}")
        self.partial += partial(tensor, positions, self.shape, key=self.key)

    def add_bytes(self, data: bytes | bytearray | memoryview, box: Box) -> None:
        """Add a box whose elements lie row-major in `data`. Raises LayoutError if their lengths differ."""
        if memoryview(data).nbytes != box.numel * self.dtype.itemsize:
            raise LayoutError(
                f"{box} holds {box.numel} elements of {self.dtype.itemsize} bytes, got {memoryview(data).nbytes} bytes"
            )
        if not box.is_empty:
            raw = np.frombuffer(data, np.uint8)
            raw = raw if raw.flags.writeable else raw.copy()  # torch has no read-only tensors
            self.add(torch.from_numpy(raw).view(self.dtype).view(box.sizes), box)

    def digest(self) -> str:
        """The fingerprint. Raises LayoutError if elements are missing or were added twice."""
        return self.partial.digest(self.dtype, self.shape, key=self.key)
