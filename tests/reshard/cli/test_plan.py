"""`reshard plan`: sides of every kind, the proof, files written."""

from __future__ import annotations

import json
import re
import shlex

import pytest
import torch

import reshard
from planners import (
    LoadPlan,
    Mesh,
    Placement,
    Shard,
    StateLayout,
    StridedShard,
    TensorLayout,
    TensorSpec,
    Topology,
    dumps,
    fsdp_tp,
    loads,
    summarize,
)
from reshard.cli.arguments import both_sides


def test_a_checkpoint_onto_a_preset(say, checkpoint) -> None:
    told = json.loads(say("plan", checkpoint, "fsdp=4", "--json").out)

    whole = sum(tensor.nbytes for tensor in reshard.open(checkpoint).values())
    assert told["world_size"] == 4
    assert told["ok"]
    assert told["proved"]
    # 6 rows over 4 ranks are 2, 2, 2 and 0; numbers without dims are on every rank
    assert told["rank_bytes"] == [3 * 32 + 2 + 12] * 3 + [2 + 12]
    assert told["total_bytes"] == whole + 3 * 12
    assert "items" not in told

    listed = json.loads(say("plan", checkpoint, "fsdp=4", "--items", "--json", "--limit", "1").out)["items"]
    assert [sum(item["nbytes"] for item in its) for its in listed] == told["rank_bytes"]
    second = next(item for item in listed[1] if item["fqn"] == "model.layers.0.w")
    assert (second["target"], second["source"]) == ([[0, 0], [2, 4]], [[2, 0], [2, 4]])


def test_text_for_people(say, checkpoint) -> None:
    said = say("plan", checkpoint, "fsdp=3", "--limit", "2")

    assert said.out.startswith("ok: every rank reads each element that it needs exactly once, from the right place")
    assert "wrong" not in said.out
    assert "ranks 0-1 read       112 B each  ━━━" in said.out
    said = say("plan", checkpoint, "fsdp=3", "--limit", "1")
    assert "1 more rank;" in said.out


def test_the_glob_of_an_example_has_no_two_stars_in_a_row(say, tmp_path) -> None:
    reshard.save({f"{i}.weight": torch.ones(4, 4) for i in range(2)}, tmp_path / "c")

    assert "--rule '*.weight*=S(0)'\n" in say("plan", tmp_path / "c", "tp=2").out


def test_an_axis_that_shards_nothing_is_an_error_with_the_names_and_an_example_of_a_rule(say, checkpoint) -> None:
    names = {f"model.layers.{i}.w" for i in range(3)}

    said = say("plan", checkpoint, "tp=2")
    told = json.loads(say("plan", checkpoint, "tp=2", "--json").out)

    assert said.out.startswith("failed  axis 'tp' shards no tensor: all ranks along it hold all of model.")
    assert "ok: " not in said.out, "one verdict"
    assert "\nNo rule for 'tp' matches the names of these tensors.\n" in said.out
    assert "The checkpoint does not record how 'tp' sharded its tensors." in said.out
    assert f"  reshard plan {checkpoint} tp=2 \\\n    --rule '*layers.*.w*=S(0)' \\\n    --rule '*=R'\n" in said.out
    assert said.out.endswith("To replicate all tensors over 'tp', add --allow-unsharded-axes.\n")
    assert said.code == 1
    assert (told["ok"], told["proved"]) == (False, True)
    assert [text.split(":")[0] for text in told["findings"]] == ["axis 'tp' shards no tensor"]
    assert names <= set(told["unsharded_axes"]["tp"])
    made = reshard.plan(checkpoint, fsdp_tp(1, 2), allow_unsharded_axes=True)
    assert summarize(made).unsharded_axes.keys() == {"tp"}
    with pytest.warns(UserWarning, match="shards no tensor") as caught:
        assert reshard.plan(checkpoint, "tp=2") == made
    assert [(str(one.message), one.filename) for one in caught] == [
        (f"{told['findings'][0]}. Pass rules= that match, or allow_unsharded_axes=True", __file__)
    ]
    # what is said to do does it
    [again] = offered(said.out)
    assert json.loads(say(*again, "--json").out)["unsharded_axes"] == {}
    assert say(*again).code == 0


def offered(text: str) -> list[list[str]]:
    """The command lines in an output, without the name of the program."""
    found = re.findall(r"^  reshard ((?:.*\\\n)*.*)$", text, re.MULTILINE)
    return [shlex.split(line.replace("\\\n", " ")) for line in found]


@pytest.fixture
def gpt(tmp_path):
    """A model whose names are not Llama's, with moments, as FSDP2 over tensor parallelism saves it."""
    import torch

    shapes = {"wte.weight": (8, 4), "ln.weight": (4,)}
    shapes |= {f"h.{i}.{name}": (8, 4) for i in range(11) for name in ("c_attn.weight", "c_proj.weight", "fc.bias")}
    model = {name: torch.zeros(shape) for name, shape in shapes.items()}
    moments = {name: {"exp_avg": torch.zeros_like(t), "step": torch.tensor(1.0)} for name, t in model.items()}
    reshard.save({"model": model, "optim": {"state": moments}}, tmp_path / "whole")
    first, last = "_S(0, 2),S(0)", "S(0),S(1)"
    rules = {"*c_attn*": first, "*wte*": first, "*c_proj*": last, "*": "S(0),R"}
    reshard.convert(tmp_path / "whole", tmp_path / "gpt", onto=Topology.parse("dp=2,tp=2", rules))
    return tmp_path / "gpt"


@pytest.mark.parametrize("onto", ["fsdp=4,tp=2", "tp=2,fsdp=3", "dp=3,tp=2 --rule *=S(0),S(5)"])
def test_the_rules_that_the_checkpoint_records_are_offered_first(say, gpt, onto) -> None:
    if "--rule" in onto:  # a rule that shards, but for no tensor of the checkpoint: there is no dim 5
        assert say("plan", gpt, *onto.split()).code == 2
        return
    said = say("plan", gpt, onto)

    assert said.code == 1
    assert "The checkpoint records how 'tp' sharded each tensor." in said.out
    [again] = offered(said.out)
    assert sum(word == "--rule" for word in again) == 4, "three kinds, each with its moments, and all others"
    assert say(*again).code == 0
    rules = dict(word.split("=", 1) for word, before in zip(again[1:], again) if before == "--rule")
    saved = reshard.open(gpt).layout
    made = reshard.plan(gpt, again[2], rules=rules).wanted
    for name, layout in made.items():
        axes = dict(zip(layout.mesh.names, layout.placements))
        before = saved[name].placements[1]
        assert getattr(axes["tp"], "dim", None) == getattr(before, "dim", None), name
        if layout.spec.shape:
            assert axes["fsdp"] == Shard(0)
            assert layout.mesh.names[0] == ("tp" if getattr(before, "dim", None) == 0 else "fsdp")


@pytest.mark.parametrize("onto", ["dp=2,tp=2", "tp=2,dp=3", "dp=4,tp=2", "tp=4", "dp=3"])
def test_the_axes_that_inspect_prints_are_a_topology(say, gpt, onto) -> None:
    """They shard each tensor as recorded; with the same sizes, into the same regions."""
    saved = reshard.open(gpt).layout

    assert say("plan", gpt, onto).code == 0
    made = reshard.plan(gpt, onto).wanted
    for name, layout in made.items():
        before = dict(zip(saved[name].mesh.names, saved[name].placements))
        for axis, placement in zip(layout.mesh.names, layout.placements):
            assert getattr(placement, "dim", None) == getattr(before[axis], "dim", None), name
        if onto == "dp=2,tp=2":
            assert [layout.boxes(rank) for rank in range(4)] == [saved[name].boxes(rank) for rank in range(4)]
    said = say("plan", gpt, "dp=2,tp=2").out
    assert "same  dim " in said
    assert "from  " not in said, "one form for one layout"


def test_axes_of_files_without_layouts_need_rules(say, gpt, tmp_path) -> None:
    assert say("convert", gpt, tmp_path / "hf", "-f", "safetensors").code == 0

    said = say("plan", tmp_path / "hf", "dp=2,tp=2")

    assert said.code == 2
    assert (
        "the unknown axis 'dp': did you mean 'fsdp', which shards over data-parallel ranks? (ddp replicates.) W"
        in said.err
    )


def test_axes_of_a_checkpoint_beside_others_are_named(say, gpt) -> None:
    said = say("plan", gpt, "dp=2,pp=2")  # it records dp and tp

    assert said.code == 2
    assert "has the checkpoint's axis 'dp' beside pp, which the checkpoint does not record. Write 'fsdp=3'," in said.err
    assert "or only axes that the checkpoint records: dp, tp" in said.err


def test_the_axis_of_files_is_not_offered(say, tmp_path) -> None:
    reshard.save({"w": torch.ones(4, 4)}, tmp_path / "native")
    torch.save({"w": torch.ones(4, 4)}, tmp_path / "model.pt")
    reshard.convert(tmp_path / "native", tmp_path / "hf", format="safetensors")
    for path in ("native", "model.pt", "hf"):
        said = say("plan", tmp_path / path, "dp=2")
        assert said.code == 2
        assert "the checkpoint records" not in said.err


def test_layers_over_the_stages_of_a_pipeline(say, gpt) -> None:
    import torch

    made = reshard.plan(gpt, "pp=2,fsdp=3").wanted

    def ranks(name: str) -> list[int]:
        return [rank for rank in range(made.world_size) if made.parts(name, rank)]

    assert made.world_size == 6
    assert ranks("model.wte.weight") == ranks("model.h.4.fc.bias") == [0, 1, 2]
    assert ranks("model.h.5.fc.bias") == ranks("model.ln.weight") == ranks("model.h.10.c_attn.weight") == [3, 4, 5]
    assert ranks("optim.state.h.10.fc.bias.exp_avg") == [3, 4, 5]
    assert say("plan", gpt, "pp=2").code == 0
    reshard.save({"w": torch.ones(4)}, gpt.parent / "plain")
    said = say("plan", gpt.parent / "plain", "pp=2")
    assert (said.code, "pp=2 can split only models whose layers are numbered from 0" in said.err) == (2, True)


def test_tensors_outside_the_layers_are_listed_by_stage(say, tmp_path) -> None:
    """An embedding that has no usual name goes to the last stage, which only its owner can see."""
    import torch

    names = ("layers.0.w", "layers.1.w", "emb.weight", "norm.weight")
    reshard.save({name: torch.ones(4) for name in names}, tmp_path / "a")
    reshard.save({"wte.weight": torch.ones(4), **{name: torch.ones(4) for name in names[:2]}}, tmp_path / "b")

    for folder, stages in (
        ("a", ["0 tensors outside the layers", "2 tensors outside the layers: emb.weight, norm.weight"]),
        ("b", ["1 tensor outside the layers: wte.weight"]),
    ):
        lines = say("plan", tmp_path / folder, "pp=2").out.splitlines()
        assert [line for line in lines if line.startswith("stage ")] == [
            f"stage {number}  {text}" for number, text in enumerate(stages)
        ]
    assert "stage " not in say("plan", tmp_path / "a", "fsdp=2").out


def test_layers_that_several_words_number_are_not_guessed(say, tmp_path) -> None:
    """Those of a Sequential are `model.0.w` and `optim.state.0.w.exp_avg`: a layer must not part from its state."""
    import torch

    layers = {str(i): {"w": torch.ones(4)} for i in range(4)}
    reshard.save(
        {"model": layers, "optim": {"state": {f"{i}.w": {"exp_avg": torch.ones(4)} for i in range(4)}}}, tmp_path
    )

    said = say("plan", tmp_path, "pp=2")

    assert said.code == 2
    assert "under one prefix, such as layers.0.wq.weight, but here numbers follow 'model' and 'state'" in said.err


def test_an_example_of_a_rule_for_a_checkpoint_of_one_tensor(say, tmp_path) -> None:
    reshard.save({"blocks.0.attn.query.weight": torch.ones(8, 8)}, tmp_path / "c")

    said = say("plan", tmp_path / "c", "fsdp=2,tp=2")

    assert "\n\nTo replicate" not in said.out
    [again] = offered(said.out)
    assert say(*again).code == 0


def test_a_page_says_that_an_axis_shards_nothing(say, gpt, tmp_path) -> None:
    said = say("plan", gpt, "fsdp=2,tp=2", "--html", tmp_path / "plan.html")

    assert said.code == 1
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "Check the layout:<ul><li>axis &#x27;tp&#x27; shards no tensor" in page
    assert "OK: every element" not in page


def test_an_axis_may_shard_nothing_where_that_was_asked_for(say, checkpoint) -> None:
    for option in ("--allow-unsharded-axes", "--allow-uncut-axes"):
        allowed = say("plan", checkpoint, "tp=2", option)
        assert allowed.code == 0
        assert "\nnote  axis 'tp' shards no tensor: all ranks along it hold all of model." in allowed.out
    for words in (["ddp=2"], ["hsdp=2x3"], ["tp=2", "--rule", "*=R"]):  # their rules say replicas
        said = say("plan", checkpoint, *words)
        assert said.code == 0
        assert "shards no tensor" not in said.out
        assert json.loads(say("plan", checkpoint, *words, "--json").out)["findings"] == []


def test_the_side_that_is_read_from_may_be_the_one_that_is_not_sharded(say, checkpoint) -> None:
    said = say("plan", "tp=2", checkpoint)

    assert said.code == 1
    assert "failed  axis 'tp' shards no tensor" in said.out
    assert said.err == (
        f"note  this plans how ranks with the layout of {checkpoint} read a state saved as tp=2. "
        f"For the reverse: reshard plan {checkpoint} tp=2\n"
    )
    [again] = offered(said.out)
    assert again[:3] == ["plan", "tp=2", str(checkpoint)]
    assert " tp=2 --rule '*=S(0)'\n" in say("plan", "tp=2", checkpoint, "--rule", "*=S(0)").err
    assert say("plan", checkpoint, "fsdp=2").err == ""
    assert say(*again).code == 0
    assert say("plan", "tp=2", checkpoint, "--allow-unsharded-axes").code == 0


def test_of_two_axes_the_one_that_shards_nothing_is_named(say, checkpoint) -> None:
    said = say("plan", checkpoint, "fsdp=2,tp=3")

    assert "fsdp=2,tp=3 \\\n    --rule '*layers.*.w*=tp,fsdp: S(0),S(0)' \\\n    --rule '*=S(0),R'" in said.out
    assert said.out.count("shards no tensor") == 1


def test_layouts_are_said_in_words(say, gpt, monkeypatch) -> None:
    lines = say("plan", gpt, "fsdp=3").out.splitlines()
    assert not any("tip" in line for line in lines)
    assert not any("Notation" in line or "Box[" in line for line in lines)
    lines = say("plan", gpt, "fsdp=3", "--items", "--legend", "--limit", "5").out.splitlines()
    assert sum("<- Box[" in line for line in lines) == 5
    assert not any("tip  --" in line for line in lines)
    for name, value in {"FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "xterm", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)
    text = re.sub(r"\x1b\[[\d;]*m", "", say("plan", gpt, "fsdp=3").out)
    assert "tip  --items lists what each rank reads; --legend explains the notation" in text

    at = next(i for i, line in enumerate(lines) if "from  " in line)
    assert lines[at].endswith("from  dim 0 sharded over tp, then dp (tp,dp: S(0),S(0) on dp=2,tp=2)")
    assert lines[at + 1].endswith("to    dim 0 sharded over fsdp (S(0) on fsdp=3)")
    assert "  tp,dp:        the axes of the placements, in the order in which they shard" in lines


def test_only_some_names(say, gpt) -> None:
    told = json.loads(say("plan", gpt, "fsdp=2", "--select", "model.*", "--select", "!*.bias", "--json").out)

    assert told["tensors"] == 2 + 2 * 11
    assert "did you mean 'model.wte.weight'" in say("plan", gpt, "fsdp=2", "--select", "model.wte.weigth").err


def test_a_selection_is_also_of_what_a_file_holds(say, gpt, tmp_path) -> None:
    file, chosen = tmp_path / "plan.json", ["--select", "model.*", "--select", "!*.bias"]
    assert say("plan", gpt, "fsdp=2", "--out", file).code == 0

    for words in ((file, "fsdp=3"), (gpt, file), (file, gpt)):
        assert json.loads(say("plan", *words, *chosen, "--json").out)["tensors"] == 2 + 2 * 11
    assert f"no name in {file} matches 'wte'" in say("plan", file, "fsdp=3", "--select", "wte").err


def test_rules_are_for_a_topology_in_json_too_and_none_is_dropped(say, checkpoint, tmp_path) -> None:
    (tmp_path / "it.json").write_text(dumps(Topology.parse("fsdp=2", {"*": "S(0)"})))
    layout = tmp_path / "layout.json"
    assert say("plan", checkpoint, "fsdp=2", "--out", layout).code == 0

    told = [
        json.loads(say("plan", checkpoint, tmp_path / "it.json", *r, "--json").out) for r in ([], ["--rule", "*.w=R"])
    ]
    assert told[1]["total_bytes"] - told[0]["total_bytes"] == 3 * 6 * 4 * 4, "three weights on both ranks"
    for onto in (layout, checkpoint):
        said = say("convert", checkpoint, tmp_path / "out", "--onto", onto, "--rule", "*=R")
        assert (said.code, said.err) == (
            2, f"error: --rule is for the topology of --onto: {str(onto)!r} is not a topology, so leave out --rule\n"
        )  # fmt: skip
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("onto", "world_size"),
    [("ddp=2", 2), ("fsdp=3", 3), ("tp=2", 2), ("fsdp=2,tp=3", 6), ("tp=3,fsdp=2", 6), ("hsdp=2x3", 6)],
)
def test_presets(checkpoint, onto, world_size) -> None:
    assert both_sides(str(checkpoint), onto, {})[1].world_size == world_size


def test_rules(say, checkpoint) -> None:
    words = ["--rule", "*.w=S(0),S(1)", "--rule", "*=R,R", "--json"]

    told = json.loads(say("plan", checkpoint, "a=2,b=2", *words).out)

    assert told["rank_bytes"] == [3 * 24 + 8 + 12] * 4


def test_a_topology_without_rules_names_what_is_left(say, checkpoint) -> None:
    said = say("plan", checkpoint, "a=2", "--rule", "*.w=S(0)")

    assert said.code == 2
    assert "no rule matches" in said.err
    assert "The rules are for '*.w'. Add a last rule for all other tensors, such as --rule '*=R'" in said.err
    assert say("plan", checkpoint, checkpoint, "--rule", "*=R").code == 2


MISFITS = [
    ("*.w -> S(0),R\n* -> R", "line 2 of the topology: the rule for '*.w' (S(0),R): it has 2", "such as '*.w -> S(0)'"),
    ("*.w -> S(0)", "no rule matches 3 tensors", "for all other tensors, such as '* -> R'"),
    ("* -> R\n*.w -> S(0)", "these rules or homes have no effect: '*.w'", ""),
    ("* -> Q(0)", "line 2 of the topology: the rule for '*': unknown placement", ""),
]


@pytest.mark.parametrize(("rules", "what", "fix"), MISFITS)
def test_a_file_whose_rules_do_not_fit_is_a_wrong_argument_and_its_rule_the_one_to_mend(
    say, checkpoint, tmp_path, rules, what, fix
) -> None:
    file = tmp_path / "wanted.topology"
    file.write_text(f"tp=2\n{rules}\n")

    for said in (
        say("plan", checkpoint, file),
        say("convert", checkpoint, tmp_path / "dcp", "-f", "dcp", "--onto", file),
    ):
        assert said.err.startswith(f"error: {file}: {what}")
        assert fix in said.err
        assert "--rule" not in said.err
        assert said.code == 2
    assert not (tmp_path / "dcp").exists()


def test_files_of_topologies_and_layouts(say, checkpoint, tmp_path) -> None:
    layout = reshard.open(checkpoint).layout
    (tmp_path / "saved.json").write_text(dumps(layout))
    (tmp_path / "wanted.topology").write_text(str(Topology.parse("a=2", {"*": "S(0)"})))

    told = json.loads(say("plan", tmp_path / "saved.json", tmp_path / "wanted.topology", "--json").out)

    assert told["world_size"] == 2
    assert told["tensors"] == len(layout)


def test_between_two_checkpoints(say, checkpoint) -> None:
    told = json.loads(say("plan", checkpoint, checkpoint, "--json").out)

    assert told["proved"]
    assert told["total_bytes"] == reshard.open(checkpoint).layout.nbytes


def test_under_canonical_names(say, tmp_path) -> None:
    import torch

    reshard.save({"model": {"_orig_mod.w": torch.ones(4)}}, tmp_path / "a")
    said = say("plan", tmp_path / "a", "fsdp=2", "--normalized", "--items")

    assert "model.w Box[0:2]" in said.out


def test_the_plan_is_written(say, checkpoint, tmp_path) -> None:
    said = say("plan", checkpoint, "fsdp=2", "--out", tmp_path / "plan.json")

    plan = loads((tmp_path / "plan.json").read_text())
    assert isinstance(plan, LoadPlan)
    assert plan.world_size == 2
    assert "plan.json" in said.out


def test_the_plan_is_drawn(say, checkpoint, tmp_path) -> None:
    say("plan", checkpoint, "fsdp=2", "--html", tmp_path / "plan.html")

    assert "model.layers.0.w" in (tmp_path / "plan.html").read_text()


def test_a_plan_that_leaves_holes_is_refused(say, checkpoint, tmp_path) -> None:
    """A layout file in which nobody holds the second half of a tensor."""
    from planners import Box, StateLayout, TensorLayout

    layout = reshard.open(checkpoint).layout
    torn = {**layout, "model.norm": TensorLayout.from_boxes(layout["model.norm"].spec, {0: [Box((0,), (2,))]})}
    (tmp_path / "torn.json").write_text(dumps(StateLayout(torn)))

    said = say("plan", tmp_path / "torn.json", "fsdp=2", "--json")

    assert said.code == 1
    findings = json.loads(said.out)["findings"]
    assert any("model.norm" in finding for finding in findings)


def test_a_page_says_from_what_to_what_and_how_long(say, checkpoint, tmp_path) -> None:
    words = ["--html", tmp_path / "plan.html", "--read-rate", "1KB/s", "--ranks-per-host", "2"]
    said = say("plan", checkpoint, "fsdp=4", *words)

    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert f"from <b>{checkpoint}</b> to <b>fsdp=4</b>" in page
    told = re.search(r"at least  (\d+ ms), at 1 kB/s read by a host of 2 ranks", said.out)
    assert told is not None
    assert f"<dd>{told[1]}<small>1 kB/s read by a host of 2 ranks</small>" in page
    assert say("plan", checkpoint, "fsdp=4", "--read-rate", "fast").code == 2


def test_of_a_run_the_step_is_named(say, tmp_path) -> None:
    run, page = tmp_path / "run", tmp_path / "page.html"
    for step in (1, 2):
        reshard.save({"w": torch.ones(4, 4)}, run / f"step-{step}")

    newest = json.loads(say("plan", run, "fsdp=2", "--json", "--html", page).out)
    first = json.loads(say("plan", run, "fsdp=2", "--step", "1", "--json").out)
    backward = json.loads(say("plan", "fsdp=2", run, "--json").out)

    assert (newest["source"], newest["target"]) == (f"{run}/step-2", "fsdp=2")
    assert first["source"] == f"{run}/step-1"
    assert (backward["source"], backward["target"]) == ("fsdp=2", f"{run}/step-2")
    assert f"{run}/step-2" in page.read_text()
    assert f"no name in {run}/step-2 matches 'zz*'" in say("plan", run, "fsdp=2", "--select", "zz*").err
    assert say("inspect", run, "--html", page).out.splitlines()[-2].startswith(f"{run}/step-2, the newest complete")


def test_a_checkpoint_with_other_names_is_refused_in_groups_with_a_fix(say, tmp_path, checkpoint) -> None:
    reshard.save({f"other.{i}": torch.ones(6, 4) for i in range(30)}, tmp_path / "c")

    said = say("plan", checkpoint, tmp_path / "c")

    assert said.code == 3
    assert said.err.splitlines() == [
        "error: 30 of 30 target tensors do not match the saved state:",
        "    other.*: 30 names, such as 'other.0': is not saved",
        "  fix: --normalized uses canonical names, or --select '!GLOB' leaves names out",
    ]


def test_only_other_names_are_fixed_by_other_names(say, tmp_path) -> None:
    for name, rows in (("a", 4), ("b", 5)):
        reshard.save({"w": torch.ones(rows, 2)}, tmp_path / name)
    assert say("plan", tmp_path / "a", tmp_path / "b").err.splitlines() == [
        "error: 1 of 1 target tensors do not match the saved state:",
        "    'w': is saved with shape [4, 2], but the target layout has [5, 2]",
        "  the shape of each tensor must be the same on both sides",
    ]


def test_axes_of_which_one_had_a_single_rank_shard_as_in_fsdp2(say, tmp_path) -> None:
    """FSDP2 records that it comes last only where the other axis has several ranks."""
    spec, file = TensorSpec("w", (8, 2), "float32"), tmp_path / "layout.json"

    def on(shape: str, *placements: Placement) -> StateLayout:
        return StateLayout({"w": TensorLayout(spec, Mesh.parse(shape), placements)})

    meant = on("fsdp=2,tp=2", StridedShard(0, 2), Shard(0))
    for shape, first, is_guessed in [
        ("fsdp=3,tp=1", Shard(0), True),
        ("fsdp=1,tp=2", StridedShard(0, 2), False),
        ("fsdp=2,tp=2", StridedShard(0, 2), False),
    ]:
        saved = on(shape, first, Shard(0))
        file.write_text(dumps(saved))
        said, told = (say("plan", file, "fsdp=2,tp=2", *more) for more in ((), ("--json",)))
        made = reshard.plan(saved, "fsdp=2,tp=2").wanted
        assert [made["w"].boxes(rank) for rank in range(4)] == [meant["w"].boxes(rank) for rank in range(4)]
        reason = "does not record the order of fsdp and tp, because tp had one rank when it was saved"
        assert (reason in said.out) is is_guessed
        assert ("assuming tp, then fsdp, as in FSDP2" in said.out) is is_guessed
        assert len(json.loads(told.out)["notes"]) == is_guessed
    assert "not record" not in say("plan", file, "fsdp=2").out


def test_a_conversion_onto_a_topology_writes_the_layout_that_is_planned(say, gpt, tmp_path) -> None:
    for onto in ("dp=4,tp=2", "fsdp=2", "pp=2,fsdp=2"):
        said = say("convert", gpt, tmp_path / onto, "--onto", onto)
        assert said.code == 0, said.err
        planned, written = reshard.plan(gpt, onto).wanted, reshard.open(tmp_path / onto).layout
        ranks = range(planned.world_size)
        assert all(written.parts(name, rank) == planned.parts(name, rank) for name in planned for rank in ranks)


def test_a_conversion_onto_an_axis_that_shards_nothing_is_refused(say, checkpoint, tmp_path) -> None:
    said = say("convert", checkpoint, tmp_path / "out", "--onto", "fsdp=2,tp=2")

    assert said.code == 3
    assert "axis 'tp' shards no tensor" in said.err
    assert "add a --rule that matches them, or leave out the axis" in said.err
    assert not (tmp_path / "out").exists()
