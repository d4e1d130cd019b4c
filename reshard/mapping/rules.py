"""Rules: each builds tensors under new names from tensors under old ones. A rule is a value. Most have an
inverse.

    Rename("layers.{i}.attention.wo.weight", "model.layers.{i}.self_attn.o_proj.weight")
    Concat(["{l+}.gate_proj.weight", "{l+}.up_proj.weight"], "{l+}.gate_up_proj.weight", parts=(1, 1))
    Stack("{l+}.experts.{e}.w1.weight", "{l+}.experts.w1", over="e")

A rule describes its targets as views: `build` converts views of the sources to views of the
targets, which a plan resolves to byte ranges.
"""

from __future__ import annotations

import copy
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, ClassVar

from planners.geometry.box import Shape
from planners.geometry.layout import TensorSpec
from planners.geometry.views import View, concat, stack
from reshard.errors import NormalizationError
from reshard.live.dtypes import full_name
from reshard.mapping.dequantize import dequantized, mxfp4
from reshard.mapping.mapped_tensors import cast, is_floating, offset
from reshard.stored.tensor import StoredTensor

Names = Sequence[str] | str


@dataclass(frozen=True, init=False)
class Rule(ABC):
    """How to build new tensors, the targets of the rule, from stored ones. Equal rules compare
    equal and have the same hash."""

    sources: tuple[Pattern, ...]
    targets: tuple[Pattern, ...]
    optional: ClassVar[bool] = False
    """True: names stay the same if a source is missing. False: that is an error."""
    fill: float | None = field(default=None, repr=False, kw_only=True)
    """Value for optimizer states that some of the sources lack. None: a missing state is an error."""

    @abstractmethod
    def build(self, views: Sequence[View]) -> list[View]:
        """Return views of the targets, in order. Raises PlanError for shapes that do not fit."""

    @abstractmethod
    def inverse(self) -> Rule:
        """Return the rule that builds the sources from the targets. Raises NormalizationError if
        there is no inverse."""

    def _set(
        self,
        sources: Names,
        targets: Names,
        *,
        sources_over: str | None = None,
        targets_over: str | None = None,
        **values: Any,
    ) -> None:
        """Set the frozen fields. `sources_over` and `targets_over` are the placeholders that number them."""
        for name, value in values.items():
            object.__setattr__(self, name, value)
        for side, names, over in (("sources", sources, sources_over), ("targets", targets, targets_over)):
            texts = (names,) if isinstance(names, str) or not isinstance(names, Iterable) else names
            if odd := [text for text in texts if not isinstance(text, str)]:
                raise NormalizationError(f"names in rules must be strings, such as Rename('a', 'b'): got {odd[0]!r}")
            object.__setattr__(self, side, tuple(Pattern(text, over) for text in texts))
        self._check_words()

    def __str__(self) -> str:
        """Return its patterns, as in the call."""
        sides = (", ".join(repr(pattern.text) for pattern in side) for side in (self.sources, self.targets))
        return f"{type(self).__name__}({' -> '.join(sides)})"

    def _check_words(self) -> None:
        """Raise NormalizationError if a target has a placeholder that no source has, or the sources
        have different placeholders."""
        if "*" in str(self):
            raise NormalizationError(
                f"{self}: rules have placeholders in place of *: {{x}} for one segment of a name, {{x+}} for several, "
                "as in Rename('model.{x+}', 'net.{x+}')"
            )
        words = {word for pattern in self.sources for word in pattern.words}
        for pattern in self.targets:
            unknown = set(pattern.words) - words - {pattern.number}
            if unknown:
                raise NormalizationError(f"{self}: no source defines {{{min(unknown)}}} in {pattern.text!r}")
        for pattern in self.sources[1:]:
            if set(pattern.words) != set(self.sources[0].words):
                raise NormalizationError(f"{self}: all sources must have the same placeholders")

    def renamed(self, change: Callable[[str], str]) -> Rule:
        """Return the same rule with other names. `change` is called with the text of each pattern."""
        made = copy.copy(self)
        for side in ("sources", "targets"):
            patterns = tuple(Pattern(change(p.text), p.number) for p in getattr(self, side))
            object.__setattr__(made, side, patterns)
        made._check_words()
        return made

    def _swapped(self, kind: Callable[..., Rule], *settings: Any) -> Rule:
        """Return a rule of this kind from the target to the source."""
        return kind(self.targets[0].text, self.sources[0].text, *settings)

    @property
    def over(self) -> str | None:
        """The placeholder that numbers the sources of one target, or the targets of one source."""
        return self.sources[0].number or (self.targets[0].number if self.targets else None)

    @property
    def numbers_targets(self) -> bool:
        """Whether `over` numbers the targets of one source."""
        return bool(self.targets) and self.targets[0].number is not None


@lru_cache(maxsize=4096)
def views_of(rule: Rule, shapes: tuple[Shape, ...], dtype: str) -> tuple[View, ...]:
    """Return the targets of a rule, as views of sources "0", "1", ... Cached, because many tensors
    have the same shapes."""
    return tuple(rule.build([View.of(TensorSpec(str(i), shape, dtype)) for i, shape in enumerate(shapes)]))


@dataclass(frozen=True, init=False)
class Rename(Rule):
    """Gives a tensor another name. Also renames a plain value if `source` is its full name."""

    def __init__(self, source: str, target: str) -> None:
        self._set(source, target)

    def build(self, views: Sequence[View]) -> list[View]:
        return list(views)

    def inverse(self) -> Rule:
        return self._swapped(Rename)


Rules = list[Rule]


def renames(names: Mapping[str, str], source: str = "", target: str = "") -> Rules:
    """Return rules that rename each key of a table to its value, with a prefix on either side."""
    return [Rename(source + old, target + new) for old, new in names.items()]


@dataclass(frozen=True, init=False)
class Drop(Rule):
    """Omits tensors, such as rotary tables and quantization state. Also omits a plain value if
    `source` is its full name. The inverse cannot restore them."""

    def __init__(self, source: str) -> None:
        self._set(source, ())

    def build(self, views: Sequence[View]) -> list[View]:
        return []

    def inverse(self) -> Rule:
        raise NormalizationError(f"{self.sources[0].text!r} is dropped, and the inverse cannot restore it")


@dataclass(frozen=True, init=False)
class Concat(Rule):
    """Concatenates tensors along `dim`. With `groups`, it does so group by group, as Megatron
    fuses query groups: `[q q q q k k v v]` with one group, and `[q q k v  q q k v]` with two.

    `parts` are the relative sizes of the tensors, such as (4, 1, 1). Only the inverse needs them.
    If you pass them, they are checked.
    """

    parts: tuple[int, ...]
    groups: int
    dim: int

    def __init__(
        self, sources: Sequence[str], target: str, parts: Sequence[int] = (), groups: int = 1, dim: int = 0
    ) -> None:
        self._set(sources, target, parts=tuple(parts), groups=groups, dim=dim)
        _check_parts(self, len(self.sources))

    def build(self, views: Sequence[View]) -> list[View]:
        name = views[0].spec.fqn
        sizes = [_size(view, self.dim) for view in views]
        if self.parts and any(size * sum(self.parts) != part * sum(sizes) for size, part in zip(sizes, self.parts)):
            raise NormalizationError(f"sizes {sizes} of dim {self.dim} are not in proportion to parts {self.parts}")
        if self.groups == 1:
            return [concat(name, views, self.dim)]
        rows = [self._even(view) for view in views]
        return [concat(name, [row[g] for g in range(self.groups) for row in rows], self.dim)]

    def _even(self, view: View) -> list[View]:
        size = _size(view, self.dim)
        if size % self.groups:
            raise NormalizationError(
                f"dim {self.dim} of shape {view.shape} cannot be split into {self.groups} equal groups"
            )
        step = size // self.groups
        return [view.reorder([(start, start + step)], self.dim) for start in range(0, size, step)]

    def inverse(self) -> Rule:
        if not self.parts:
            raise NormalizationError(f"{self}: pass parts=, the relative sizes, so that the rule has an inverse")
        return Split(self.targets[0].text, [p.text for p in self.sources], self.parts, self.groups, self.dim)


@dataclass(frozen=True, init=False)
class Split(Rule):
    """Splits a tensor along `dim` into parts of these relative sizes. Inverse of `Concat`."""

    parts: tuple[int, ...]
    groups: int
    dim: int

    def __init__(
        self, source: str, targets: Sequence[str], parts: Sequence[int], groups: int = 1, dim: int = 0
    ) -> None:
        self._set(source, targets, parts=tuple(parts), groups=groups, dim=dim)
        _check_parts(self, len(self.targets), needed=True)

    def build(self, views: Sequence[View]) -> list[View]:
        view, total = views[0], sum(self.parts)
        size = _size(view, self.dim)
        if size % (total * self.groups):
            raise NormalizationError(
                f"dim {self.dim} of shape {view.shape} cannot be split into {self.groups} groups of parts {self.parts}"
            )
        unit = size // (total * self.groups)
        out: list[View] = []
        for number in range(len(self.parts)):
            before, mine = sum(self.parts[:number]) * unit, self.parts[number] * unit
            starts = [group * total * unit + before for group in range(self.groups)]
            out.append(view.reorder([(start, start + mine) for start in starts], self.dim))
        return out

    def inverse(self) -> Rule:
        return Concat([p.text for p in self.targets], self.sources[0].text, self.parts, self.groups, self.dim)


@dataclass(frozen=True, init=False)
class Stack(Rule):
    """Stacks tensors that `over` numbers along a new dim `dim`, such as experts or layers.

    An expert that received no token has no optimizer state. For such experts, pass `fill=`, the
    value of the missing elements. Optimizers initialize their state with 0. The step count is that
    of the other experts.
    """

    dim: int
    fill: float | None

    def __init__(self, source: str, target: str, over: str, dim: int = 0, fill: float | None = None) -> None:
        self._set(source, target, sources_over=over, dim=dim, fill=fill)
        if over not in self.sources[0].words or over in self.targets[0].words:
            raise NormalizationError(f"{{{over}}} must be in {source!r} and not in {target!r}")

    def build(self, views: Sequence[View]) -> list[View]:
        return [stack(views[0].spec.fqn, views, self.dim)]

    def inverse(self) -> Rule:
        return self._swapped(Unstack, self.over, self.dim, self.fill)


@dataclass(frozen=True, init=False)
class Unstack(Rule):
    """Splits dim `dim` into separate tensors that `over` numbers. The inverse of this rule is a
    `Stack`, which uses `fill`.

    Filled values stay: if the stack has an optimizer state, every part gets it.
    """

    dim: int
    fill: float | None

    def __init__(self, source: str, target: str, over: str, dim: int = 0, fill: float | None = None) -> None:
        self._set(source, target, targets_over=over, dim=dim, fill=fill)
        if over in self.sources[0].words or over not in self.targets[0].words:
            raise NormalizationError(f"{{{over}}} must be in {target!r} and not in {source!r}")

    def build(self, views: Sequence[View]) -> list[View]:
        view = views[0]
        return list(view.unstack([str(i) for i in range(_size(view, self.dim))], self.dim))

    def inverse(self) -> Rule:
        return self._swapped(Stack, self.over, self.dim, self.fill)


@dataclass(frozen=True, init=False)
class Transpose(Rule):
    """Reorders dims. Default: swaps the last two."""

    dims: tuple[int, ...]

    def __init__(self, source: str, target: str, dims: Sequence[int] = ()) -> None:
        self._set(source, target, dims=tuple(dims))
        if sorted(self.dims) != list(range(len(self.dims))):
            raise NormalizationError(f"{self}: dims must be an order of all dims, counted from 0, got {self.dims}")

    def build(self, views: Sequence[View]) -> list[View]:
        view = views[0]
        n = len(view.shape)
        return [view.transpose(*(self.dims or (*range(n - 2), n - 1, n - 2)))]

    def inverse(self) -> Rule:
        return self._swapped(Transpose, tuple(self.dims.index(d) for d in range(len(self.dims))))


@dataclass(frozen=True, init=False)
class Reshape(Rule):
    """Changes the shape from `old` to `new`, and keeps elements in row-major order. Use it, for
    example, if heads are a separate dim.

        Reshape("{l+}.query.kernel", "{l+}.q_proj.weight", old=(-1, 8, 64), new=(-1, 512))

    One size in each may be -1. In `old`, it matches any size. In `new`, it is inferred.
    """

    old: Shape
    new: Shape

    def __init__(self, source: str, target: str, old: Sequence[int], new: Sequence[int]) -> None:
        self._set(source, target, old=tuple(old), new=tuple(new))
        for shape in (self.old, self.new):
            if shape.count(-1) > 1 or any(size < 1 and size != -1 for size in shape):
                raise NormalizationError(f"a shape has sizes >= 1, and -1 at most once; got {shape}")

    def build(self, views: Sequence[View]) -> list[View]:
        view = views[0]
        if len(view.shape) != len(self.old) or any(o not in (-1, n) for o, n in zip(self.old, view.shape)):
            raise NormalizationError(f"the shape {view.shape} is not {self.old}")
        total, known = math.prod(view.shape), math.prod(size for size in self.new if size != -1)
        new = tuple(total // known if size == -1 else size for size in self.new)
        if math.prod(new) != total:
            raise NormalizationError(f"the {total} elements of shape {view.shape} do not make up {self.new}")
        return [_reshaped(view, new)]

    def inverse(self) -> Rule:
        return self._swapped(Reshape, self.new, self.old)


@dataclass(frozen=True, init=False)
class Resize(Rule):
    """Changes the size of `dim` from `old` to `new`. Adds rows of zeros at its end, or removes
    rows from its end.

    If rows are removed, the inverse adds zeros. So it is exact only if the rows were zeros, such
    as the padding of a vocabulary. A tensor whose dim already has the size `new` stays the same.
    """

    old: int
    new: int
    dim: int

    def __init__(self, source: str, target: str, old: int, new: int, dim: int = 0) -> None:
        self._set(source, target, old=old, new=new, dim=dim)

    def build(self, views: Sequence[View]) -> list[View]:
        view = views[0]
        size = _size(view, self.dim)
        if size not in (self.old, self.new):
            raise NormalizationError(f"dim {self.dim} of shape {view.shape} should have {self.old} elements")
        if size >= self.new:
            return [view.reorder([(0, self.new)], self.dim)]
        return [view.pad([(0, self.new - size if d == self.dim else 0) for d in range(len(view.shape))])]

    def inverse(self) -> Rule:
        return self._swapped(Resize, self.new, self.old, self.dim)


@dataclass(frozen=True, init=False)
class Rope(Rule):
    """Converts the rows of query or key weights between the two rotary conventions: pairs (x0 y0
    x1 y1) and halves (x0 x1 y0 y1).

    The rows of each head, `head_size` in number, are permuted separately. `to` is "halves"
    (Hugging Face) or "pairs".
    """

    head_size: int
    to: str

    def __init__(self, source: str, target: str, head_size: int, to: str) -> None:
        if to not in ("halves", "pairs"):
            raise NormalizationError(f"rotary rows become 'halves' or 'pairs', not {to!r}")
        self._set(source, target, head_size=head_size, to=to)

    def build(self, views: Sequence[View]) -> list[View]:
        view = views[0]
        change = view.halves_from_pairs if self.to == "halves" else view.pairs_from_halves
        return [change(self.head_size)]

    def inverse(self) -> Rule:
        return self._swapped(Rope, self.head_size, "pairs" if self.to == "halves" else "halves")


def _reshaped(view: View, new: Shape) -> View:
    """Return the view with shape `new`, row-major. Common leading and trailing dims stay. The dims
    between are merged, and then split."""
    old = view.shape
    same = next((i for i, (a, b) in enumerate(zip(old, new)) if a != b), min(len(old), len(new)))
    last = next((i for i, (a, b) in enumerate(zip(old[:same:-1], new[:same:-1])) if a != b), None)
    if last is None:
        last = min(len(old), len(new)) - same - 1
    last = max(last, 0)
    if len(old) - last == same:  # only dims of size 1 are added, or nothing changes
        return view.rearrange([*range(same), *[None] * (len(new) - len(old)), *range(same, len(old))])
    for _ in range(len(old) - last - same - 1):
        view = view.merge_dims(same)
    wanted = new[same : len(new) - last]
    if not wanted:
        return view.rearrange([d for d in range(len(view.shape)) if d != same])
    for number, size in enumerate(wanted[:-1]):
        view = view.split_dim((size, math.prod(wanted[number + 1 :])), same + number)
    return view


def _size(view: View, dim: int) -> int:
    if not 0 <= dim < len(view.shape):
        raise NormalizationError(f"there is no dim {dim} in the shape {view.shape}: dims count from 0")
    return view.shape[dim]


def _check_parts(rule: Concat | Split, count: int, needed: bool = False) -> None:
    parts = rule.parts
    if rule.groups < 1:
        raise NormalizationError(f"{rule}: groups must be >= 1, got {rule.groups}")
    if (parts or needed) and (len(parts) != count or any(part < 1 for part in parts)):
        raise NormalizationError(f"{count} tensors need as many parts, each >= 1, got {parts}")


# Rules whose targets are computed: their elements are not those of the sources.


_MASTERS = ("fp32_param", "master_param", "fp32", "param")
"""States that are the parameter in a wider dtype, as named by Megatron, TransformerEngine, and DeepSpeed."""


class Computing(Rule):
    """A rule that computes its single target when it is read. It has no views, so plans from
    metadata alone cannot use it."""

    @abstractmethod
    def compute(self, sources: Sequence[StoredTensor], name: str, state: str) -> StoredTensor:
        """Return the target under its name. `state` is the name of the optimizer state, or "" for a parameter."""

    def build(self, views: Sequence[View]) -> list[View]:
        raise NormalizationError(f"{self} is computed: no view of stored elements describes it")

    def inverse(self) -> Rule:
        raise NormalizationError("dequantization has no inverse")


@dataclass(frozen=True, init=False)
class Cast(Computing):
    """Converts floating-point tensors with at least one dim to another dtype when they are read.
    Other tensors stay the same.

    `old` is the dtype of the inverse. Without `old`, the rule has no inverse.
    """

    dtype: str
    old: str | None

    def __init__(self, source: str, dtype: str, old: str | None = None) -> None:
        self._set(source, source, dtype=full_name(dtype), old=old and full_name(old))

    def compute(self, sources: Sequence[StoredTensor], name: str, state: str) -> StoredTensor:
        (source,) = sources
        if not source.spec.shape or not is_floating(source.spec.dtype):
            return source
        return cast(source, self.dtype, name)

    def inverse(self) -> Rule:
        if self.old is None:
            raise NormalizationError(f"{self}: pass old=, the dtype before, so that the rule has an inverse")
        return Cast(self.sources[0].text, self.old, self.dtype)


@dataclass(frozen=True, init=False)
class Offset(Computing):
    """Adds `by` to every element, for norm weights that are centered at 0 in one framework and at
    1 in another.

    Optimizer moments stay the same. Masters change like the parameter. Sums are rounded to the
    tensor's dtype: in bfloat16, 0.001 plus 1 is 1. With `exact`, an element that the inverse
    would not restore is an error when its tensor is first read. This check reads the tensor once
    more. To avoid the error, put a `Cast` to a wider dtype before this rule. The sign of zeros is
    not kept.
    """

    by: float
    exact: bool

    def __init__(self, source: str, target: str, by: float, exact: bool = True) -> None:
        self._set(source, target, by=float(by), exact=exact)

    def compute(self, sources: Sequence[StoredTensor], name: str, state: str) -> StoredTensor:
        (source,) = sources
        if state and state not in _MASTERS:
            return source.renamed(name)
        return offset(source, name, by=self.by, exact=self.exact)

    def inverse(self) -> Rule:
        return self._swapped(Offset, -self.by, self.exact)


@dataclass(frozen=True, init=False)
class Dequantize(Computing):
    """Multiplies block-quantized weights by their scales when they are read, and converts them to
    `dtype`. A weight without scales stays the same. Has no inverse.
    """

    optional: ClassVar[bool] = True
    block: Shape
    dtype: str

    def __init__(
        self,
        weight: str = "{name+}.weight",
        scale: str = "{name+}.weight_scale_inv",
        target: str = "{name+}.weight",
        block: Sequence[int] = (128, 128),
        dtype: str = "bfloat16",
    ) -> None:
        self._set((weight, scale), target, block=tuple(block), dtype=full_name(dtype))
        if min(self.block, default=1) < 1:
            raise NormalizationError(f"{self}: block must have sizes >= 1, got {self.block}")

    def compute(self, sources: Sequence[StoredTensor], name: str, state: str) -> StoredTensor:
        weight, scale = sources
        return dequantized(weight, scale, name, block=self.block, dtype=self.dtype)


@dataclass(frozen=True, init=False)
class Mxfp4(Computing):
    """Converts MXFP4 weights (four bits, with a scale per block) to `dtype` when they are read.
    gpt-oss stores its weights in this form.

    The result is transposed, because the unquantized weights are stored in that order. Has no
    inverse.
    """

    optional: ClassVar[bool] = True
    dtype: str

    def __init__(
        self,
        blocks: str = "{name+}_blocks",
        scales: str = "{name+}_scales",
        target: str = "{name+}",
        dtype: str = "bfloat16",
    ) -> None:
        self._set((blocks, scales), target, dtype=full_name(dtype))

    def compute(self, sources: Sequence[StoredTensor], name: str, state: str) -> StoredTensor:
        blocks, scales = sources
        return mxfp4(blocks, scales, name, dtype=self.dtype)


# Patterns of names, such as `layers.{i}.attention.wq.{kind}`, and where in a key a name can be.
#
# `{word}` matches one segment of a dotted name, or a part of one. `{word+}` matches one or more
# segments. A rule's `over` placeholder matches a number. Patterns match parameters. A key can also
# be a parameter in a section, or its optimizer state:
#
#     model.<name>          optim.state.<name>.exp_avg          optimizer.state.exp_avg.<name>


_WORD = re.compile(r"\{([A-Za-z_]\w*)(\+?)\}")


@dataclass(frozen=True)
class Pattern:
    """A pattern of names. `number` is the placeholder that matches a number."""

    text: str
    number: str | None = None

    def __post_init__(self) -> None:
        """Raise NormalizationError for braces without a word, and for a word that occurs twice."""
        rest = _WORD.sub("", self.text)
        if "{" in rest or "}" in rest:
            raise NormalizationError(f"the pattern {self.text!r} has a brace that holds no word")
        if len(set(self.words)) != len(self.words):
            raise NormalizationError(f"the pattern {self.text!r} has one word twice")

    def __repr__(self) -> str:
        return repr(self.text)

    @property
    def words(self) -> tuple[str, ...]:
        """The placeholders, without braces."""
        return tuple(match[1] for match in _WORD.finditer(self.text))

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """A regular expression that matches a full name, with a group for each placeholder."""
        out, at = "", 0
        for match in _WORD.finditer(self.text):
            out += re.escape(self.text[at : match.start()])
            inner = "[0-9]+" if match[1] == self.number else r".+" if match[2] else r"[^.]+"
            out += f"(?P<{match[1]}>{inner})"
            at = match.end()
        return re.compile(out + re.escape(self.text[at:]))

    def match(self, name: str) -> dict[str, str] | None:
        """Return the values of the placeholders, or None."""
        found = self.regex.fullmatch(name)
        return None if found is None else found.groupdict()

    def fill(self, words: Mapping[str, str]) -> str:
        """Return the name with these placeholder values. Raises NormalizationError if one is missing."""

        def value(match: re.Match[str]) -> str:
            if match[1] not in words:
                raise NormalizationError(f"nothing says what {{{match[1]}}} in {self.text!r} stands for")
            return words[match[1]]

        return _WORD.sub(value, self.text)


@dataclass(frozen=True)
class Site:
    """A parameter's name within a key: `prefix + name + suffix`."""

    prefix: str
    name: str
    suffix: str = ""
    is_state: bool = False
    """Whether the value is optimizer state, which may have another shape than the parameter."""
    section: str = ""
    """The part of the name that the key lacks: states of `model.w` are often saved as those of `w`."""

    @property
    def state(self) -> str:
        """Name of the state, such as "exp_avg", or "" for a parameter."""
        if not self.is_state:
            return ""
        return self.suffix[1:] or self.prefix.removesuffix("module.").rstrip(".").rpartition(".")[2]

    def key(self, name: str) -> str:
        """Return the key of another parameter at the same site."""
        if self.section:
            inner = name.removeprefix(self.section)
            name = inner if inner != name else _ONE_SECTION.sub("", name)
        return f"{self.prefix}{name}{self.suffix}"


_ONE_SECTION = re.compile(r"^(?:model|module|state_dict|app|net)\.")
_SECTION = re.compile(r"(?:(?:model|module|state_dict|app|net)\.)+")
_STATE = re.compile(r"(.*?\b(?:optim|optimizers?|optimizer_\d+)(?:\.\d+)?\.(?:state|param_groups)\.)(.+)(\.[^.]+)")
_GROUP = re.compile(r"\d+(\.|$)")
_STATE_FIRST = re.compile(r"(.*?\b(?:optim|optimizers?|optimizer_\d+)(?:\.\d+)?\.state\.[^.]+\.(?:module\.)?)(.+)")


def state_sites(key: str) -> Iterator[Site]:
    """Yield all ways to read a key as a state of a parameter: `w.Q.0` can be the state `0` of
    `w.Q`, or the state `Q.0` of `w`."""
    state = _STATE.fullmatch(key)
    numbered = state is not None and state[1].endswith(".param_groups.") and _GROUP.match(state[2])
    if state is not None and not numbered:  # settings of a numbered group belong to no parameter
        name, suffix = state[2], state[3]
        while name:
            yield Site(state[1], name, suffix, True)
            name, _, last = name.rpartition(".")
            suffix = f".{last}{suffix}"
    first = _STATE_FIRST.fullmatch(key)
    if first is not None:
        yield Site(first[1], first[2], "", True)


def sites(key: str) -> Iterator[Site]:
    """Yield all ways to read a key: as a state of a parameter, as a name, and as a name in a
    section. Here, a state's name is one segment."""
    yield from (site for site in state_sites(key) if site.suffix.count(".") < 2)
    yield Site("", key)
    section = _SECTION.match(key)
    while section is not None:
        prefix = section[0] if section.end() < len(key) else ""
        if prefix:
            yield Site(prefix, key[len(prefix) :])
        shorter = prefix.rstrip(".").rpartition(".")[0]
        section = _SECTION.fullmatch(shorter + ".") if shorter else None


class States:
    """The parameter of each optimizer state of a checkpoint, and the sections whose names
    optimizers omit. `listed`: names in an optimizer's lists of parameters."""

    def __init__(self, keys: Iterable[str], listed: Iterable[str] = ()) -> None:
        names = dict.fromkeys(listed, "")
        states, others = list[str](), list[str]()
        for key in keys:
            is_state = next(state_sites(key), None) is not None
            (states if is_state else others).append(key)
        self.parameters: dict[str, str] = {}
        """Optimizer's name of a parameter -> its key, or "" if only an optimizer has it."""
        if not names and not states:
            self.sections = frozenset[str]()
            return
        for key in others:
            for site in sites(key):
                if not site.prefix or site.name not in self.parameters:
                    self.parameters[site.name] = key
        self.parameters = names | self.parameters
        used = {*names, *(site.name for site in map(self.of, states) if site)}
        found = ((self.parameters[name], name) for name in used)
        self.sections = frozenset(key.removesuffix(name) for key, name in found if key)

    def of(self, key: str) -> Site | None:
        """Return the site of a known parameter in a state's key, or None."""
        return next((site for site in state_sites(key) if site.name in self.parameters), None)

    def sites(self, key: str) -> list[Site]:
        """Return all ways to read a key. The optimizer's name for it comes first, so that
        placeholders have the same values for parameters and states."""
        found = list(sites(key))
        return sorted(found, key=lambda site: -len(site.prefix) if site.prefix in self.sections else 1)
