"""Tensors that have no plain elements are refused by name by every verb, before anything is read or written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
import reshard.dcp
from reshard.errors import FormatError, LayoutError

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


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_refused(kind: str, verb: str, tmp_path: Path) -> None:
    reshard.save({"a": torch.ones(2), "model": {"x": torch.ones(3)}}, tmp_path / "c")
    state = {"a": torch.zeros(2), "model": {"x": KINDS[kind]()}}

    with pytest.raises((LayoutError, FormatError), match=rf"(?s)'model\.x'.*{kind}"):
        VERBS[verb](state, tmp_path)

    assert not (tmp_path / "new").exists()
    assert torch.equal(state["a"], torch.zeros(2))
