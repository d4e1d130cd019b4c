"""Plans as text, as pages, as JSON, and compared with one another."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from planners import (
    Box,
    Cluster,
    CodecError,
    PlanError,
    StateLayout,
    TensorLayout,
    TensorSpec,
    diff,
    dumps,
    estimate,
    explain,
    format_plan,
    loads,
    plan_reads,
    plan_transfers,
    plan_writes,
    schedule,
)
from planners.geometry.layout_text import parse_layout
from planners.reports.plan_pages import _round_sizes, cuts, matrix, rank_color, to_html
from planners.units import format_bytes
from tests.planners.states import alike

state = alike((8, 12), ("layers.0.w", "layers.1.w"))


GRID, ROWS = state("S(0),S(1)", "dp=2,tp=2"), state("S(0)", "dp=3")
LOAD, SAVE, MOVE = plan_reads(GRID, ROWS), plan_writes(GRID), plan_transfers(GRID, ROWS)
IRREGULAR = StateLayout(
    {
        n: TensorLayout.from_flat_ranges(TensorSpec(n, (8, 12), "float32"), {0: (0, 41), 2: (41, 96)})
        for n in GRID
    }
)  # fmt: skip


class Page(HTMLParser):
    """Checks that tags match, and keeps their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.attributes, self.tags = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "input", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize(
    "plan", [LOAD, SAVE, MOVE, plan_reads(IRREGULAR, GRID), plan_transfers(GRID, IRREGULAR), plan_writes(IRREGULAR)]
)
def test_a_page_is_whole_and_needs_nothing_from_outside(plan):
    text = to_html(plan, title="A <b>title</b> & more")
    page = Page(text)

    assert "A &lt;b&gt;title&lt;/b&gt; &amp; more" in text
    assert not [v for k, v in page.attributes if k in ("src", "href", "srcset", "data")]
    assert not re.search(r"https?:|url\(|@import|{{", text)
    assert """<meta http-equiv="Content-Security-Policy"\n  content="default-src 'none'; style-src""" in text
    assert page.tags.count("table") == 1
    assert {"svg", "title", "input"} <= set(page.tags)
    assert "<td>layers.<wbr>*.<wbr>w</td>" in text


def test_a_page_draws_who_holds_what():
    text = to_html(plan_reads(state("S(0),S(1)", "dp=2,tp=2"), state("S(0)", "dp=3")))

    for rank, box in enumerate(("0:4, 0:6", "0:4, 6:12", "4:8, 0:6", "4:8, 6:12")):
        assert f"<title>rank {rank}: [{box}]</title>" in text
    assert "<title>rank 1: [3:6, 0:12]</title>" in text
    assert '<text class="tick start" x="14" y="6">dim 1: 12</text>' in text
    assert "<title>saved by rank 3, read by rank 2: 96 B</title>" in text
    assert text.count('<text class="tick number"') == 8


def test_a_page_of_thousands_of_ranks_is_bounded():
    names = [f"layers.{i}.w" for i in range(300)] + [
        f"other{chr(97 + i % 26)}{chr(97 + i // 26)}.w" for i in range(500)
    ]
    before = state("S(0),S(1)", "dp=1024,tp=16", (16384, 4096), names)
    after = state("S(0)", "dp=12288", (16384, 4096), names)

    text = to_html(plan_transfers(before, after))

    Page(text)
    assert len(text) < 2_000_000
    assert "Each cell sums 32 × 32 hosts of 8 ranks." in text
    assert "more rows are omitted" in text


@pytest.mark.parametrize("shape", [(), (0,), (5,), (0, 3), (3, 4, 5), (2, 1, 1, 7)])
def test_tensors_of_any_dims_are_drawn(shape):
    after = "S(0)" if shape else "R"

    Page(to_html(plan_transfers(state("R", "dp=2", shape), state(after, "dp=3", shape))))


def test_an_empty_plan_has_a_page():
    Page(to_html(plan_reads(StateLayout({}), StateLayout({}))))


def test_a_page_says_that_the_plan_was_proved_or_what_is_wrong():
    for plan, did in (
        (LOAD, "rank reads each element that it needs"),
        (SAVE, "element is written"),
        (MOVE, "needed element is delivered"),
    ):
        assert f"OK: every {did} exactly once" in to_html(plan)
    torn = to_html(LOAD.with_items({1: LOAD.items(1)[:-1]}))

    assert "OK: " not in torn
    assert "Not correct:<ul><li>" in torn


def test_a_page_says_from_where_to_where_in_what_memory_and_time():
    cluster = Cluster(storage_read_bytes_per_s=64.0, ranks_per_host=1)
    text = to_html(LOAD, source="a<b", target="fsdp=3", cluster=cluster)

    assert "from <b>a&lt;b</b> to <b>fsdp=3</b>" in text
    assert "<dt>largest shard per rank, before</dt><dd>192 B" in text  # two of 8 x 12 float32 in four parts
    assert "<dt>largest shard per rank, after</dt><dd>288 B" in text  # three of the eight rows
    assert "<dd>4.5 s<small>64 B/s read by a host of 1 rank</small>" in text
    assert "estimated time" not in to_html(LOAD)


@pytest.mark.parametrize(("before", "after"), [(1, 8), (4, 3), (3, 40), (65, 64), (1, 129), (1000, 4)])
def test_the_matrix_has_a_row_for_each_rank_that_saved_and_a_column_for_each_that_loads(before, after):
    text = to_html(plan_reads(state("S(0)", f"dp={before}", (2000, 3)), state("S(0)", f"dp={after}", (2000, 3))))

    per = 1 if max(before, after) <= 64 else 8 * -(-max(before, after) // 512)
    rows, columns = -(-before // per), -(-after // per)
    assert f"bytes from {rows} to {columns} rows and columns of {'rank' if per == 1 else 'host'}s" in text
    unit = "host" if per > 1 else "rank"
    assert f">saved by {unit} ↓</text>" in text
    assert f">read by {unit} →</text>" in text
    ticks = [int(n.replace(",", "")) for n in re.findall(r'<text class="tick"[^>]*>([\d,]+)</text>', text)]
    assert all(tick < 10 or tick % 5 == 0 or tick % 2 == 0 for tick in ticks)
    assert max(ticks) < max(before, after)


def test_a_rank_has_the_same_color_on_every_page_in_which_white_text_is_legible():
    few, many = (to_html(plan_reads(state("S(0)", f"dp={n}"), ROWS)) for n in (2, 8))
    color = re.compile(r'fill="(#\w{6})"[^>]*><title>rank 1: \[4:8, 0:12\]')
    assert color.findall(few) == [rank_color(1)]
    assert f'fill="{rank_color(1)}"' in many
    assert len({rank_color(rank) for rank in range(1000)}) > 300
    for rank in range(20_000):
        channels = (int(rank_color(rank)[i : i + 2], 16) / 255 for i in (1, 3, 5))
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        luminance = sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))
        assert 1.05 / (luminance + 0.05) >= 4.5, "the contrast that WCAG AA asks for"


def test_the_scale_of_the_matrix_is_linear_unless_sizes_differ_by_more_than_ten_times():
    def scale(*sizes):
        sums = np.array([[*sizes, 0]])
        text = matrix(sums, ("saved by", "read by"), "rank", 1)
        return re.findall(r'fill-opacity="(.*?)"', text), re.sub(r"<.*?>", "", text[text.index('"legend"') :])

    opacities, legend = scale(1000, 100, 550)
    assert opacities == ["1.00", "0.28", "0.64"]
    assert legend.endswith("Bytes in a cell:  none · 0 B  1000 B (linear scale)")
    opacities, legend = scale(100_000, 2000, 20_000)
    assert opacities == ["1.00", "0.20", "0.67"]
    assert legend.endswith("none · 2.0 KiB or less  97.7 KiB (logarithmic scale)")
    opacities, legend = scale(1000, 900, 1)
    assert opacities == ["1.00", "0.92", "0.20"], "a cell with almost nothing does not choose the scale"
    assert legend.endswith("(linear scale)")
    assert scale(0, 0)[1].endswith("Bytes in a cell:  none")


def test_weights_are_drawn_before_moments_and_what_is_left_out_is_told():
    weights = {f"model.w{i}.weight": (8 + i, 12) for i in range(9)}
    moments = {f"exp_avg.w{i}.weight": (80 + i, 12) for i in range(9)}  # larger, and first by name

    def layouts(mesh):
        specs = (TensorSpec(name, shape, "float32") for name, shape in (moments | weights).items())
        return StateLayout({spec.fqn: TensorLayout.of(spec, parse_layout(f"S(0) on {mesh}")) for spec in specs})

    text = to_html(plan_reads(layouts("dp=2"), layouts("dp=3")))
    options = re.findall(r"<option.*?>(.*?)</option>", text)
    assert options == [f"model.w{i}.weight [{8 + i}, 12]" for i in range(8, 0, -1)]
    assert "Not drawn: 10 more combinations of shape and layout." in text


def test_of_many_shards_those_of_the_outer_axes_are_drawn_or_groups_with_their_ranks():
    def drawn(form, shape=(4096, 64)):
        text = cuts(TensorLayout.of(TensorSpec("w", shape, "float32"), parse_layout(form)), "saved")
        return re.findall(r"<title>(.*?)</title>", text), re.search(r"<small>(.*?)</small>", text)[1]

    titles, words = drawn("tp,fsdp: S(0),S(0) on fsdp=256,tp=4")
    assert titles[1] == "ranks 1, 5, 9, 13 and 252 more: [1024:2048, 0:64]"
    assert len(titles) == 4
    assert words.endswith("· 1,024 boxes; not drawn: the further sharding of each box over fsdp")
    titles, words = drawn("S(0) on fsdp=1024")
    assert titles[:2] == ["ranks 0 to 63: [0:256, 0:64]", "ranks 64 to 127: [256:512, 0:64]"]
    assert len(titles) == 16
    assert "each drawn box stands for many shards" in words
    assert len(drawn("S(0),S(1) on a=4096,b=64")[0]) == 256
    titles, words = drawn("S(2) on a=2", (4, 3, 6))
    assert titles == ["rank 0: [0:4, 0, 0:3]", "rank 1: [0:4, 0, 3:6]"], "dims that are sharded are drawn"


def test_one_rank_has_no_axis():
    text = to_html(plan_reads(state("R", "file=1"), ROWS))

    assert "file=1" not in text
    assert "<small>unsharded · 1 box</small>" in text


@pytest.mark.parametrize("most", [0, 1, 7, 1023, 1024, 1025, 3 << 20, 1023 << 20, (1 << 40) + 1])
def test_sizes_on_an_axis_are_round_and_few(most):
    marks = _round_sizes(most)

    assert marks[0] == 0
    assert marks[-2] < max(most, 1) <= marks[-1]
    assert 2 <= len(marks) <= 7
    assert all(mark < 1024 or float(format_bytes(mark).split()[0]) * 2 % 1 == 0 for mark in marks)


def test_what_has_no_page_is_refused():
    with pytest.raises(PlanError, match="cannot draw a StateLayout"):
        to_html(GRID)
    with pytest.raises(PlanError, match="ranks_per_host must be >= 1"):
        LOAD.to_html(ranks_per_host=0)


def test_each_kind_of_plan_draws_its_own_page():
    cluster = Cluster(storage_read_bytes_per_s=1e9, storage_write_bytes_per_s=1e9, network_bytes_per_s=1e9)
    for plan in (LOAD, SAVE, MOVE):
        asked = {"title": "t", "source": "a", "target": "b", "cluster": cluster, "wrong": ["odd"]}
        assert plan.to_html(**asked) == to_html(plan, **asked)
        assert plan.to_html() == to_html(plan)


def test_text_of_each_kind_of_plan():
    assert "  ranks 0-1 read       288 B each  ######" in format_plan(LOAD)
    assert "  rank 2 reads         192 B       ====" in format_plan(LOAD, bar="=")
    assert "ranks 0-3 write" in format_plan(SAVE)
    moved = format_plan(MOVE, limit=None)
    assert "cross" in moved.splitlines()[0]
    assert moved.count("layers.") == sum(1 for _ in MOVE.items())
    assert "... 1 more rank; mean 256 B, most 288 B" in format_plan(LOAD, limit=1)
    rounds = schedule(MOVE, max_inflight_bytes=128)
    assert len(format_plan(rounds, limit=None).splitlines()) == 1 + rounds.rounds
    assert f"... {rounds.rounds - 1} more rounds" in format_plan(rounds, limit=1)


def test_boxes_of_items_are_said_to_be_those_of_local_tensors():
    """Of each of them, where a rank has several; they were said to be of the full tensor."""
    boxes = {0: [Box((0, 0), (2, 3))], 1: [Box((2, 0), (1, 3)), Box((3, 0), (3, 3))]}
    wanted = StateLayout({"w": TensorLayout.from_boxes(TensorSpec("w", (6, 3), "float32"), boxes)})
    text = format_plan(plan_reads(alike((6, 3), ("w",))("R", "x=1"), wanted))
    assert "read items of rank 0: NAME  box in this rank's shard <- box in the saved chunk, and" in text
    assert "\n  read items of rank 1\n" in text, "once is enough"
    assert "w Box[0:1, 0:3] <- Box[2:3, 0:3] of chunk Box[0:6, 0:3] of rank 0, 12 B" in text
    assert "w (local tensor 1) Box[0:3, 0:3] <- Box[3:6, 0:3] of chunk" in text
    assert "items of rank 0: NAME  box in the full tensor <- box in this rank's shard" in format_plan(SAVE)


def test_the_story_of_one_tensor_on_one_rank():
    load, save, move = (explain(plan, "layers.0.w", 1) for plan in (LOAD, SAVE, MOVE))

    assert "rank 1 wants Box[3:6, 0:12]" in load
    assert "dp=2,tp=2 (S(0), S(1))" in load
    assert load.count("of chunk") == 4
    assert "rank 1 holds Box[0:4, 6:12]" in save
    assert "is written by rank 1 Box[0:4, 6:12]" in save
    assert "rank 1 holds before Box[0:4, 6:12]" in move
    assert "of itself" in move
    assert "to rank 0, 72 B" in move
    assert "nothing of it" in explain(MOVE, "layers.0.w", 3)


@pytest.mark.parametrize("plan", [LOAD, SAVE, MOVE])
def test_a_name_or_rank_that_a_plan_lacks_is_refused(plan):
    with pytest.raises(PlanError, match=r"of this name .*'v'"):
        explain(plan, "v", 0)
    with pytest.raises(PlanError, match="ranks 0 to"):
        explain(plan, "layers.0.w", 99)


def test_a_plan_does_not_differ_from_itself():
    for plan in (LOAD, SAVE, MOVE, GRID):
        assert diff(plan, plan).is_empty
        assert str(diff(plan, plan)) == "no difference"


def test_the_difference_of_two_targets():
    other = plan_reads(GRID, state("S(0)", "dp=4", names=["layers.0.w"]))

    found = diff(LOAD, other)

    assert (found.only_a, found.only_b) == ((), ())
    assert list(found.changed) == ["layers.0.w", "layers.1.w"]
    assert "dp=3 (S(0)) -> dp=4 (S(0))" in found.changed["layers.0.w"]
    assert found.added_bytes == 384 - 2 * 384
    assert [len(loads) for loads in found.rank_bytes] == [4, 4]
    assert "4 ranks differ" in str(found)


def test_the_difference_of_two_layouts():
    found = diff(GRID, state("S(0),S(1)", "dp=2,tp=2", (8, 16), ["layers.1.w", "new"]))

    assert (found.only_a, found.only_b) == (("layers.0.w",), ("new",))
    assert found.changed == {"layers.1.w": "shape (8, 12) -> (8, 16)"}


def test_kinds_do_not_mix():
    with pytest.raises(PlanError, match="LoadPlan with SavePlan"):
        diff(LOAD, SAVE)
    with pytest.raises(PlanError, match="cannot compare int"):
        diff(1, 2)


def listed():
    return MOVE.with_items({1: MOVE.items_to(1)})


def reordered():
    rounds = schedule(MOVE)
    last = rounds.rounds - 1
    columns = (last - rounds.round, *rounds.columns()[1:])
    return type(rounds)(MOVE, rounds.max_inflight_bytes, columns)


@pytest.mark.parametrize(
    "make", [lambda: MOVE, listed, lambda: schedule(MOVE, max_inflight_bytes=128), reordered, lambda: Cluster()]
)
def test_plans_survive_json(make):
    value = make()
    text = dumps(value)

    assert loads(text) == value
    assert dumps(loads(text)) == text


def test_an_estimate_survives_json():
    cost = estimate(MOVE, Cluster(network_bytes_per_s=1e9, ranks_per_host=2))

    again = loads(dumps(cost))

    assert dumps(again) == dumps(cost)
    assert str(again) == str(cost)


def test_edited_plans_are_refused():
    moved = json.loads(dumps(listed()))
    moved["items"]["1"][0][1] = 3
    with pytest.raises(CodecError, match=r"the proof of this transfer plan failed: 'layers\.0\.w', rank 1"):
        loads(json.dumps(moved))
    rounds = json.loads(dumps(reordered()))
    rounds["columns"][0][0] = rounds["columns"][0][-1]
    with pytest.raises(CodecError, match=r"the proof of this schedule failed"):
        loads(json.dumps(rounds))
    other = json.loads(dumps(MOVE))
    other["after"] = json.loads(dumps(plan_transfers(GRID, GRID)))["after"]
    with pytest.raises(CodecError, match="the digests differ"):
        loads(json.dumps(other))


def test_boxes_in_text_are_those_of_the_plan():
    assert str(Box((3, 0), (1, 6))) in explain(MOVE, "layers.0.w", 1)


def test_names_that_are_no_unicode_have_pages_and_digests():
    """Of a pickle, or of a folder whose name is no UTF-8."""
    layout = TensorLayout(TensorSpec("w\udcff", (8,), "float32"), "fsdp=2", "S(0)")
    made = plan_writes(StateLayout({layout.fqn: layout}))

    assert r"w\udcff" in made.to_html(title="\udcff")
    assert made.to_html().encode()
    assert loads(dumps(made)) == made


HUGE = 10**23


@pytest.mark.parametrize(
    ("shape", "form"),
    [
        ([4], {"mesh": f"dp=1@{HUGE}", "placements": "R"}),
        ([4], {"flat": [[HUGE, 0, 4]], "world_size": None}),
        ([HUGE, 0], {"mesh": "dp=2", "placements": "S(0)"}),
        ([float("inf")], {"mesh": "dp=2", "placements": "R"}),
    ],
)
def test_absurd_numbers_are_refused(shape, form):
    text = {"reshard": "tensor_layout", "version": 1, "fqn": "w", "shape": shape, "dtype": "float32", "form": form}
    with pytest.raises(CodecError, match="malformed or was edited"):
        loads(json.dumps(text))
    with pytest.raises(CodecError, match="not JSON"):
        loads("[" * 100_000)


def test_a_dim_has_no_more_pieces_than_elements():
    fine, finer = (TensorLayout(TensorSpec("w", (5,), "int8"), "dp=2", f"_S(0, {n})") for n in (5, HUGE))

    assert [fine.boxes(rank) for rank in (0, 1)] == [finer.boxes(rank) for rank in (0, 1)]
