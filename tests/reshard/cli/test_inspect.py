"""`reshard inspect` and `reshard normalize`."""

from __future__ import annotations

import json
import os
import pickle
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard as DimShard, placement_types

import reshard
from planners import Box, Mesh, Replicate, Shard, TensorLayout, TensorSpec, Topology
from planners.geometry.layout_text import _LEGEND, chunk_sizes, parse_layout
from planners.reports.terminal_pictures import draw_cuts
from reshard.cli.output import Branch, PrintedLeaf, fold, print_json
from tests import gloo
from tests.samples import sample


def test_tree(say, checkpoint) -> None:
    said = say("inspect", checkpoint)

    assert said.code == 0
    assert said.out.splitlines()[0] == str(checkpoint), "told before the checkpoint is opened"
    assert "format native, 6 tensors" in said.out
    assert "layers.0-2.w × 3 float32 [6, 4] 96 B" in " ".join(said.out.split())
    assert "float32 [6, 4]  96 B" in said.out
    assert "step  = 7" in said.out


def test_json_has_every_tensor(say, checkpoint) -> None:
    told = json.loads(say("inspect", checkpoint, "--json").out)

    assert told["format"] == "native"
    assert told["tensors"]["model.layers.1.w"] == {
        "shape": [6, 4],
        "dtype": "float32",
        "nbytes": 96,
        "layout": told["tensors"]["model.layers.0.w"]["layout"],
    }
    assert told["total_bytes"] == sum(tensor["nbytes"] for tensor in told["tensors"].values())
    assert told["objects"]["step"] == 7
    assert told["problems"] == []
    assert told["ok"]
    assert told["unchecked"] == ""


def test_what_nothing_was_compared_with_is_told(say, checkpoint, tmp_path) -> None:
    """`"ok": true` alone said more than was checked."""
    assert say("convert", checkpoint, tmp_path / "dcp", "-f", "dcp").code == 0
    said, told = say("inspect", tmp_path / "dcp"), json.loads(say("inspect", tmp_path / "dcp", "--json").out)
    assert "unchecked: whether all files are from the same save, and whether replicas are equal" in told["unchecked"]
    assert f"note  {told['unchecked']}" in said.out


def test_json_of_keys_that_json_does_not_have(capsys) -> None:
    print_json({(1, "a"): [{2: (3,)}]})

    assert json.loads(capsys.readouterr().out) == {"ok": True, "(1, 'a')": [{"2": [3]}]}


def test_json_of_numbers_that_json_does_not_have(capsys) -> None:
    values = [float("inf"), -float("inf"), float("nan"), np.float64("nan"), 1.5]
    print_json({"l": values, float("nan"): np.float32("inf")})

    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert told == {"ok": True, "l": ["inf", "-inf", "nan", "nan", 1.5], "nan": "inf"}


def test_without_tensors_there_are_no_headings_for_them(say, tmp_path) -> None:
    reshard.save({"w": torch.ones(2), "step": 3}, tmp_path / "c")
    assert "dtypes" in say("inspect", tmp_path / "c").out
    some = say("inspect", tmp_path / "c", "--select", "step").out
    assert "step" in some
    assert "dtypes" not in some
    assert "layouts" not in some


def test_of_a_run_nothing_is_printed_before_a_name_is_refused(say, tmp_path) -> None:
    reshard.save({"w": torch.ones(4)}, tmp_path / "run" / "step-1")

    for option in ("--select", "--map"):
        said = say("inspect", tmp_path / "run", option, "wx*")
        assert (said.code, said.out) == (3, ""), said


def test_values_that_are_each_rank_s_own_are_shown(say, tmp_path) -> None:
    path = str(tmp_path / "c")
    reshard.save({"w": torch.ones(4), "data": {"rng": reshard.PerRank({"seed": 1})}}, path)

    said = say("inspect", path).out
    assert "1 tensor, 16 B, 0 objects, 1 per-rank value, saved by 1 rank" in said
    assert "data.rng  per-rank value, 1 rank" in said
    assert json.loads(say("inspect", path, "--json").out)["per_rank"] == {"data.rng": [0]}
    assert "data.rng  per-rank value" in say("inspect", path, "--select", "data*").out
    assert "per-rank value, 1 rank" in reshard.open(path).to_html()
    assert "is a value, not a tensor, in" in say("inspect", path, "--map", "data.rng").err


def test_only_some_names(say, checkpoint) -> None:
    told = json.loads(say("inspect", checkpoint, "--select", "*.w", "--json").out)

    assert list(told["tensors"]) == [f"model.layers.{i}.w" for i in range(3)]
    assert told["objects"] == {}


def _save_on_two_meshes(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    both = DTensor.from_local(torch.ones(2, 8), mesh, [DimShard(0), DimShard(1)], run_check=False)
    one = DTensor.from_local(torch.ones(4, 8), mesh["fsdp"], [DimShard(0)], run_check=False)
    reshard.save({"both": both, "one": one, "step": 7}, folder)


@pytest.mark.gloo
def test_a_selection_and_the_json_say_of_a_layout_what_the_text_of_the_whole_says(say, tmp_path) -> None:
    """FSDP2 over tensor parallelism: what only FSDP shards is on a mesh of one axis, and tp has copies of it."""
    gloo.run(_save_on_two_meshes, 4, str(tmp_path / "c"))
    words, short_form = "replicated over tp; dim 0 sharded over fsdp", "S(0),R on fsdp=2,tp=2"

    assert f"{words} ({short_form})" in say("inspect", tmp_path / "c").out
    assert f"{words} ({short_form})" in say("inspect", tmp_path / "c", "--select", "one").out
    for select in ((), ("--select", "one"), ("--select", "step")):
        assert ", saved by 4 ranks\n" in say("inspect", tmp_path / "c", *select).out
        assert json.loads(say("inspect", tmp_path / "c", "--json", *select).out)["world_size"] == 4
    assert say("inspect", tmp_path / "c", "--select", "step", "--html", tmp_path / "p.html").code == 0
    assert re.search(r"ranks that saved\W+\w+\W+\w*\W*4\b", (tmp_path / "p.html").read_text("utf-8"))
    assert reshard.open(tmp_path / "c").select("step").select("*").layout.world_size == 4
    for select in ((), ("--select", "one")):
        layout = json.loads(say("inspect", tmp_path / "c", "--json", *select).out)["tensors"]["one"]["layout"]
        assert (layout["words"], layout["short_form"]) == (words, short_form)
        told = json.loads(say("explain", short_form, "--json").out)
        assert (told["words"], told["short_form"]) == (words, short_form)
        assert {axis["name"] for axis in layout["mesh"]} == {"fsdp", "tp"}


def test_a_plan_file_is_named_with_the_command_that_takes_it(say, checkpoint, tmp_path) -> None:
    file = tmp_path / "plan.json"
    assert say("plan", checkpoint, "fsdp=2", "--rule", "*=S(0)", "--out", file).code == 0
    for command in ("inspect", "verify"):
        said = say(command, file)
        assert said.code != 0
        assert (
            f"{file} is a load plan of reshard, not a checkpoint: reshard plan CHECKPOINT {file} takes it" in said.err
        )
        assert "Known formats" not in said.err
    assert say("plan", checkpoint, file).code == 0


def test_the_old_name_of_the_option(say, checkpoint) -> None:
    old, new = (say("inspect", checkpoint, option, "*.w") for option in ("--only", "--select"))

    assert old.out == new.out
    assert (old.err, new.err) == ("--only is deprecated: use --select\n", "")
    assert "--only" not in say("inspect", "--help").out
    assert "<bool>" not in say("inspect", "--help").out


@pytest.mark.parametrize("words", [("inspect",), ("normalize",), ("diff", "other"), ("verify",)])
def test_names_from_a_file_neither_move_the_cursor_nor_begin_a_line(say, tmp_path, words) -> None:
    odd = "a\nok  complete and undamaged\x1b[2J\u202e\0"
    state = {odd: torch.ones(2), "tied\x1b[2J": torch.ones(2), f"{odd} value": 1}
    state["model"] = dict.fromkeys(("one\x1b[2J", "other\x1b[2J"), torch.ones(3))
    reshard.save(state, tmp_path / "odd")
    reshard.save({odd: torch.zeros(2)}, tmp_path / "other")

    said = say(words[0], tmp_path / "odd", *(tmp_path / word for word in words[1:]))

    assert not [line for line in said.out.splitlines() if not line.isprintable() or line.startswith("ok")]


def test_several_globs(say, checkpoint) -> None:
    words = ["--select", "model.*", "--select", "!*.0.*", "--select", "!*.n*"]
    told = json.loads(say("inspect", checkpoint, *words, "--json").out)

    assert list(told["tensors"]) == ["model.layers.1.w", "model.layers.2.w", "model.count"]


def test_layouts_are_said_in_words_and_their_signs_at_the_end(say, checkpoint, tmp_path) -> None:
    rules = {"*.w": "_S(0, 2),S(0)", "*": "R,R"}
    reshard.convert(checkpoint, tmp_path / "c", onto=Topology.parse("dp=2,tp=2", rules))
    lines = say("inspect", tmp_path / "c").out.splitlines()
    assert not {"Notation", "tip  --legend explains the notation"} & {*lines}
    lines = say("inspect", tmp_path / "c", "--legend").out.splitlines()

    assert "  3 tensors  288 B  dim 0 sharded over tp, then dp (tp,dp: S(0),S(0) on dp=2,tp=2)" in lines
    assert "│   ├── layers.0-2.w × 3  float32 [6, 4]  96 B  dim 0 sharded over tp, then dp" in lines
    assert lines[lines.index("Notation") + 1 :] == [
        "  S(d)          dim d is sharded over this axis of the mesh",
        "  R             replicated: all ranks along this axis hold the same",
        "  on dp=4,tp=2  the mesh: its axes and their sizes, in the order of the placements",
        "  tp,dp:        the axes of the placements, in the order in which they shard",
    ]


def test_a_list_of_plain_values_takes_one_line(say, tmp_path) -> None:
    groups = [{"betas": [0.9, 0.999], "params": [f"{i}.weight" for i in range(12)]}]
    reshard.save({"w": torch.ones(2), "optim": {"param_groups": groups}}, tmp_path / "c")
    said = say("inspect", tmp_path / "c").out

    assert "betas  = [0.9, 0.999]  2 items\n" in said
    assert "params  = ['0.weight', '1.weight', '2.weight', '3.weight', '4.weigh...  12 items\n" in said


def test_json_has_as_many_objects_as_the_text(say, tmp_path) -> None:
    state = {"w": torch.ones(2), "step": 3, "betas": [0.9, 0.95], "nest": {"lrs": [1]}, "mixed": [torch.ones(1), 5]}
    reshard.save(state, tmp_path / "native")
    reshard.convert(tmp_path / "native", tmp_path / "dcp", format="dcp")
    wanted = {"step": 3, "betas": [0.9, 0.95], "nest.lrs": [1], "mixed": {"1": 5}}

    for path in (tmp_path / "native", tmp_path / "dcp"):
        assert json.loads(say("inspect", path, "--json").out)["objects"] == wanted
        assert f", {len(wanted)} objects, " in say("inspect", path).out

    nested: dict[str, Any] = {
        "x": [1, 2, (3,)], "none": [], "deep": [[], [[4]]], "parts": [{"lr": 1}, 2],
        "some": [[5], torch.ones(1), (), [{"a": 6}, 7]],
    }  # fmt: skip
    saved = reshard.save({"w": torch.ones(2), **nested}, tmp_path / "nested")
    reshard.convert(tmp_path / "nested", tmp_path / "nested.pt", format="torch_save")
    wanted = {
        "x": [1, 2, [3]], "none": [], "deep": [[], [[4]]], "parts.0.lr": 1, "parts": {"1": 2},
        "some": {"0": [5], "2": [], "3": {"1": 7}}, "some.3.0.a": 6,
    }  # fmt: skip
    for path in (tmp_path / "nested", tmp_path / "nested.pt"):
        assert json.loads(say("inspect", path, "--json").out)["objects"] == wanted
        said = say("inspect", path).out
        assert f", {saved.objects} objects, " in said or f", {saved.objects} objects\n" in said
    assert saved.objects == len(wanted)
    assert "x  = [1, 2, (3,)]  3 items\n" in said
    assert "none  = []" in said
    torch.save([torch.ones(1), 1, 2], tmp_path / "list.pt")  # a list without a name of its own
    assert json.loads(say("inspect", tmp_path / "list.pt", "--json").out)["objects"] == {"": {"1": 1, "2": 2}}
    assert "{1: 1, 2: 2}" in say("inspect", tmp_path / "list.pt").out


@pytest.mark.parametrize(("value", "shown"), [(5, "= 5"), ([1, 2], "= [1, 2]"), ({}, "= {}")])
def test_a_file_that_holds_one_value(say, tmp_path, value, shown) -> None:
    torch.save(value, tmp_path / "value.pt")
    said = say("inspect", tmp_path / "value.pt")
    assert said.code == 0, said.err
    assert shown in said.out


def test_a_truncated_file_is_damaged_and_no_bug(say, tmp_path) -> None:
    torch.save({"w": torch.zeros(100)}, tmp_path / "model.pt")
    (tmp_path / "model.pt").write_bytes((tmp_path / "model.pt").read_bytes()[:300])
    said = say("inspect", tmp_path / "model.pt")
    assert (said.code, said.err) == (1, "")
    assert "the zip archive is damaged: it has no end; the file was truncated" in " ".join(said.out.split())
    assert "= {}" not in said.out


def test_a_glob_that_matches_nothing(say, checkpoint) -> None:
    said = say("inspect", checkpoint, "--select", "model.layer.1.w")

    assert said.code == 3
    assert "matches 'model.layer.1.w': did you mean 'model.layers.1.w'?" in said.err


def test_one_of_a_thing_is_one(say, tmp_path) -> None:
    reshard.save({"w": torch.ones(3), "step": 1}, tmp_path / "one")

    for words in (["inspect"], ["plan", "ddp=1"], ["verify"], ["normalize"]):
        said = say(words[0], tmp_path / "one", *words[1:])
        assert not re.search(r"\b1 (tensors|objects|ranks|entries|parameters|files)\b", said.out)


SPEC = TensorSpec("w", (6, 4), "float32")


@pytest.mark.parametrize(
    ("boxes", "cuts"),
    [
        ([((0, 0), (6, 4))], ()),
        ([((0, 0), (3, 4)), ((3, 0), (3, 4))], ((0, (3, 3)),)),
        ([((r, c), (4 - r // 2, 2)) for r in (0, 4) for c in (0, 2)], ((0, (4, 2)), (1, (2, 2)))),
        ([((0, 0), (1, 4)), ((1, 0), (5, 4))], ((0, (1, 5)),)),
        ([((0, 0), (3, 4)), ((3, 0), (3, 2)), ((3, 2), (3, 2))], None),  # no product
        ([((0, 0), (3, 4))], None),  # a hole
        ([((0, 0), (4, 4)), ((2, 0), (4, 4))], None),  # an overlap
        ([((0, 0), (2, 4)), ((3, 0), (3, 4))], None),  # a hole between
    ],
)
def test_cuts_whose_product_the_chunks_are(boxes, cuts) -> None:
    layout = TensorLayout.from_boxes(SPEC, {rank: [Box(*box)] for rank, box in enumerate(boxes)})

    assert chunk_sizes(layout) == cuts


def test_cuts_of_what_has_no_dims_or_no_elements() -> None:
    def of(shape):
        spec = TensorSpec("w", shape, "float32")
        return chunk_sizes(TensorLayout.from_boxes(spec, {0: [Box((0,) * len(shape), shape)]}))

    assert of(()) == ()
    assert of((0, 3)) is None  # there is nothing that could be seen to be cut


def test_cuts_are_shown_for_files_that_know_no_mesh(say, checkpoint, tmp_path) -> None:
    rules = ["--rule", "*.w=S(0),S(1)", "--rule", "*=R,R"]
    assert say("convert", checkpoint, tmp_path / "dcp", "-f", "dcp", "--onto", "a=2,b=2", *rules).code == 0

    said, told = say("inspect", tmp_path / "dcp"), json.loads(say("inspect", tmp_path / "dcp", "--json").out)

    assert "layers.0-2.w × 3  float32 [6, 4]  96 B  dim 0 in 2 chunks; dim 1 in 2 chunks" in said.out
    assert "norm  bfloat16 [4]  8 B  unsharded" in said.out
    shards = [{"dim": 0, "sizes": [3, 3]}, {"dim": 1, "sizes": [2, 2]}]
    assert told["tensors"]["model.layers.0.w"]["layout"] == {
        "words": "dim 0 in 2 chunks; dim 1 in 2 chunks",
        "short_form": "",
        "shards": shards,
    }
    native = json.loads(say("inspect", checkpoint, "--json").out)["tensors"]["model.norm"]["layout"]
    mesh = [{"name": "world", "size": 1}]
    assert native == {"words": "unsharded", "short_form": "", "mesh": mesh, "ranks": None, "placements": ["R"]}


def test_depth_hides_what_is_below(say, checkpoint) -> None:
    shallow, deep = say("inspect", checkpoint, "--depth", "1").out, say("inspect", checkpoint).out

    assert "float32 [6, 4]" not in shallow
    assert "model" in shallow
    assert len(shallow.splitlines()) < len(deep.splitlines())


def test_a_torn_checkpoint_is_told(say, checkpoint) -> None:
    (checkpoint / "manifest.json").write_text("{")

    assert_damaged(say, checkpoint, "manifest.json")


@pytest.mark.parametrize("is_missing", [True, False])
def test_plain_values_in_a_lost_file_are_damage_and_all_else_is_shown(say, tmp_path, is_missing) -> None:
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"w": torch.ones(4), "lr": 0.1, "note": "x"}, checkpoint_id=tmp_path / "c", no_dist=True)
    file = tmp_path / "c" / "__0_0.distcp"
    file.unlink() if is_missing else os.truncate(file, 9)
    said = say("inspect", tmp_path / "c")
    assert said.code == 1
    assert "w  float32 [4]" in said.out
    assert "3 names" in said.out
    assert "damaged  plain values that cannot be read: " in said.out
    shown = json.loads(say("inspect", tmp_path / "c", "--json").out)
    assert (shown["ok"], [*shown["tensors"]], shown["objects"]) == (False, ["w"], {})
    assert say("inspect", tmp_path / "c", "--html", tmp_path / "page.html").code == 1
    assert "plain values that cannot be read" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("is_missing", [True, False])
def test_a_missing_or_truncated_file_is_damage_as_it_is_to_verify(say, checkpoint, is_missing) -> None:
    [file] = checkpoint.glob("data-*/*.safetensors")
    kept = file.read_bytes()[:99]
    file.unlink()
    if not is_missing:
        file.write_bytes(kept)

    assert_damaged(say, checkpoint, f"{file.name} {'is missing' if is_missing else 'has 99 of its'}")


def assert_damaged(say, checkpoint: Path, told: str) -> None:
    said, as_json = say("inspect", checkpoint), say("inspect", checkpoint, "--json")

    assert (said.code, said.err) == (as_json.code, as_json.err) == (say("verify", checkpoint).code, "") == (1, "")
    assert f"damaged  {checkpoint}" in said.out
    assert told in said.out
    assert not json.loads(as_json.out)["ok"]
    assert told in json.loads(as_json.out)["problems"][0]


@pytest.mark.parametrize(
    "name", ["dcp_misc_single/ckpt", "dcp_sharded_tensor_w2/ckpt", "dcp_zstd_w2/ckpt", "ds_tp2_dp2/ckpt",
             "ds_z3_w2/ckpt", "hf_dcp_writer_2x2/ckpt", "mcore_legacy_tp2_pp2/ckpt", "orbax", "pt_dtensor_2x2/ckpt",
             "torchsnapshot"]
)  # fmt: skip
def test_samples_of_other_frameworks(say, name) -> None:
    folder = sample(name)
    wheres = [folder, *sorted(p for p in folder.iterdir() if p.is_dir())]

    told = [json.loads(said.out) for said in (say("inspect", where, "--json") for where in wheres) if said.code == 0]

    assert told, f"nothing below {folder} opens"
    assert all(one["tensors"] or one["objects"] for one in told)


def test_normalize(say, checkpoint) -> None:
    told = json.loads(say("normalize", checkpoint, "--json").out)

    assert told["model"]["norm"] == {"shape": [4], "dtype": "bfloat16", "nbytes": 8}
    assert told["optim"]["param_groups"] == [{"lr": 0.1, "params": ["norm"]}]
    assert told["omitted"] == ["step"]
    assert "bfloat16 [4]" in say("normalize", checkpoint).out


def test_normalize_shows_selected_names(say, checkpoint) -> None:
    told = json.loads(say("normalize", checkpoint, "--select", "layers.*", "--select", "!*.1.w", "--json").out)

    assert list(told["model"]) == ["layers.0.w", "layers.2.w"]
    assert told["optim"]["state"] == {}
    nothing = say("normalize", checkpoint, "--select", "zz")
    assert nothing.code == 3
    assert "matches 'zz'" in nothing.err
    for command in (("inspect", checkpoint), ("plan", checkpoint, "fsdp=1"), ("diff", checkpoint, checkpoint)):
        none = say(*command, "--select", "!*")
        assert (none.code, none.out) == (3, "")
        assert "the globs !* leave no name of " in none.err


def test_fold_joins_only_what_is_alike() -> None:
    leaf, other = PrintedLeaf("a", 1), PrintedLeaf("b", 1)
    branch = Branch.of({("0",): leaf, ("1",): leaf, ("3",): leaf, ("4",): other, ("10",): other, ("x",): leaf})

    assert [(name, times) for name, times, _ in fold(branch)] == [("0-1", 2), ("3", 1), ("4", 1), ("10", 1), ("x", 1)]


@pytest.mark.parametrize("order", [[("a",), ("a", "b")], [("a", "b"), ("a",)]])
def test_a_name_that_begins_another_is_kept(order) -> None:
    branch = Branch.of({path: PrintedLeaf("/".join(path), 1) for path in order})

    assert branch.count == 2
    assert branch.children["a"].children["."] == PrintedLeaf("a", 1)


def test_a_run_is_listed(tmp_path: Path, say) -> None:
    reshard.save({"w": torch.ones(2)}, tmp_path / "checkpoint" / "step-10")
    (tmp_path / "checkpoint" / "step-20").mkdir()

    first, second = reshard.steps(tmp_path)
    shown, told = say("inspect", tmp_path), json.loads(say("inspect", tmp_path, "--json").out)

    assert (first.step, first.format, first.nbytes, first.problem) == (10, "native", 8, None)
    assert (second.step, second.format) == (20, None)
    assert "is empty" in second.problem
    assert shown.code == 0
    assert "a run with 2 checkpoints" in shown.out
    assert f"{first.path}, the newest complete checkpoint\nformat native, 1 tensor" in shown.out
    assert shown.out.count("is empty") == 1
    assert f"{first.path}, the newest complete" in say("inspect", tmp_path, "--select", "*").out
    assert [row["step"] for row in told["steps"]] == [10, 20]
    assert (told["path"], told["newest"]["path"]) == (str(tmp_path), first.path)
    assert (told["ok"], told["covers"]) == (True, first.path)
    [passed] = told["newest"]["warnings"]
    assert passed.startswith("checkpoint/step-20 is newer but was skipped")
    assert told["newest"] | {"warnings": []} == json.loads(say("inspect", first.path, "--json").out)
    assert told | {"path": first.path} == told["newest"] | {"steps": told["steps"], "newest": told["newest"]}
    assert "float32 [2]" in say("inspect", tmp_path, "--step", "10").out
    assert reshard.steps(tmp_path / "checkpoint" / "step-10") == []


def test_every_command_that_reads_one_checkpoint_takes_a_step(say, tmp_path: Path) -> None:
    for step in (1, 2):
        reshard.save({"model": {f"w{step}": torch.ones(step)}}, tmp_path / f"step-{step}")

    for words in (["verify"], ["plan", "fsdp=1"], ["normalize"], ["convert", tmp_path / "out"], ["inspect"]):
        command, *others = words
        old, new = (say(command, tmp_path, *others, *step, "--json") for step in (["--step", "1"], []))
        assert (old.code, old.err) == (0, ""), words
        assert new.err == ("" if command == "inspect" else f"using {tmp_path}/step-2, the newest complete checkpoint "
                           f"of {tmp_path}\n") or command == "convert"  # fmt: skip
        if command != "plan":
            assert "step-1" in old.out
    assert list(reshard.open(tmp_path / "out")) == ["model.w1"]
    assert "has no step 7" in say("verify", tmp_path, "--step", "7").err


def test_a_map_of_a_damaged_checkpoint_is_not_the_answer_yes(say, tmp_path) -> None:
    reshard.dcp.save({"w": torch.ones(8, 2)}, checkpoint_id=tmp_path / "c")
    metadata = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    metadata.state_dict_metadata["w"].size = torch.Size((10, 2))
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata))

    said = say("inspect", tmp_path / "c", "--map", "w")
    assert (said.code, "no rank" in said.out) == (1, True)
    assert "damaged  tensor 'w' of shape [10, 2]: no file of the checkpoint has elements [8:10, 0:2]" in said.out
    said = say("inspect", tmp_path / "c", "--html", tmp_path / "page.html")
    assert (said.code, "damaged  tensor 'w' of shape [10, 2]: " in said.out) == (1, True)


def test_a_map_says_of_which_step_of_a_run_it_is(say, tmp_path) -> None:
    for step in (1, 2):
        reshard.save({"w": torch.ones(4)}, tmp_path / f"step-{step}")
    (tmp_path / "step-2" / "manifest.json").unlink()

    said = say("inspect", tmp_path, "--map", "w")
    assert f"{tmp_path / 'step-1'}, the newest complete checkpoint\nunsharded\nw  float32 [4]" in said.out
    assert f"step 2  {tmp_path / 'step-2'}  not complete: " in said.out


def test_a_map_of_the_cuts_of_a_tensor(say, tmp_path) -> None:
    topology = Topology.parse("dp=3,tp=2", {"w": "S(0),S(1)", "e": "S(1),R", "*": "R,R"})
    state = {"w": torch.ones(6, 4), "e": torch.ones(2, 9, 4), "one": torch.ones(()), "step": 1}
    reshard.save(state, tmp_path / "a")
    reshard.convert(tmp_path / "a", tmp_path / "c", onto=topology)

    said = say("inspect", tmp_path / "c", "--map", "w").out.splitlines()
    assert said[:3] == [
        "dim 0 sharded over dp; dim 1 sharded over tp (S(0),S(1) on dp=3,tp=2)",
        "w  float32 [6, 4]  96 B",
        "rows are dim 0, columns are dim 1; each cell names the ranks that hold it",
    ]
    assert "\n".join(line.rstrip() for line in said[3:11]) == (
        "  0   2   4\n0 ┌───┬───┐\n  │ 0 │ 1 │\n2 ├───┼───┤\n  │ 2 │ 3 │\n4 ├───┼───┤\n  │ 4 │ 5 │\n6 └───┴───┘"
    )
    said = say("inspect", tmp_path / "c", "--map", "e").out
    assert "rows are dim 0, columns are dim 1;" in said
    assert "│ 0-1 │ 2-3 │ 4-5 │" in said
    assert "│ 0-5 │" in say("inspect", tmp_path / "c", "--map", "one").out
    assert "is a value, not a tensor, in" in say("inspect", tmp_path / "c", "--map", "step").err
    assert "did you mean 'one'?" in say("inspect", tmp_path / "c", "--map", "onw").err


CUTS = [
    (TensorLayout(TensorSpec("w", (16384, 4096), "int8"), Mesh({"a": 4096, "b": 64}), [Shard(0), Shard(1)]), "262143"),
    (
        TensorLayout(TensorSpec("w", (4, 4, 4), "int8"), Mesh({"a": 2, "b": 2, "c": 2}), [Shard(i) for i in range(3)]),
        "2",
    ),
    (TensorLayout(TensorSpec("w", (8, 3), "int8"), Mesh({"a": 2, "b": 8}), [Shard(0), Replicate()]), "0-7"),
    (
        TensorLayout(TensorSpec("w", (8, 3), "int8"), Mesh({"a": 8, "b": 2}), [Replicate(), Shard(0)]),
        "0, 2, 4, 6",
    ),
    (TensorLayout(TensorSpec("w", (0, 3), "int8"), Mesh({"a": 2}), [Shard(0)]), "no elements"),
    (TensorLayout.from_boxes(TensorSpec("w", (4, 4), "int8"), {7: [Box((0, 0), (2, 3))]}), "no rank"),
    (TensorLayout.from_flat_ranges(TensorSpec("w", (4, 4), "int8"), {0: (0, 6), 1: (6, 16)}), "│   0   │   1   │"),
]


@pytest.mark.parametrize(("layout", "told"), CUTS, ids=[str(layout.spec.shape) for layout, _ in CUTS])
def test_a_map_fits_the_terminal_however_many_cuts_there_are(layout: TensorLayout, told: str) -> None:
    text = draw_cuts(layout, 60)
    drawn = [line for line in text.splitlines() if "│" in line or "─" in line]

    assert told in text
    assert len({len(line) for line in drawn}) <= 1
    assert all(len(line) <= 60 for line in drawn)
    assert len(drawn) < 40
    assert ("which is sharded, too" in text) == (layout.spec.shape == (4, 4, 4)), "the only one of three cuts"


def test_cells_of_a_map_are_to_scale_or_it_says_that_they_are_not() -> None:
    def drawn(sizes: tuple[int, int], form: str) -> tuple[list[int], list[int], str]:
        text = draw_cuts(TensorLayout.of(TensorSpec("w", sizes, "int8"), parse_layout(form)), 60)
        borders = [i for i, line in enumerate(text.splitlines()) if "─" in line]
        top = next(line for line in text.splitlines() if "┌" in line)
        marks = [i for i, character in enumerate(top) if character in "┌┬┐"]
        return [*map(int.__sub__, borders[1:], borders)], [*map(int.__sub__, marks[1:], marks)], text

    tall, wide, text = drawn((7, 14), "S(0),S(1) on a=3,b=3")
    assert (tall, wide) == ([6, 6, 2], [17, 17, 14]), "3, 3, and 1 rows; 5, 5, and 4 columns"
    assert "not to scale" not in text
    tall, wide, text = drawn((6, 9), "S(0),S(1) on a=3,b=2")
    assert (tall, wide) == ([2, 2, 2], [10, 8])
    assert "not to scale" not in text
    tall, _, text = drawn((4002, 8), "B(0, 4000+2) on tp=2")
    assert (tall[0] > tall[2], "not to scale" in text) == (True, True)
    assert "not to scale" in drawn((512, 8), "S(0) on a=256")[2]


def test_a_short_form_is_explained(say) -> None:
    said = say("explain", "_S(0, 2),S(0) on dp=2,tp=2")

    assert said.out.startswith("dim 0 sharded over tp, then dp\n")
    assert "0 ┌───┐\n  │ 0 │\n2 ├───┤\n  │ 2 │\n4 ├───┤\n  │ 1 │\n6 ├───┤\n  │ 3 │\n8 └───┘" in said.out
    assert "tip" not in said.out
    said = say("explain", "_S(0, 2),S(0) on dp=2,tp=2", "--legend")
    assert "  _S(d, n)      dim d is sharded over this axis after" in said.out


def test_all_signs_are_explained_without_a_layout(say) -> None:
    said = say("explain", "--legend")
    assert (said.code, said.err) == (0, "")
    assert [line.split("  ")[1] for line in said.out.splitlines()[2:]] == [sign for sign, _, _ in _LEGEND]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["S(3) on x=2"], "dim 3 sharded over x"),
        (["_S(0,4) on dp=2"], "8 └"),
        (["B(0, 4+2+2) on tp=2"], "8 └"),
        (["R on dp=1"], "unsharded"),
        (["S(0),S(1) on dp=2,tp=2", "--shape", "7,5"], "7 └"),
        (["S(0) on dp=256", "--shape", "512"], "0   2   4"),
    ],
)
def test_every_short_form_is_drawn(say, words, told) -> None:
    assert told in say("explain", *words).out


def test_an_error_does_not_name_the_tensor_that_is_drawn(say) -> None:
    said = say("explain", "S(5) on dp=4", "--shape", "4,4")
    assert said.err.endswith("shards a dim that the shape (4, 4) does not have\n")


def test_meshes_that_are_too_large_are_not_drawn(say) -> None:
    said = say("explain", "S(0) on dp=65").out
    assert "┌" not in said
    assert "not drawn, because it has 65 ranks: to draw it, add --shape, such as --shape 4096,1024" in said
    assert say("explain", "S(0) dp=4").out == say("explain", "S(0) on dp=4").out  # "on" may be missing
    assert say("explain", "tp,dp: S(0),S(0) on dp=2,tp=2").out.startswith("dim 0 sharded over tp, then dp\n")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["mine=2"], "has the unknown axis 'mine'"),
        (["mine=2,tp=2"], "Or give placements on this mesh, such as 'S(0),R on mine=2,tp=2'"),
        (["S(0)", "--shape", "4"], "--shape needs a mesh: write 'S(0)' with one, such as 'S(0),R on dp=4,tp=2'"),
        (["Partial(sum)"], "unknown placement 'Partial(sum)': write S(dim)"),
        (["foo"], "or R. The notation: reshard explain --legend"),
        (["dp,tp: S(0)"], "has 1 placement for the 2 axes before the colon"),
        ([" "], "explain needs a LAYOUT, such as 'S(0),R on dp=4,tp=2'"),
        (["S(0) on dp=2,tp=2"], "needs one placement for each axis, 2 in all, but got 1"),
        (["S(1) on dp=2", "--shape", "4"], "does not have"),
        (["S(1) on dp=2", "--shape", "4x4"], "write sizes such as 4096,1024"),
        (["S(70) on dp=2"], "only tensors of at most 63 dims are drawn"),
        (["S(0) on dp=2", "--shape", ",".join(["1"] * 64)], "only tensors of at most 63 dims are drawn"),
        (["R,S(99999999999) on dp=65,tp=2"], "only tensors of at most 63 dims are drawn"),
        (["_S(0, 99999999999999) on dp=2"], "only layouts with split factors of at most 1,048,576 are drawn"),
    ],
)
def test_what_is_no_short_form(say, words, told) -> None:
    said = say("explain", *words)

    assert (said.code, told in said.err) == (2, True)


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        ("S(0)", "dim 0 sharded over axis 0\n"),
        ("[Shard(dim=0), Replicate()]", "dim 0 sharded over axis 0; replicated over axis 1\n"),
        ("(_StridedShard(dim=0, sf=2), Shard(dim=0))", "dim 0 sharded over axis 0, after other axes sharded it into 2"),
        ("tp,dp: S(0),S(1)", "dim 0 sharded over tp; dim 1 sharded over dp\n"),
    ],
)
def test_placements_are_explained_without_a_mesh(say, layout, told) -> None:
    said = say("explain", layout)
    assert (said.code, said.out.startswith(told)) == (0, True), said
    assert json.loads(say("explain", layout, "--json").out)["mesh"] is None
    example = shlex.split(said.out.partition("axes: reshard ")[2].splitlines()[0])
    assert "┌" in say(*example).out


def test_torchs_repr_is_read_with_a_mesh(say) -> None:
    torchs = (placement_types.Shard(0), placement_types.Replicate())
    for text in (list(torchs), torchs, "[Shard(dim=0), Replicate()]", "(Shard(dim=0), Replicate())", "[S(0), R]"):
        assert (
            say("explain", f"{text} on dp=2,tp=2", "--json").out == say("explain", "S(0),R on dp=2,tp=2", "--json").out
        )


def test_a_topology_is_explained_by_its_rules(say) -> None:
    said = say("explain", "fsdp=4,tp=2")
    assert said.code == 0
    assert said.out.startswith("the mesh fsdp=4,tp=2 of 8 ranks; the first matching rule applies:\n  *wq.weight*")
    assert "reshard plan CHECKPOINT fsdp=4,tp=2\n" in said.out
    [*_, last] = json.loads(say("explain", "fsdp=4,tp=2", "--json").out)["rules"]
    assert last == {"glob": "*", "placements": "fsdp,tp: S(0),R"}


def test_ranks_that_hold_nothing_are_named(say) -> None:
    assert "; rank 3 holds nothing\n" in say("explain", "S(0) on dp=4", "--shape", "3,2").out
    assert "; ranks 1, 3 hold nothing\n" in say("explain", "R,S(0) on dp=2,tp=2", "--shape", "1").out
    assert "nothing" not in say("explain", "S(0) on dp=4").out


def test_nothing_is_printed_before_an_error(say, tmp_path) -> None:
    reshard.save({"w": torch.ones(2)}, tmp_path / "step-1")
    said = say("inspect", tmp_path, "--step", "9")
    assert (said.code, said.out) == (3, "")
    assert said.err.startswith(f"error: {tmp_path} has no step 9: its steps are 1")
    said = say("inspect", tmp_path / "step-1", "--step", "9")
    assert (
        said.err == f"error: {tmp_path}/step-1 has no step 9, since it is not the folder of a run: leave out --step\n"
    )


def test_a_part_of_a_name_is_answered_with_the_names_that_contain_it(say, checkpoint) -> None:
    said = say("inspect", checkpoint, "--map", "s.0.w")
    assert said.code == 3
    assert "Names that contain it: model.layers.0.w" in said.err


@pytest.mark.parametrize("words", [["--select", "zz*"], ["--html", "/none/x.html"]])
def test_what_fails_prints_no_header_before(say, checkpoint, words: list[str]) -> None:
    said = say("inspect", checkpoint, *words)

    assert (said.code, said.out) == (3, "")


@pytest.mark.parametrize("format", ["native", "dcp", "safetensors", "torch_save"])
def test_ranks_are_named_where_the_format_records_them(say, checkpoint, tmp_path, format) -> None:
    reshard.convert(checkpoint, tmp_path / "out.pt", format=format, select="model.*")

    said, page = say("inspect", tmp_path / "out.pt"), tmp_path / "page.html"
    say("inspect", tmp_path / "out.pt", "--html", page)

    assert ("saved by 1 rank" in said.out) == (format in ("native", "dcp")) == ("ranks that saved" in page.read_text())


def test_the_page_counts_objects_as_the_command_does(say, tmp_path) -> None:
    torch.save(
        {"w": torch.ones(2), "groups": [{"lr": 0.1, "betas": [0.9, 0.5], "names": ["a", "b"]}]}, tmp_path / "x.pt"
    )
    reshard.save({"w": torch.ones(2), "groups": [{"lr": 0.1, "betas": [0.9, 0.5], "names": ["a"]}]}, tmp_path / "x")
    for name in ("x.pt", "x"):
        shown = json.loads(say("inspect", tmp_path / name, "--json").out)["objects"]
        page = reshard.open(tmp_path / name).to_html()
        data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
        assert len(data["leaves"]) == len(shown) + 1 == 4
        assert "= [0.9, 0.5]" in data["texts"]


def test_of_a_file_that_cannot_be_read_only_the_damage_is_shown(say, tmp_path) -> None:
    reshard.save({"w": torch.arange(64.0)}, tmp_path / "saved")
    reshard.convert(tmp_path / "saved", tmp_path / "hf", format="safetensors")
    file = tmp_path / "hf" / "model.safetensors"
    os.truncate(file, 100)

    said = say("inspect", tmp_path / "hf")

    assert said.code == 1
    assert said.out.splitlines() == [f"{tmp_path / 'hf'}", said.out.splitlines()[-1]]
    assert said.out.splitlines()[1].startswith(f"damaged  {file}: ")


def test_of_a_run_whose_steps_are_all_damaged_each_has_a_line_and_all_one_fix(say, tmp_path) -> None:
    run = tmp_path / "run"
    for step in (1, 2):
        reshard.save({"w": torch.ones(4)}, run / f"step-{step}")
        next(run.glob(f"step-{step}/data-*/*")).unlink()

    shown, planned = say("inspect", run), say("plan", run, "fsdp=2")

    assert (shown.code, shown.out.splitlines()[-1]) == (1, "no checkpoint of this run is complete")
    assert re.fullmatch(
        r"error: no checkpoint of the run at \S+ can be opened:\n"
        r"  step-2: .* is missing\n  step-1: .* is missing\n"
        r"  fix: restore one of them, or load another checkpoint\n",
        planned.err,
    )


def test_a_run_without_a_complete_step_is_not_ok_in_json_either(say, tmp_path) -> None:
    reshard.save({"w": torch.ones(4)}, tmp_path / "step-1")
    next(tmp_path.glob("step-1/data-*/*")).unlink()
    said = say("inspect", tmp_path, "--json")
    told = json.loads(said.out)
    assert (said.code, told["ok"], told["problems"]) == (1, False, ["no checkpoint of this run is complete"])
    assert [row["step"] for row in told["steps"]] == [1]


LONG = 10**5000
"""Python writes no more than 4,300 digits."""


_LONG_ONES = {
    "int": LONG,
    "negative": -LONG,
    "list": [1, LONG],
    "dict": {"in": [LONG]},
    "set": {LONG},
    "odd keys": {None: LONG, 2: 2},
}


@pytest.mark.parametrize("value", _LONG_ONES.values(), ids=_LONG_ONES)
def test_ints_too_long_for_decimal_digits_are_shown_in_hex(say, tmp_path, value) -> None:
    for name in ("a", "b"):
        reshard.save({"v": value, "w": torch.ones(1), "same": name}, tmp_path / name)
    a, b = tmp_path / "a", tmp_path / "b"
    shown = say("inspect", a).out
    assert "0x31e20801036510f3" in shown or "with a long int" in shown
    assert json.loads(say("inspect", a, "--json").out)["ok"]
    for words in (("diff", a, b), ("verify", a, "--against", b)):
        said = say(*words)
        assert (said.code, said.err) == (1, "")
        assert "'same'" in said.out
    assert "0x31e2" in reshard.open(a).to_html() or "with a long int" in reshard.open(a).to_html()
    assert say("diff", a, tmp_path / "b", "--json").code == 1


def test_ints_of_which_python_writes_the_digits_stay_numbers_in_json(capsys) -> None:
    print_json({"v": 10**4000, "n": -3, "yes": True})
    assert json.loads(capsys.readouterr().out) == {"ok": True, "v": 10**4000, "n": -3, "yes": True}


def test_keys_with_the_same_text_are_both_in_json(capsys) -> None:
    print_json({"odd": {1: 2, "1": 3}, "plain": {1: 2, None: 3}})
    assert json.loads(capsys.readouterr().out) == {"ok": True, "odd": [[1, 2], ["1", 3]], "plain": {"1": 2, "None": 3}}


def test_a_long_int_that_differs_is_a_difference(say, tmp_path) -> None:
    reshard.save({"v": LONG}, tmp_path / "a")
    reshard.save({"v": LONG + 1}, tmp_path / "b")
    report = reshard.compare(tmp_path / "a", tmp_path / "b")
    assert [finding.fqn for finding in report.findings] == ["v"]
