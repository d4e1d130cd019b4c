"""Tensors that have no plain elements are refused by name by every verb, before anything is read or written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
import reshard.dcp
from reshard.errors import CheckpointError, FormatError, KeyMismatchError, LayoutError

pytestmark = pytest.mark.filterwarnings("ignore")  # torch says that half of these kinds are prototypes

KINDS: dict[str, Callable[[], Any]] = {
    "MaskedTensor": lambda: torch.masked.masked_tensor(torch.ones(3), torch.tensor([True, False, True])),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "sparse_coo": lambda: torch.eye(3).to_sparse(),
    "sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "qint8": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "quint4x2": lambda: torch.quantize_per_channel(torch.ones(3, 2), torch.ones(3), torch.zeros(3), 0, torch.quint4x2),
    "bits8": lambda: torch.empty(3, dtype=torch.bits8),
    "uint4": lambda: torch.empty(3, dtype=torch.uint4),
}
VERBS: dict[str, Callable[[dict[str, Any], Path], Any]] = {
    "save": lambda state, path: reshard.save(state, path / "new"),
    "dcp.save": lambda state, path: reshard.dcp.save(state, checkpoint_id=path / "new"),
    "async_save": lambda state, path: reshard.async_save(state, path / "new").result(),
    "load": lambda state, path: reshard.load(state, path / "c"),
    "fingerprint": lambda state, path: reshard.fingerprint(state),
    "layout_of": lambda state, path: reshard.layout_of(state),
    "compare": lambda state, path: reshard.compare(path / "c", state),
    "verify": lambda state, path: reshard.verify(path / "c", against=state),
}


@pytest.mark.parametrize("verb", ["save", "async_save", "compare", "verify"])
def test_tensors_on_meta_are_refused_where_their_values_are_needed(verb: str, tmp_path: Path) -> None:
    reshard.save({"w": torch.ones(3)}, tmp_path / "c")

    with pytest.raises(
        (CheckpointError, LayoutError), match=r"'w' is on the meta device and has no values.*: initialize it first"
    ):
        VERBS[verb]({"w": torch.empty(3, device="meta")}, tmp_path)


def test_a_quantized_tensor_says_what_to_save(tmp_path: Path) -> None:
    q = KINDS["qint8"]()
    with pytest.raises(FormatError, match=r"save q\.int_repr\(\), its scale, and its zero point"):
        reshard.save({"q": q}, tmp_path / "new")

    reshard.save({"q": [q.int_repr(), q.q_scale(), q.q_zero_point()]}, tmp_path / "new")


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_refused(kind: str, verb: str, tmp_path: Path) -> None:
    reshard.save({"a": torch.ones(2), "model": {"x": torch.ones(3)}}, tmp_path / "c")
    state = {"a": torch.zeros(2), "model": {"x": KINDS[kind]()}}

    with pytest.raises((LayoutError, FormatError), match=rf"(?s)'model\.x'.*{kind}"):
        VERBS[verb](state, tmp_path)

    assert not (tmp_path / "new").exists()
    assert torch.equal(state["a"], torch.zeros(2))


def test_strided_nested_buffers_are_not_set() -> None:
    def model(buffer: torch.Tensor) -> torch.nn.Module:
        made = torch.nn.Linear(3, 2)
        made.register_buffer("ragged", buffer)
        return made

    nested = KINDS["nested"]
    for source, target in ((nested, nested), (nested, lambda: torch.ones(2)), (lambda: torch.ones(2), nested)):
        with pytest.raises(KeyMismatchError, match=r"Mismatched: ragged: a strided nested tensor .*torch\.jagged"):
            reshard.set_model_state_dict(model(target()), model(source()).state_dict())


def test_a_nested_buffer_is_set_as_itself_and_loaded_into_one_of_its_lengths(tmp_path: Path) -> None:
    def model(*lengths: int) -> torch.nn.Module:
        made = torch.nn.Linear(3, 2)
        parts = [torch.full((n, 3), float(sum(lengths))) for n in lengths]
        made.register_buffer("ragged", torch.nested.nested_tensor(parts, layout=torch.jagged))
        return made

    source, target = model(2, 4), model(2, 4)
    target.ragged.values().zero_()
    with pytest.raises(KeyMismatchError, match=r"ragged: expected shape .*A nested tensor fits only itself: load\(\)"):
        reshard.set_model_state_dict(target, reshard.get_model_state_dict(source))
    reshard.save({"model": reshard.get_model_state_dict(source)}, tmp_path / "c")
    state = {"model": reshard.get_model_state_dict(target)}
    reshard.load(state, tmp_path / "c")
    reshard.set_model_state_dict(target, state["model"])

    assert torch.equal(target.ragged.values(), source.ragged.values())
    with pytest.raises(KeyMismatchError, match=r"model\.ragged\._values: saved with shape"):
        reshard.load({"model": reshard.get_model_state_dict(model(3, 4))}, tmp_path / "c")
