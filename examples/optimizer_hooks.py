"""Save an optimizer whose state or settings contain objects: they become dicts, or are left to the constructor.

    from galore_torch.galore_projector import GaLoreProjector

    save_as_dicts(optimizer, GaLoreProjector)  # GaLore and APOLLO: objects in the state
    omit(optimizer, "grafting_config", "distributed_config", "preconditioner_config")  # Meta's DistributedShampoo

Call them once, after you have made the optimizer, before you save and before you load.
"""

from __future__ import annotations

from typing import Any

import torch


def save_as_dicts(optimizer: torch.optim.Optimizer, kind: type[Any]) -> None:
    """Save the objects of a class in the state as dicts of their attributes under a key of its name."""
    mark = kind.__name__

    def to_plain(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        for number, own in state_dict["state"].items():
            plain = {k: {mark: dict(vars(v))} if isinstance(v, kind) else v for k, v in own.items()}
            state_dict["state"][number] = plain

    def from_plain(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        for own in state_dict["state"].values():
            for key, value in own.items():
                if isinstance(value, dict) and list(value) == [mark]:
                    own[key] = kind.__new__(kind)
                    vars(own[key]).update(value[mark])

    optimizer.register_state_dict_post_hook(to_plain)
    optimizer.register_load_state_dict_pre_hook(from_plain)


def omit(optimizer: torch.optim.Optimizer, *fields: str) -> None:
    """Do not save these fields of param groups. A load keeps those of the optimizer."""

    def without(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        for group in state_dict["param_groups"]:
            for field in fields:
                group.pop(field, None)

    optimizer.register_state_dict_post_hook(without)
