"""What the caller knows and a checkpoint cannot say, such as the order of an optimizer's parameters.

Every hint is optional; where one is missing that is needed, the error says which, why, and what it looks like.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from reshard.errors import NormalizationError

__all__ = ["HINTS", "Hints"]

HINTS: dict[str, str] = {
    "param_names": "names of the optimizer's parameters by integer id: a list, or {id: name}; where several ranks or "
    "stages count for themselves, {stage or folder: that}",
    "param_groups": "names of the parameters of each group, a list of lists, where the file's own lists are wrong",
    "param_shapes": "{name: shape} of the parameters, in the order in which the model registers them",
    "flat_params": "the parameters inside each flat parameter: {its id or name: [(name, shape), ...]}",
    "shard_ranks": "how many neighbouring ranks of FSDP1 hold one copy of the parameters: fewer than all with "
    "HYBRID_SHARD, 1 with NO_SHARD",
    "names": "{name in the checkpoint: canonical name}, for single parameters or for leading parts of names",
    "tied": "{further name: name} of parameters that several names share and that are stored under one",
    "prefix": "leading part of all names to take away, such as 'net.'; '' takes none away",
    "layer_offsets": "{stage or folder: number in the whole model of its layer 0}",
    "vocab_size": "rows of the embedding that are no padding",
    "num_layers": "how many layers the model has, where the checkpoint does not say",
    "tp_dims": "{name or glob: dim that tensor parallelism cuts, or None}, for parameters of unusual names",
    "param_order": "names of the model's parameters in the order in which the model registers them",
    "kv_heads": "how many key/value heads: splits the fused wqkv of optimizer states like the weights",
    "head_dim": "size of an attention head: the other way to split fused wqkv",
    "keep_parametrizations": "True keeps names with .parametrizations. in them as they are",
    "expert_optimizer": "for what is written in Megatron's format: whether experts have an optimizer of their own, as "
    "they have there under expert parallelism",
    "stored_names": "True keeps the names and shapes of Hugging Face files as they are on disk",
}
"""Every hint that `normalized()` understands, and what it is."""


class Hints:
    """The hints that the caller gave. Raises NormalizationError for one that is not known."""

    def __init__(self, given: Mapping[str, Any] | None) -> None:
        self._given = dict(given or {})
        unknown = sorted(set(self._given) - set(HINTS), key=str)
        if unknown:
            known = "; ".join(f"{name}: {what}" for name, what in HINTS.items())
            raise NormalizationError(f"unknown hint {unknown[0]!r}. Known hints are {known}")

    def get(self, name: str, default: Any = None) -> Any:
        """The hint's value."""
        assert name in HINTS
        return self._given.get(name, default)

    def __contains__(self, name: str) -> bool:
        return name in self._given

    def mapping(self, name: str) -> dict[Any, Any]:
        """A hint that must be a dict; {} if it was not given."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise NormalizationError(f"the hint {name!r} must be a dict, {HINTS[name]}; got {type(value).__name__}")
        return dict(value)

    def missing(self, name: str, why: str, example: str) -> NoReturn:
        """Raises the NormalizationError that asks for a hint."""
        raise NormalizationError(f"{why}. Give it as a hint: normalized(hints={{{name!r}: {example}}}) ({HINTS[name]})")

    def ids(self, scope: str | int | None = None) -> dict[int, str] | None:
        """The names by id that `param_names` gives, for a stage or folder if there are several; None if not given."""
        value = self.get("param_names")
        if value is None:
            return None
        if scope is not None:
            value = find_scope(value, scope)
            if value is None:
                return None
            if isinstance(value, str):
                raise NormalizationError(
                    "the hint 'param_names' is one list of names, but several optimizers, stages or ranks count for "
                    "themselves: give {0: [names], 1: [names], ...}"
                )
        if isinstance(value, Mapping):
            items = value.items()
        elif isinstance(value, Sequence) and not isinstance(value, str):
            if value and all(isinstance(names, (list, tuple)) for names in value):  # of each group
                value = [name for names in value for name in names]
            items = list(enumerate(value))  # type: ignore[assignment]
        else:
            raise NormalizationError(f"the hint 'param_names' must be {HINTS['param_names']}; got {value!r:.80}")
        try:
            return {int(i): str(name) for i, name in items}
        except (TypeError, ValueError):
            raise NormalizationError(
                f"the hint 'param_names' must be {HINTS['param_names']}; got {value!r:.80}"
            ) from None


def find_scope(value: Any, scope: str | int) -> Any:
    """The entry of a stage, rank or folder in a hint, whether it is keyed by number or text; None if there is none."""
    if isinstance(value, Mapping):
        for key in (scope, str(scope)):
            if key in value:
                return value[key]
        if str(scope).isdigit() and int(scope) in value:
            return value[int(scope)]
        return None
    if isinstance(value, Sequence) and not isinstance(value, str) and isinstance(scope, int) and scope < len(value):
        return value[scope]
    return None
