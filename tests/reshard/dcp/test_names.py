"""Only the import line changes: all names of the torch that is installed, in submodules of the same names."""

from __future__ import annotations

import collections.abc
import importlib
import pkgutil
import typing

import pytest
import torch.distributed.checkpoint as theirs

import reshard.dcp as ours
from tests.torch_releases import requires

MODULES = ["", *(f".{m.name}" for m in pkgutil.iter_modules(theirs.__path__) if not m.name.startswith("_"))]
STATE = {f"{verb}_{what}state_dict" for verb in ("get", "set") for what in ("", "model_", "optimizer_")}
PLANNERS = {"DefaultLoadPlanner", "DefaultSavePlanner"}
STORAGES = {"FileSystemReader", "FileSystemWriter"}
HUGGING_FACE = {"HuggingFaceStorageWriter"}
CALLS = {"async_save", "load", "load_state_dict", "save", "save_state_dict"}
OURS = {
    "": PLANNERS | STORAGES | CALLS | HUGGING_FACE,
    ".default_planner": PLANNERS,
    ".filesystem": STORAGES,
    ".format_utils": {
        *("BroadcastingTorchSaveReader", "DynamicMetaLoadPlanner", "dcp_to_torch_save", "torch_save_to_dcp"),
        "DefaultLoadPlanner",
    },
    ".hf_storage": HUGGING_FACE,
    ".state_dict": STATE | {"StateDictOptions"},
    ".state_dict_loader": {"load", "load_state_dict", "DefaultLoadPlanner"},
    ".state_dict_saver": {"async_save", "save", "save_state_dict", "DefaultSavePlanner"},
}
"""What must differ; everything else is torch's own object, so that `isinstance` means the same on both sides."""


@pytest.mark.parametrize("module", MODULES)
def test_every_name_of_torch_is_there_and_is_torch_s_own_where_it_need_not_differ(module):
    their = importlib.import_module(theirs.__name__ + module)
    our = importlib.import_module(ours.__name__ + module)
    names = {name for name in vars(their) if not name.startswith("__")}
    submodules = {m.name for m in pkgutil.iter_modules(theirs.__path__)} if not module else set()

    assert [name for name in names if not hasattr(our, name)] == []
    assert {name for name in names if not name.startswith("_")} <= {*dir(our), *submodules} or module
    differing = {name for name in names - submodules if getattr(our, name) is not getattr(their, name)}
    differing -= set(typing.__all__) & set(collections.abc.__all__)  # the same, which older torch takes from typing
    assert {name for name in differing if not name.startswith("_")} == OURS.get(module, set()) & names


@pytest.mark.parametrize("module", MODULES)
def test_a_star_imports_what_it_imports_of_torch(module):
    here: dict[str, object] = {}
    there: dict[str, object] = {}
    exec(f"from {ours.__name__}{module} import *", here)
    exec(f"from {theirs.__name__}{module} import *", there)
    late = {"state_dict"}  # which torch's package has once somebody has imported it
    assert there.keys() - here.keys() - late == set()
    assert {name for name in OURS.get(module, set()) & here.keys() if here[name] is there.get(name)} == set()


def test_a_module_that_is_not_imported_yet_is_ours_and_not_torch_s(monkeypatch):
    importlib.import_module(theirs.__name__ + ".state_dict")
    monkeypatch.delattr(ours, "state_dict", raising=False)
    assert ours.state_dict.__name__ == "reshard.dcp.state_dict"


def test_names_can_be_imported_from_where_programs_import_them():
    from reshard.dcp.metadata import STATE_DICT_TYPE, Metadata
    from reshard.dcp.planner import LoadItemType, WriteItemType
    from reshard.dcp.state_dict import StateDictOptions, get_model_state_dict

    assert None not in (STATE_DICT_TYPE, Metadata, LoadItemType, WriteItemType)
    assert StateDictOptions(full_state_dict=True).full_state_dict
    assert get_model_state_dict is not None


@requires(hasattr(theirs.state_dict_saver, "AsyncSaveResponse"), "has none of these names")
def test_names_that_are_newer():
    from reshard.dcp.filesystem import SerializationFormat
    from reshard.dcp.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

    assert AsyncCheckpointerType.THREAD.value == "thread"
    assert None not in (SerializationFormat, AsyncSaveResponse)


def test_what_neither_has_is_an_error_that_names_the_module():
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = ours.nothing_of_the_kind
    with pytest.raises(ImportError, match="nothing_of_the_kind"):
        exec("from reshard.dcp.filesystem import nothing_of_the_kind")
