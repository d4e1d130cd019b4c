"""Topologies: rules that give every tensor of a state its layout on a mesh; predefined ones; and flat buffers."""

from __future__ import annotations

import fnmatch
import glob
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from planners.errors import PlanError, did_you_mean
from planners.geometry.arrays import grouped
from planners.geometry.box import Range
from planners.geometry.layout import ProductForm, StateLayout, TensorLayout, TensorSpec
from planners.geometry.layout_text import axes_of, in_sharding_order
from planners.geometry.mesh import BlockShard, Mesh, Placement, Replicate, StridedShard, parse_placements
from planners.notebooks import preformatted
from planners.units import format_count, format_some

# How a tensor is sharded and where it is placed are two questions. A *rule* says how: a glob of names, and
# one placement per mesh axis. A *home* says where: a glob of names, and coordinates that some axes
# are fixed at, so that the tensor lives on the submesh of the others (a pipeline stage, an expert's
# group).
#
#     pp=2,dp=4,tp=2
#     *.wo.weight -> dp,tp: S(0),S(1)
#     *.w1.weight -> tp,dp: S(0),S(0)
#     * -> S(0),R
#     layers.0.* on pp=0
#     * on pp=1


_NOT_A_COMMENT = "\\"
"""Prefix of a line in a topology's text whose glob begins with `#`, or with this prefix."""

Axes = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """How the tensors that a glob matches are sharded. `*` matches any text, including dots."""

    pattern: str
    placements: tuple[Placement, ...]
    """One placement per group of axes. They apply from left to right."""
    axes: Axes | None = None
    """Groups of mesh axes in the order in which they shard. The axes of a group act as one. None: each
    axis that the tensor's home leaves free is a group, in mesh order."""
    optional: bool = False
    """True if the glob may match no tensor."""
    line: int = field(default=0, repr=False, compare=False)
    """Line number in the text of its topology, from 1. 0 if the rule is not from a text."""

    @classmethod
    def parse(cls, pattern: str, text: str, optional: bool = False, line: int = 0) -> Rule:
        """Parse `"S(0),R"`, `"tp,dp: S(0),S(0)"` (tp shards first), or `"dp*cp: S(0)"` (dp and cp as one axis)."""
        head, colon, tail = text.rpartition(":")
        groups = tuple(tuple(name.strip() for name in group.split("*")) for group in head.split(",")) if colon else None
        if any(not re.fullmatch(r"[A-Za-z_][\w.\-]*", n) for group in groups or () for n in group):
            raise PlanError(f"cannot read the axes {head!r} of the rule for {pattern!r}: write them like 'tp,dp*cp'")
        try:
            return cls(pattern, parse_placements(tail), groups, optional, line)
        except PlanError as error:
            raise PlanError(f"the rule for {pattern!r}: {error}") from None

    @property
    def text(self) -> str:
        """The text that `parse` reads."""
        placements = ",".join(map(str, self.placements))
        return placements if self.axes is None else f"{','.join('*'.join(g) for g in self.axes)}: {placements}"


@dataclass(frozen=True, slots=True)
class Home:
    """Where the tensors that a glob matches are placed: their coordinates along some axes."""

    pattern: str
    at: tuple[tuple[str, int], ...]
    optional: bool = False
    """True if the glob may match no tensor."""

    @classmethod
    def parse(cls, pattern: str, text: str, optional: bool = False) -> Home:
        """Parse `"pp=1"` or `"pp=1,ep=3"`."""
        parts = [re.fullmatch(r"\s*([A-Za-z_][\w.\-]*)\s*=\s*(\d+)\s*", part) for part in text.split(",")]
        if None in parts:
            raise PlanError(f"cannot read the home {text!r} of {pattern!r}: write coordinates like 'pp=1,ep=3'")
        return cls(pattern, tuple((part[1], int(part[2])) for part in parts if part is not None), optional)

    @property
    def text(self) -> str:
        """The text that `parse` reads."""
        return ",".join(f"{name}={coordinate}" for name, coordinate in self.at)


@dataclass(frozen=True, repr=False)
class Topology:
    """A mesh, with rules and homes that place tensors on it.

    The first rule that matches an FQN decides how the tensor is sharded. A tensor that no rule matches
    is an error. Among the homes that match, the first one that fixes an axis decides the coordinate
    along it. A tensor without a home is on the full mesh. A 0-d tensor is always replicated. A rule or
    home without effect is an error, unless it is optional.
    """

    mesh: Mesh
    rules: tuple[Rule, ...]
    homes: tuple[Home, ...] = ()
    even: tuple[str, ...] = ()
    """Axes that must divide the dims that they shard without remainder, such as those for heads and
    experts."""
    origin: str = field(default="", repr=False, compare=False)
    """The file that the topology is from. Its errors begin with it."""
    notes: tuple[str, ...] = field(default=(), repr=False, compare=False)
    """Assumptions about facts that the checkpoint does not record."""
    _forms: dict[tuple[object, ...], ProductForm] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raises PlanError for axes that the mesh lacks, coordinates outside it and numbers that do not match."""
        known = dict(self.mesh.axes)
        named = [(f"the rule for {r.pattern!r}", n) for r in self.rules for group in r.axes or () for n in group]
        named += [(f"the home of {home.pattern!r}", name) for home in self.homes for name, _ in home.at]
        for where, name in [*named, *(("the list of even axes", name) for name in self.even)]:
            if name not in known:
                meant = did_you_mean(name, known)
                raise PlanError(f"{where} names the axis {name!r}, but the mesh {self.mesh} has {list(known)}{meant}")
        for home in self.homes:
            for name, coordinate in home.at:
                if coordinate >= known[name]:
                    raise PlanError(f"the home {home.text} of {home.pattern!r} is outside the mesh {self.mesh}")
        for rule in self.rules:
            if rule.axes is None:
                continue
            names = [name for group in rule.axes for name in group]
            if len(set(names)) != len(names):
                raise PlanError(f"the rule for {rule.pattern!r} names an axis twice: {names}")
            if len(rule.axes) != len(rule.placements):
                given = f"{len(rule.placements)} placements for {len(rule.axes)} axes"
                raise PlanError(f"the rule for {rule.pattern!r} has {given}: {rule.text}")

    @classmethod
    def parse(
        cls,
        text: str,
        rules: Mapping[str, str] | None = None,
        homes: Mapping[str, str] | None = None,
        *,
        even: Iterable[str] = (),
    ) -> Topology:
        """Create a topology from the text of a mesh, with rules and homes as text by glob. Or pass
        only the text that `str` returns.

        Raises PlanError for text that cannot be parsed.
        """
        numbered = enumerate(map(str.strip, text.splitlines()), 1)
        lines = [(number, line) for number, line in numbered if line and not line.startswith("#")]
        its_rules = [*itertools.starmap(Rule.parse, (rules or {}).items())]
        its_homes = [*itertools.starmap(Home.parse, (homes or {}).items())]
        its_even = list(even)
        for number, line in lines[1:]:
            body = line.removeprefix(_NOT_A_COMMENT).removesuffix("(optional)").rstrip()
            optional = line.endswith("(optional)")
            try:
                pattern, arrow, placements = body.rpartition(" -> ")
                glob, on, where = body.rpartition(" on ")
                if arrow:
                    its_rules.append(Rule.parse(pattern.strip(), placements, optional, number))
                elif on:
                    its_homes.append(Home.parse(glob.strip(), where, optional))
                elif body.startswith("even "):
                    its_even += [name.strip() for name in body.removeprefix("even ").split(",")]
                else:
                    raise PlanError(f"cannot read {line!r}: write 'glob -> placements' or 'glob on pp=1'")
            except PlanError as error:
                raise PlanError(f"line {number} of the topology: {error}") from None
        return cls(Mesh.parse(lines[0][1] if lines else ""), tuple(its_rules), tuple(its_homes), tuple(its_even))

    def layout(self, specs: Iterable[TensorSpec] | Mapping[str, TensorSpec]) -> StateLayout:
        """Return the layout of a state on this topology. The job has all ranks of the mesh, even if the
        tensors need fewer.

        Raises PlanError if no rule matches a tensor, if a rule or home has no effect, or if a tensor
        cannot be sharded as its rule says.
        """
        tensors: dict[str, TensorLayout] = {}
        used: set[Rule | Home] = set()
        lost: list[str] = []
        rules, homes = Globs([rule.pattern for rule in self.rules]), Globs([home.pattern for home in self.homes])
        fixable = len({name for home in self.homes for name, _ in home.at})
        for spec in specs.values() if isinstance(specs, Mapping) else specs:
            if not isinstance(spec, TensorSpec):
                raise PlanError(f"Topology.layout takes TensorSpecs, such as state.specs, got {spec!r:.80}")
            number = rules.first(spec.fqn)
            if number is None:
                lost.append(spec.fqn)
                continue
            rule = self.rules[number]
            used.add(rule)
            at: dict[str, int] = {}
            for home in (self.homes[number] for number in homes.matching(spec.fqn)):
                fresh = [(name, coordinate) for name, coordinate in home.at if name not in at]
                if fresh:
                    used.add(home)
                    at.update(fresh)
                if len(at) == fixable:
                    break
            if spec.fqn in tensors:
                raise PlanError("two tensors have the same name", fqn=spec.fqn)
            tensors[spec.fqn] = self._place(spec, rule, at)
        if lost:
            patterns = format_some([repr(rule.pattern) for rule in self.rules])
            raise PlanError(
                f"{self.origin}no rule matches {format_count(len(lost), 'tensor')}: "
                f"{format_some([*map(repr, lost)])}. "
                f"{f'The rules are for {patterns}' if patterns else 'There are no rules'}. "
                "Add a last rule for all other tensors, such as "
                f"{self._written('*', (), self.mesh.names)}"
            )
        parts: tuple[Rule | Home, ...] = (*self.rules, *self.homes)
        idle = [f"{part.pattern!r}" for part in parts if part not in used and not part.optional]
        if idle:
            names = f"there are {list(tensors)[:3]}, ..." if tensors else "there is none"
            raise PlanError(
                f"{self.origin}these rules or homes have no effect: {', '.join(idle)}. "
                f"They match no tensor ({names}), "
                "or only tensors that earlier ones match"
            )
        return StateLayout(tensors, self.mesh.world_size)

    def unsharded_axes(self, layout: StateLayout) -> dict[str, tuple[str, ...]]:
        """Return the axes that shard no tensor of `layout`, although a rule of this topology shards
        over them. `layout` is a layout that this topology made. The result has the FQNs of the
        tensors that are replicated over each axis.

        An axis for which all rules say R, as in `ddp(8)`, is replicated on purpose. It is not listed.
        """
        fixable = {name for home in self.homes for name, _ in home.at}
        free = [tuple((name,) for name in self.mesh.names if name not in fixed) for fixed in ((), fixable)]
        meant = {
            name
            for rule in self.rules
            for groups in ([rule.axes] if rule.axes is not None else free)
            for group, placement in zip(groups, rule.placements)
            if len(groups) == len(rule.placements) and not isinstance(placement, Replicate)
            for name in group
        }
        return {axis: fqns for axis, fqns in layout.unsharded_axes().items() if not meant.isdisjoint(axis.split("."))}

    uncut_axes = unsharded_axes  # its old name

    def _place(self, spec: TensorSpec, rule: Rule, at: Mapping[str, int]) -> TensorLayout:
        key = (rule, tuple(at.items()), not spec.shape)
        form = self._forms.get(key)
        try:
            if form is None:
                form = self._forms[key] = self._form(rule, at, whole=not spec.shape)
            self._check_even(spec, form)
            return TensorLayout.of(spec, form)
        except PlanError as error:
            what = str(error).removesuffix(f" (tensor {spec.fqn!r})")  # named once
            line = f"line {rule.line} of the topology: " if rule.line else ""
            said = f"{self.origin}{line}the rule for {rule.pattern!r} ({rule.text}): {what}"
            raise PlanError(said, fqn=spec.fqn) from None

    def _written(self, pattern: str, placements: Sequence[Placement], axes: Sequence[str]) -> str:
        """Return a rule with one placement per axis, as files and Python code have it."""
        text = f"{','.join([*map(str, placements), *['R'] * len(axes)][: len(axes)])}"
        return f"'{pattern} -> {text}'" if self.origin else f"{{{pattern!r}: {text!r}}}"

    def _form(self, rule: Rule, at: Mapping[str, int], *, whole: bool) -> ProductForm:
        free = [name for name in self.mesh.names if name not in at]
        groups = rule.axes if rule.axes is not None else tuple((name,) for name in free)
        named = [name for group in groups for name in group]
        if sorted(named) != sorted(free):
            lacking, fixed = sorted(set(free) - set(named)), sorted(set(named) - set(free))
            what = f"axis {lacking[0]!r} is neither named nor fixed by a home" if lacking else f"a home fixes {fixed}"
            raise PlanError(f"{what}: name each of {', '.join(free)}")
        if len(groups) != len(rule.placements):
            raise PlanError(
                f"it has {format_count(len(rule.placements), 'placement')}, but needs one per axis "
                f"({', '.join(free)}), such as {self._written(rule.pattern, rule.placements, free)}"
            )
        sizes = dict(self.mesh.axes)
        axes = [(".".join(group), math.prod(sizes[name] for name in group)) for group in groups]
        mesh = Mesh(axes, self.mesh.submesh(*named, at=at).ranks.tolist())
        return ProductForm.make(mesh, [Replicate()] * len(axes) if whole else rule.placements)

    def _check_even(self, spec: TensorSpec, form: ProductForm) -> None:
        assert form.mesh is not None
        left = list(spec.shape)
        for (name, size), placement in zip(form.mesh.axes, form.placements):
            if isinstance(placement, Replicate) or placement.dim >= len(left):
                continue
            pieces = placement.blocks if isinstance(placement, BlockShard) else (left[placement.dim],)
            if name in self.even and any(piece % size for piece in pieces):
                raise PlanError(
                    f"axis {name!r} of size {size} does not divide {pieces} elements of dim {placement.dim}"
                )
            left[placement.dim] = -(-left[placement.dim] // size)

    def __str__(self) -> str:
        """The text that `parse` reads."""
        lines = [str(self.mesh)]
        lines += [f"{r.pattern} -> {r.text}{' (optional)' if r.optional else ''}" for r in self.rules]
        lines += [f"{h.pattern} on {h.text}{' (optional)' if h.optional else ''}" for h in self.homes]
        lines = [_NOT_A_COMMENT * line.startswith(("#", _NOT_A_COMMENT)) + line for line in lines]
        return "\n".join([*lines, *([f"even {','.join(self.even)}"] if self.even else [])])

    def __repr__(self) -> str:
        """One line, with the first rules; `str` has all of it."""
        first = [f"{rule.pattern!r}: {rule.text!r}" for rule in self.rules[:3]] + ["..."] * (len(self.rules) > 3)
        homes = f", {format_count(len(self.homes), 'home')}" if self.homes else ""
        return f"Topology({str(self.mesh)!r}, {format_count(len(self.rules), 'rule')} {{{', '.join(first)}}}{homes})"

    def _repr_html_(self) -> str:
        return preformatted(str(self))

    def __hash__(self) -> int:
        return hash((self.mesh, self.rules, self.homes, self.even))


class Globs:
    """Finds which of thousands of patterns match a name, without trying them all. `*` matches any
    text, dots included, `?` one character, and `[...]` one of several.

    A pattern with complete segments, such as `*.experts.17.*`, only matches names that contain them
    consecutively. So patterns are indexed by their longest run of literal segments, and a name is
    looked up by its own runs:

        layers.3.experts.17.w1    ->    ("experts", "17"), ("17",), ...    ->    *.experts.17.*
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._match: list[Callable[[str], object]] = [re.compile(fnmatch.translate(p)).match for p in patterns]
        self._filed = grouped((literal_segments(pattern), number) for number, pattern in enumerate(patterns))
        self._lengths = sorted({len(run) for run in self._filed} - {0})

    def matching(self, name: str) -> Iterator[int]:
        """Return the numbers of the patterns that match `name`, ascending."""
        found = list(self._filed.get((), ()))
        segments = tuple(name.split("."))
        for length in self._lengths:
            for at in range(len(segments) - length + 1):
                found += self._filed.get(segments[at : at + length], ())
        return (number for number in sorted(set(found)) if self._match[number](name))

    def first(self, name: str) -> int | None:
        """Return the number of the first pattern that matches `name`, or None."""
        return next(self.matching(name), None)


def literal_segments(pattern: str) -> tuple[str, ...]:
    """Return the longest run of dot-separated segments of `pattern` without a wildcard:
    `("experts", "17")` for `"*.experts.17.w?"`. Every name that matches contains these segments
    consecutively. () if there are none, or if a bracket, which may contain a dot, makes the
    segments uncertain."""
    if "[" in pattern:
        return ()
    best: tuple[str, ...] = ()
    run: tuple[str, ...] = ()
    for segment in pattern.split("."):
        run = () if set(segment) & set("*?]") else (*run, segment)
        best = max(best, run, key=len)
    return best


# Topologies of the usual kinds of training, as live ranks really hold their tensors.
#
# If two axes shard one dim, their order matters for uneven sizes. FSDP2 shards what
# tensor parallelism has left, and expert parallelism distributes the experts before FSDP shards them: `tp`
# and `ep` come before `dp`.


LLAMA_TP_DIMS: Mapping[str, int] = {
    "*wq.weight*": 0,
    "*wk.weight*": 0,
    "*wv.weight*": 0,
    "*wo.weight*": 1,
    "*w1.weight*": 0,
    "*w3.weight*": 0,
    "*w2.weight*": 1,
    "*q_proj.weight*": 0,
    "*k_proj.weight*": 0,
    "*v_proj.weight*": 0,
    "*o_proj.weight*": 1,
    "*gate_proj.weight*": 0,
    "*up_proj.weight*": 0,
    "*down_proj.weight*": 1,
    "*tok_embeddings.weight*": 0,
    "*embed_tokens.weight*": 0,
    "*output.weight*": 0,
    "*lm_head.weight*": 0,
}
"""The dim that tensor parallelism shards, for the weights of Llama-style models under both of their
usual names. Names with more after `weight` (optimizer states) are sharded the same way. All other
tensors are replicated over the axis."""


def ddp(world_size: int) -> Topology:
    """Every tensor is replicated on every rank."""
    return Topology(Mesh({"ddp": world_size}), (Rule.parse("*", "R", optional=True),))


def fsdp(shards: int, *, context_parallel: int = 1) -> Topology:
    """Dim 0 of every tensor is sharded over all ranks. The axis of context parallelism and that of FSDP act as one."""
    return fsdp_tp(shards, 1, {}, context_parallel=context_parallel)


def hsdp(replicas: int, shards: int) -> Topology:
    """Dim 0 is sharded within each group of `shards` consecutive ranks. The groups are replicas."""
    return fsdp_tp(shards, 1, {}, replicas=replicas)


def fsdp_tp(
    shards: int,
    tensor_parallel: int,
    tp_dims: Mapping[str, int] = LLAMA_TP_DIMS,
    *,
    replicas: int = 1,
    context_parallel: int = 1,
) -> Topology:
    """FSDP2 over tensor parallelism. `tp_dims` gives the dim that `tp` shards, by glob (first
    match; all other tensors are replicated over it). FSDP2 then shards dim 0 of the result. Globs
    that match nothing are skipped.

    Axes are replica, fsdp, cp, and tp, from the outermost. Axes of size 1 are omitted, but at
    least one remains.
    """
    sizes = {"replica": replicas, "fsdp": shards, "cp": context_parallel, "tp": tensor_parallel}
    axes = {name: size for name, size in sizes.items() if size != 1 or (name == "fsdp" and set(sizes.values()) == {1})}
    cutting = "*".join(name for name in ("fsdp", "cp") if name in axes)
    first = [("replica", "R")] if "replica" in axes else []
    fsdp = [(cutting, "S(0)")] if cutting else []

    def rule(pattern: str, tp_dim: int | None) -> Rule:
        tp = [("tp", "R" if tp_dim is None else f"S({tp_dim})")] if "tp" in axes else []
        order = [*first, *tp, *fsdp] if tp_dim == 0 else [*first, *fsdp, *tp]
        text = f"{','.join(name for name, _ in order)}: {','.join(placement for _, placement in order)}"
        return Rule.parse(pattern, text, optional=True)

    cuts = tp_dims if "tp" in axes else {}
    return Topology(Mesh(axes), (*itertools.starmap(rule, cuts.items()), rule("*", None)))


def expert_parallel(
    shards: int, experts: int, *, pattern: str = "*experts.*", expert_dim: int = 0, fsdp_dim: int = 0
) -> Topology:
    """Experts that are stacked along `expert_dim` are distributed evenly over the axis ep of size
    `experts`, and then sharded by FSDP over the axis dp of size `shards` along `fsdp_dim`. Dim 0 of
    all other tensors is sharded over both axes as one."""
    experts_only = Rule.parse(pattern, f"ep,dp: S({expert_dim}),S({fsdp_dim})")
    rest = Rule.parse("*", "dp*ep: S(0)", optional=True)
    return Topology(Mesh({"dp": shards, "ep": experts}), (experts_only, rest), even=("ep",))


def pipelined(
    stage: Topology,
    ranks: int,
    layers: int,
    *,
    stages_per_rank: int = 1,
    split: Sequence[int] | None = None,
    v_shaped: bool = False,
    first: Sequence[str] = ("*tok_embeddings.*", "*embed_tokens.*"),
    layer: str = "*layers.{}.*",
    last: Sequence[str] = ("*",),
) -> Topology:
    """Layers distributed over the stages of a pipeline. `stage` places each stage on its own ranks.

    There are `ranks * stages_per_rank` stages of consecutive layers. `split` gives the number
    of layers of each; the default is nearly equal numbers (stage s begins at layer `s * layers
    // stages`). Stage s is on pipeline rank `s % ranks` (interleaved); with `v_shaped`, the
    second stages run from the last rank back to the first. Tensors that `first` matches are on
    the first stage. Tensors that `last` matches and that are not layers are on the last stage.
    The axis pp is outermost.

    Raises PlanError if there are fewer layers than stages, if `split` does not add up, or if
    `v_shaped` does not have two stages per rank.
    """
    stages = ranks * stages_per_rank
    if not 0 < stages <= layers:
        raise PlanError(f"{layers} layers do not fill the {stages} stages of {ranks} ranks")
    starts = [number * layers // stages for number in range(stages + 1)]
    counts = [stop - start for start, stop in itertools.pairwise(starts)] if split is None else list(split)
    if len(counts) != stages or sum(counts) != layers or min(counts) < 0:
        raise PlanError(f"the split {counts} does not distribute {layers} layers over {stages} stages")
    if v_shaped and stages_per_rank != 2:
        raise PlanError(f"v_shaped needs two stages per rank, got {stages_per_rank}")
    if "pp" in stage.mesh.names or stage.mesh.has_explicit_ranks:
        raise PlanError(f"a stage must have a mesh of ranks 0, 1, 2, ... without an axis 'pp', got {stage.mesh}")

    def at(number: int) -> tuple[tuple[str, int], ...]:
        back = v_shaped and number >= ranks
        return (("pp", stages - 1 - number if back else number % ranks),)

    homes = [Home(pattern, at(0), True) for pattern in first]
    stage_of = [number for number, count in enumerate(counts) for _ in range(count)]
    homes += [Home(layer.format(i), at(stage_of[i])) for i in range(layers)]
    homes += [Home(pattern, at(stages - 1), True) for pattern in last]
    return Topology(Mesh({"pp": ranks, **dict(stage.mesh.axes)}), stage.rules, (*homes, *stage.homes), stage.even)


# A topology in a few words, as people say it: `fsdp=4,tp=2`; and one with the axes of a checkpoint,
# as it records them.


WORDS = "'fsdp=3', 'tp=2', 'fsdp=4,tp=2', 'hsdp=2x4', 'ddp=8', or 'pp=2,fsdp=4'"
"""The predefined topologies, for help and errors."""

_PRESETS: dict[tuple[str, ...], Callable[..., Topology]] = {
    ("ddp",): ddp,
    ("fsdp",): fsdp,
    ("tp",): partial(fsdp_tp, 1),
    ("fsdp", "tp"): fsdp_tp,
    ("hsdp",): hsdp,
    ("hsdp", "tp"): lambda replicas, shards, tp: fsdp_tp(shards, tp, replicas=replicas),
    (): partial(ddp, 1),
}
_NAMES = ("fsdp", "tp", "hsdp", "ddp", "pp")
_DATA_PARALLEL = ": did you mean 'fsdp', which shards over data-parallel ranks? (ddp replicates.)"
_PART = re.compile(r"\s*([A-Za-z_][\w.\-]*)\s*=\s*(-?\d*(?:x-?\d*)*)\s*")
_MISTYPED = re.compile(
    r"(?:(?:(?:[fh]sdp|ddp|[cdept]p)?[:\s]*\d[\dx]*|[A-Za-z_]\w*\s*=\s*\w*)(?:[,;/\s]+|$|(?=[a-z])))+"
)
"""Mistyped topologies, such as `fsdp6`, `fsdp:4`, `dp=two`, or `8`."""


def looks_like_a_topology(text: str) -> bool:
    """Return True if the text looks like a topology, even a mistyped one: `name=size,name=size`,
    perhaps with lines of rules. A path does not."""
    head = next(iter(text.strip().splitlines()), "")
    is_one = all(_PART.fullmatch(part) or part in _NAMES for part in head.split(","))
    return bool(head) and (is_one or _MISTYPED.fullmatch(head) is not None)


def topology_of(text: str, rules: Mapping[str, str] | None = None, saved: StateLayout | None = None) -> Topology:
    """Return the topology that a few words name, or that `Topology.parse` reads from a text with
    rules.

    If `saved` records all axes of the text, as for `dp=2,tp=2`, each tensor is sharded over them as
    it was saved. Axes keep the names that the text gives them. The layers that `pp` distributes are
    those of `saved`.

    Raises PlanError for anything else, with suggestions.
    """
    if rules or "\n" in text.strip():
        return Topology.parse(text, rules)
    parts = [_PART.fullmatch(part) for part in text.split(",")]
    sizes = {part[1]: part[2].split("x") for part in parts if part is not None}
    if None not in parts and len(sizes) < len(parts):
        raise PlanError(f"the topology {text!r} names an axis twice")
    if None in parts:
        found = re.findall(r"([A-Za-z_]+)[=:\s]*(\d+(?:x\d+)*|)", text)  # of "tp" alone, no number
        meant = ",".join(map("=".join, found)) if all(name in _NAMES and size for name, size in found) else ""
        near = f": did you mean {meant!r}?" if meant else "."
        raise PlanError(f"{text!r} is neither a path nor a topology{near} Write a topology like {WORDS}")
    recorded = _recorded_axes(saved) if saved is not None else []
    is_recorded = set(sizes) <= set(recorded)
    for name in [] if is_recorded else [name for name in sizes if name not in _NAMES]:
        of_checkpoint = f", or only axes that the checkpoint records: {', '.join(recorded)}" if recorded else ""
        meant = (
            _DATA_PARALLEL if name in ("dp", "dp_shard", "data") else did_you_mean(name, [*_NAMES, *recorded]) or "."
        )
        problem = f"has the unknown axis {name!r}{meant}"
        if name in recorded:
            others = ", ".join(sorted(sizes.keys() - {*recorded}))
            problem = f"has the checkpoint's axis {name!r} beside {others}, which the checkpoint does not record."
        raise PlanError(
            f"the topology {text!r} {problem} Write {WORDS}{of_checkpoint}. "
            "Other axes, such as ep, need rules such as {'*': 'S(0)'}"
        )
    numbers = {name: [int(size) for size in of if re.fullmatch(r"\d+", size)] for name, of in sizes.items()}
    for name, of in sizes.items():
        wanted = 2 if name == "hsdp" and not is_recorded else 1
        if len(of) != wanted or len(numbers[name]) != wanted or min(numbers[name]) < 1:
            form = "hsdp=REPLICASxSHARDS" if wanted == 2 else f"{name}=RANKS"
            raise PlanError(f"cannot read the topology {text!r}: expected {form}, with numbers >= 1; write {WORDS}")
    if is_recorded and saved is not None:
        return _as_recorded(Mesh({name: of[0] for name, of in numbers.items()}), saved)
    stages = numbers.pop("pp", None)
    preset = _PRESETS.get(tuple(sorted(numbers)))
    if preset is None:
        raise PlanError(f"no predefined topology has {' with '.join(numbers)}: write {WORDS}")
    stage = preset(*(size for name in sorted(numbers) for size in numbers[name]))
    return stage if stages is None else _pipeline(stage, stages[0], saved)


def _recorded_axes(saved: StateLayout) -> list[str]:
    """Return the axes over which tensors were saved. None if some tensor does not record how it was
    sharded."""
    if any(layout.mesh is None and layout.spec.shape for layout in saved.values()):
        return []
    forms = [layout.form for layout in saved.values() if isinstance(layout.form, ProductForm)]
    axes = ((name, of) for form in forms for name, of in zip(form.mesh.names, form.placements))
    # tensors without a mesh were given an axis of all ranks, or of all that share a file
    return list(dict.fromkeys(name for name, of in axes if name not in ("world", "file") or of != Replicate()))


def _as_recorded(mesh: Mesh, saved: StateLayout) -> Topology:
    """Shard each tensor over the axes of this mesh as it was saved. Replicate it over axes that
    were not recorded."""
    rules, guessed = {}, dict[str, None]()
    for fqn, layout in saved.items():
        at: dict[str, Placement] = {}
        if isinstance(layout.form, ProductForm):
            form = in_sharding_order(layout.form, range(len(layout.spec.shape)))
            at = {name: placement for name, placement in zip(form.mesh.names, form.placements) if name in mesh.names}
            for dim in {p.dim for p in layout.form.placements if not isinstance(p, Replicate)}:
                before, after = ([its.mesh.names[axis] for axis in axes_of(its, dim)] for its in (layout.form, form))
                is_known = any(isinstance(p, StridedShard) and p.dim == dim for p in layout.form.placements)
                if before != after and not is_known and min(dict(mesh.axes).get(name, 1) for name in after) > 1:
                    one = " and ".join(name for name in after if dict(form.mesh.axes)[name] == 1)
                    guessed[_GUESSED.format(" and ".join(sorted(after)), one, ", then ".join(after))] = None
        at |= {name: Replicate() for name in mesh.names if name not in at}
        rules[fqn] = Rule(glob.escape(fqn), tuple(at.values()), tuple((name,) for name in at))
    return Topology(mesh, tuple(rules.values()), notes=tuple(guessed))


_GUESSED = (
    "the checkpoint does not record the order of {}, because {} had one rank when it was saved: "
    "assuming {}, as in FSDP2"
)


def _pipeline(stage: Topology, stages: int, saved: StateLayout | None) -> Topology:
    """Distribute the layers that the saved names number over stages. Embeddings are on the first
    stage, and all other tensors on the last."""
    numbered = (re.search(r"(?:^|\.)([A-Za-z_]\w*)\.(\d+)\.", fqn) for fqn in saved or ())
    found = {name: set(of) for name, of in grouped((m[1], int(m[2])) for m in numbered if m is not None).items()}
    name = next(iter(found), "")
    if len(found) != 1 or found[name] != set(range(len(found[name]))):
        several = f", but here numbers follow {' and '.join(map(repr, found))}" if len(found) > 1 else ""
        raise PlanError(
            f"pp={stages} can split only models whose layers are numbered from 0 under one prefix, such as "
            f"layers.0.wq.weight{several}: use reshard.planners.pipelined, or write a topology file"
        )
    first = ("*embed*", "*wte.*", "*wpe.*")
    return pipelined(stage, stages, len(found[name]), first=first, layer=f"*{name}.{{}}.*")


# Flat buffers: tensors one after another, divided into ranges that ignore where one tensor
# ends.
#
# FSDP1's flat parameters and ZeRO's partitions are such. Each tensor then has on each rank a range
# of its own flattening, and a `FlatForm` for its layout.
#
#     a a a a b b b . c c c c c . . .      align_elements=4, 16 elements with padding
#     |- rank 0 -----|- rank 1 ------|


def flat_offsets(specs: Iterable[TensorSpec], *, align_elements: int = 1) -> tuple[dict[str, int], int]:
    """Return the offset of each tensor in a flat buffer, and the number of elements up to the
    end of the last one.

    Each tensor begins at a multiple of `align_elements`. Raises PlanError for two tensors with
    the same name.
    """
    _at_least_one("align_elements", align_elements)
    offsets: dict[str, int] = {}
    at = end = 0
    for spec in specs:
        if spec.fqn in offsets:
            raise PlanError("two tensors of a flat buffer have the same name", fqn=spec.fqn)
        at = -(-end // align_elements) * align_elements
        offsets[spec.fqn] = at
        end = at + spec.numel
    return offsets, end


def even_ranges(numel: int, ranks: Sequence[int], *, multiple: int = 1) -> dict[int, Range]:
    """Return equal ranges of a buffer of `numel` elements, one per rank, in order.

    The buffer is padded at its end so that every range has the same size, a multiple of `multiple`.
    """
    _at_least_one("multiple", multiple)
    if not ranks:
        raise PlanError("a flat buffer needs at least one rank")
    size = -(-numel // (len(ranks) * multiple)) * multiple
    return {rank: (i * size, (i + 1) * size) for i, rank in enumerate(ranks)}


def flat_layouts(
    specs: Iterable[TensorSpec],
    ranges: Mapping[int, Range],
    *,
    align_elements: int = 1,
    offsets: Mapping[str, int] | None = None,
    world_size: int | None = None,
) -> dict[str, TensorLayout]:
    """Return the layout of each tensor of a flat buffer of which every rank holds a range.

    `offsets` gives the position of each tensor if it is not that of `flat_offsets`. Ranges may
    include padding, and ranks with equal ranges are replicas. Raises PlanError if the ranges do
    not cover every element of a tensor.
    """
    tensors = list(specs)
    places = flat_offsets(tensors, align_elements=align_elements)[0] if offsets is None else offsets
    for rank, (start, stop) in ranges.items():
        if not 0 <= start <= stop:
            raise PlanError(f"the range {start}:{stop} of a flat buffer must ascend from 0", rank=rank)
    world = max(ranges, default=0) + 1 if world_size is None else world_size
    out: dict[str, TensorLayout] = {}
    for spec in tensors:
        if spec.fqn not in places:
            raise PlanError("no offset in the flat buffer is given", fqn=spec.fqn)
        begin, end = places[spec.fqn], places[spec.fqn] + spec.numel
        held = {
            rank: (max(start, begin) - begin, min(stop, end) - begin)
            for rank, (start, stop) in ranges.items()
            if max(start, begin) < min(stop, end)
        }
        reach = 0
        for start, stop in sorted(held.values()):
            if start > reach:
                break
            reach = max(reach, stop)
        if reach < spec.numel:
            raise PlanError(f"the ranges of the flat buffer leave out element {reach} of its flattening", fqn=spec.fqn)
        out[spec.fqn] = TensorLayout.from_flat_ranges(spec, held, world)
    return out


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise PlanError(f"{name} must be >= 1, got {value}")
