"""Random module trees under random nestings of wrappers, with ties and freezes: names are those of the plain model."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper

from reshard.state_dict import (
    fqn_map,
    get_model_state_dict,
    get_optimizer_state_dict,
    normalize,
    set_model_state_dict,
    set_optimizer_state_dict,
)

# names that look like wrappers' segments are the user's own where no wrapper is
NAMES = ["a", "b", "module", "layers", "0", "_orig_mod", "weight_"]
WRAPPERS = {
    "compile": lambda m: torch.compile(m, backend="eager"),
    "checkpoint": checkpoint_wrapper,
    "offload": offload_wrapper,
    "parallel": nn.DataParallel,  # on the CPU it does what DDP does to names
}

leaves = st.builds(lambda kind, frozen: (kind, frozen), st.sampled_from(["linear", "norm", "tied"]), st.booleans())
trees = st.recursive(
    leaves, lambda sub: st.dictionaries(st.sampled_from(NAMES), sub, min_size=1, max_size=3), max_leaves=8
)
chains = st.lists(st.sampled_from(sorted(WRAPPERS)), max_size=3, unique=True)  # torch compiles nothing twice


def build(tree: Any, shared: nn.Parameter, wrap: Any) -> nn.Module:
    """The module of a tree; `wrap` is called on every module made."""
    if isinstance(tree, dict):
        return wrap(nn.ModuleDict({name: build(sub, shared, wrap) for name, sub in tree.items()}))
    kind, frozen = tree
    module: nn.Module = nn.BatchNorm1d(2) if kind == "norm" else nn.Linear(2, 2)
    if kind == "tied":
        module.weight = shared
    elif frozen:
        module.requires_grad_(False)
    return wrap(module)


def wrapped(tree: Any, draw: Any) -> nn.Module:
    def wrap(module: nn.Module) -> nn.Module:
        for name in draw(chains):
            module = WRAPPERS[name](module)
        return module

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build(tree, nn.Parameter(torch.randn(2, 2)), wrap)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5) if parameter.requires_grad else None
    optimizer.step()


@given(tree=trees, data=st.data())
def test_names_are_unique_idempotent_and_those_of_the_plain_model(tree: Any, data: st.DataObject) -> None:
    plain = build(tree, nn.Parameter(torch.randn(2, 2)), lambda module: module)
    live = wrapped(tree, data.draw)
    mapping = fqn_map(live)
    assert len(mapping) == len(mapping.entries)
    state = get_model_state_dict(live)
    assert list(state) == list(plain.state_dict())
    parameters = [entry for entry in mapping.entries if entry.kind == "parameter"]
    assert [e.canonical for e in parameters] == [name for name, _ in plain.named_parameters(remove_duplicate=False)]
    again = normalize(dict(state), names=set(state))
    assert list(again) == list(state)
    assert not again.report.renamed
    # the live names, read as text with the right names known, say the same
    raw = {entry.live: entry.canonical for entry in mapping.entries}
    tensors = {live_name: torch.zeros(1) for live_name in raw}
    if len({name for name in NAMES if name in ("module", "_orig_mod") and name in str(tree)}) == 0:
        assert list(normalize(tensors, names=set(raw.values()))) == list(raw.values())


@given(tree=trees, data=st.data())
def test_set_after_get_is_identity_under_other_wrappers(tree: Any, data: st.DataObject) -> None:
    source, target = wrapped(tree, data.draw), wrapped(tree, data.draw)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=lr) for model, lr in ((source, 0.1), (target, 0.9))]
    step(source, optimizers[0])
    if data.draw(st.booleans()):
        step(target, optimizers[1])
    model_state, state = get_model_state_dict(source), get_optimizer_state_dict(source, optimizers[0])
    set_model_state_dict(target, model_state)
    set_optimizer_state_dict(target, optimizers[1], state)
    found = get_model_state_dict(target), get_optimizer_state_dict(target, optimizers[1])
    assert all(torch.equal(found[0][name], value) for name, value in model_state.items())
    assert list(found[0]) == list(model_state)
    assert found[1]["param_groups"] == state["param_groups"]
    assert list(found[1]["state"]) == list(state["state"])
    for name, values in state["state"].items():
        assert all(torch.equal(found[1]["state"][name][key], value) for key, value in values.items())
