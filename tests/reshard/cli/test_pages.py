"""Pages of checkpoints and of differences: what they hold, and what a browser makes of them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import reshard
from planners import StateLayout, TensorLayout, TensorSpec
from planners.findings import Finding
from planners.reports.checkpoint_pages import Measure, Shown, checkpoint_page, difference_page
from planners.units import format_bytes
from reshard.errors import CheckpointError
from tests.browser import Browser, Page, needs_browser

NAN = math.nan
HOSTILE = "</script><img src=x onerror='window.hacked=1'>"
NAMES = [
    HOSTILE,
    "{{data}}",
    "a\u2028b\n<b>",
    "__proto__.constructor",
    "",
    "..",
    "x" * 3000,
    ".".join("d" * 500),
    "007",
    "008",
]


def data_of(page: str) -> dict[str, object]:
    """What the page's scripts read."""
    [text] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    found: dict[str, object] = json.loads(text)
    return found


def shown(names: list[str], shape: tuple[int, ...] = (4, 2)) -> Shown:
    tensors = {name: TensorLayout.from_boxes(TensorSpec(name, shape, "float32"), {0: []}) for name in names}
    return Shown("run", StateLayout(tensors), {}, {}, [])


def uneven(names: list[str]) -> Shown:
    """Tensors of 6,300 shapes."""
    shapes = {name: (1 + i % 900, 1 + i % 7) for i, name in enumerate(names)}
    tensors = {n: TensorLayout.from_boxes(TensorSpec(n, shape, "float32"), {0: []}) for n, shape in shapes.items()}
    return Shown("run", StateLayout(tensors), {}, {}, [])


def experts() -> list[str]:
    """200,000 names of a large mixture of experts, and no two layers alike in their last expert."""
    kinds = ("w1.weight", "w2.weight", "w3.weight", "norm.scale")
    return [f"model.layers.{i}.moe.experts.{j}.{kind}" for i in range(100) for j in range(500) for kind in kinds]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps; the second one differs in one layer, and has values that are not finite."""
    run = tmp_path_factory.mktemp("pages") / "run"
    torch.manual_seed(0)
    layers = {str(i): {"w": torch.randn(64, 32), "b": torch.zeros(32)} for i in range(12)}
    state = {
        "model": {"embed": torch.randn(100, 32), "layers": layers, HOSTILE: torch.ones(2)},
        "note": HOSTILE,
        "step": 1,
    }
    reshard.save(state, run / "step-1")
    layers["7"]["w"] = layers["7"]["w"] * 1.5
    layers["9"]["b"] = torch.full((32,), math.nan)
    reshard.save({**state, "step": 2}, run / "step-2", base="auto")
    return run


def test_the_largest_difference_is_that_of_a_weight_and_names_it() -> None:
    """Not that of a step count."""
    step, small, large = Measure(1, 1, 1000.0, 1.0, 0), Measure(4, 1, 0.25, 0.1, 0), Measure(4, 2, 0.5, 0.1, 0)
    page = difference_page("t", ("a", "b"), {"w.step": step, "w": small, "v": large}, [], "r")
    assert "<dt>largest difference</dt><dd>0.5<small>in v</small></dd>" in page
    assert "<dd>1000<small>in w.step</small></dd>" in difference_page("t", ("a", "b"), {"w.step": step}, [], "r")
    assert "3<small>100%</small>" in page
    assert [row[0] for row in data_of(page)["rows"]] == ["v", "w", "w.step"]  # type: ignore[attr-defined]
    assert [row[0] for row in data_of(page)["map"]["rows"]] == ["w", "v"]  # type: ignore[attr-defined]


def test_names_of_checkpoints_stay_names() -> None:
    """They are what somebody else wrote."""
    page = checkpoint_page(shown(NAMES))
    assert "<img" not in page
    texts = data_of(page)["texts"]
    assert isinstance(texts, list)
    assert {HOSTILE.split(".")[0], "{{data}}", "x" * 3000} <= set(texts)
    other = difference_page(
        "t", (HOSTILE, "b"), {name: Measure(4, 1, 1.0, 1.0, 0) for name in NAMES}, [Finding(HOSTILE, HOSTILE)], HOSTILE
    )
    assert "<img" not in other


@pytest.fixture(scope="module")
def large() -> str:
    """A page of 200,000 tensors."""
    names = experts()
    assert len(names) == 200_000
    return checkpoint_page(uneven(names))


def test_200_000_tensors_fit_in_little(large: str) -> None:
    assert len(large.encode()) < 5_000_000
    assert len(checkpoint_page(shown(experts()[:20_000])).encode()) < 50_000, "equal branches are told once"


def test_the_command_draws_a_step_of_a_run(say, saved: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    assert say("inspect", saved, "--html", file, "--histograms", "*.w").code == 0
    page = file.read_text(encoding="utf-8")
    found = data_of(page)["histograms"]
    assert isinstance(found, dict)
    assert set(found) == {f"model.layers.{i}.w" for i in range(12)}
    low, high, counts, mean, std, odd = found["model.layers.7.w"]
    values = reshard.open(saved)["model.layers.7.w"][...].double()
    assert (low, high, sum(counts), odd) == (values.min(), values.max(), 64 * 32, 0)
    assert (mean, std) == (pytest.approx(float(values.mean())), pytest.approx(float(values.std(correction=0))))
    assert "shared with step 1" in page
    assert say("inspect", saved, "--histograms", "*").code == 2, "a page is asked for"


def test_a_page_of_no_name_is_named_after_its_command(
    say, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one, other = saved / "step-1", saved / "step-2"
    said = say("inspect", one, "--html")
    assert (said.code, said.out.splitlines()[-1]) == (0, "wrote  reshard-inspect.html")
    assert data_of(Path("reshard-inspect.html").read_text(encoding="utf-8"))
    said = say("diff", "--html", "--json", one, other)
    assert (said.code, said.err) == (1, "wrote  reshard-diff.html\n")
    assert json.loads(said.out)["findings"], "and nothing beside it"
    assert say("diff", "--html", one, other).out.endswith("\nwrote  reshard-diff.html\n"), "last, as of all commands"
    said = say("plan", one, "tp=2", "--html", "--out", "plan.json")
    assert said.out.endswith("add --allow-unsharded-axes.\nwrote  plan.json\nwrote  reshard-plan.html\n")
    said = say("plan", one, "fsdp=2", "--html", "--json")
    assert said.err == "wrote  reshard-plan.html\n"
    assert json.loads(said.out)["ok"]
    assert say("plan", one, "fsdp=2", "--html", "--limit", "1").code == 0
    assert say("plan", one, "fsdp=2", "--html=a.html").code == 0
    assert say("inspect", "nowhere", "--html", "b.html").code == 3
    assert say("diff", one, "nowhere", "--html=a.html").code == 3
    assert Path("a.html").read_text(encoding="utf-8").endswith("</html>\n"), "as it was"
    pages = ["a.html", "reshard-diff.html", "reshard-inspect.html", "reshard-plan.html"]
    assert sorted(file.name for file in tmp_path.glob("*.html")) == pages

    assert say("diff", one, "--html", other).code == 1, "what follows is no page, so it is the other checkpoint"
    assert say("inspect", "--html", one).out.endswith("wrote  reshard-inspect.html\n")
    assert say("plan", one, "--html", "fsdp=2").out.endswith("wrote  reshard-plan.html\n")
    assert "--html [FILE.html]" in say("plan", "--help").out
    assert "Default: ./reshard-plan.html." in " ".join(say("plan", "--help").out.split())
    assert say("inspect", "--", "--html").code == 3, "a name"
    assert other.is_dir()
    assert not Path("--html").exists()


@pytest.mark.parametrize("tensor", [
    torch.zeros(0, 3), torch.tensor(2.5), torch.tensor([True, False]), torch.tensor([1 + 2j, 0j]), torch.tensor([NAN]),
    torch.tensor([1.7e308, -1.7e308], dtype=torch.float64), torch.tensor([2**62, -(2**62)]),
    torch.ones(4).to(torch.float8_e4m3fn), torch.tensor([math.inf, 1.0]),
], ids=lambda t: f"{t.dtype}-{list(t.shape)}")  # fmt: skip
def test_values_of_every_kind_are_counted(tensor: torch.Tensor, tmp_path: Path) -> None:
    reshard.save({"t": tensor}, tmp_path / "c")
    [found] = data_of(reshard.open(tmp_path / "c").to_html(histograms="*"))["histograms"].values()  # type: ignore[attr-defined]
    finite = int(tensor.to(torch.complex128).isfinite().sum())
    assert (sum(found[2]), found[5]) == (finite, tensor.numel() - finite)
    same = reshard.compare(tmp_path / "c", {"t": tensor}, measure=True)
    assert same.measures["t"] == Measure(tensor.numel(), 0, 0.0, 0.0, 0)
    assert "No difference was found. Compared: names, shapes, dtypes, and objects (not types" in same.to_html()


def test_differences_are_measured(saved: Path) -> None:
    report = reshard.compare(saved / "step-1", saved / "step-2", measure=True)
    other = {name: measure for name, measure in report.measures.items() if measure.differing}
    assert set(other) == {"model.layers.7.w", "model.layers.9.b"}
    before = reshard.open(saved / "step-1")["model.layers.7.w"][...].double()
    changed = other["model.layers.7.w"]
    assert changed.largest == pytest.approx(0.5 * float(before.abs().max()), rel=1e-6)
    assert changed.relative == pytest.approx(1 / 3, rel=1e-6)
    assert changed.differing == changed.elements == 64 * 32
    assert other["model.layers.9.b"] == Measure(32, 32, 0.0, 0.0, 32)
    assert report._repr_html_().startswith("<iframe")
    assert reshard.compare(saved / "step-1", saved / "step-2").measures is None
    with pytest.raises(CheckpointError, match="measure=True"):
        reshard.compare(saved / "step-1", saved / "step-2").to_html()
    odd = reshard.compare({"a": torch.ones(2), "only": torch.ones(1)}, {"a": torch.ones(3)}, measure=True)
    assert odd.measures == {}
    zero = reshard.compare({"a": torch.ones(2)}, {"a": torch.zeros(2)}, measure=True)
    assert data_of(zero.to_html())["rows"][0][4] > 1e300  # type: ignore[index]  # against nothing, without infinity


# In a browser: what a person sees.


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def assert_sound(page: Page, width: int) -> None:
    """No script failed, only the page was fetched, names made no elements, and nothing is wider than the screen."""
    assert page.errors == []
    assert len(page.fetched) == 1
    assert page.ask("[window.hacked ?? 0, document.images.length, document.documentElement.scrollWidth]") == [
        0,
        0,
        width,
    ]


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1400])
def test_a_checkpoint_is_seen_and_moved_in_by_keys(
    width: int, dark: bool, browser: Browser, saved: Path, tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    file.write_text(reshard.open(saved).to_html(histograms="*.w"), encoding="utf-8")
    page = browser.open(file, width=width, dark=dark)
    assert_sound(page, width)
    page.press("Tab", "Tab")
    assert page.ask("document.activeElement.id") == "tree"
    page.press("End", "Home", *["ArrowDown"] * 2)
    row = "document.getElementById(tree.getAttribute('aria-activedescendant'))"
    assert page.ask(f"{row}.querySelector('.name').textContent") == "layers"
    page.press("ArrowRight", "ArrowRight")
    for _ in range(40):
        if page.ask("detail.querySelectorAll('.values svg').length"):
            break
        page.press("ArrowRight" if page.ask(f"{row}.getAttribute('aria-expanded')") == "false" else "ArrowDown")
    assert page.ask("detail.querySelectorAll('.values svg').length") >= 1
    assert page.ask("detail.querySelectorAll('.pair svg').length") == 1
    assert_sound(page, width)
    ground = page.ask("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]")
    assert (ground < 60) == dark
    assert page.ask("[...detail.querySelectorAll('.values text.at')].map(text => text.textContent)").count("0") >= 1
    page.ask("(search.value = 'onerror', search.oninput())")
    assert "onerror" in page.ask("tree.textContent")
    page.ask("(search.value = 'layers.*.w', search.oninput())")
    found = page.ask("tree.textContent")
    assert "layers" in found
    assert "onerror" not in found
    assert_sound(page, width)


@needs_browser
def test_a_tensor_is_chosen_at_first_one_whose_values_were_asked_for(
    browser: Browser, saved: Path, tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    chosen = "document.getElementById(tree.getAttribute('aria-activedescendant')).title"
    file.write_text(reshard.open(saved).to_html(), encoding="utf-8")
    page = browser.open(file)
    assert page.ask("detail.querySelectorAll('.pair svg').length") == 1
    assert page.ask("document.getElementById('asked').hidden")
    assert "Identical layers are shown as one row" in page.ask("document.body.innerText")
    assert "▪" not in page.ask("tree.textContent")

    file.write_text(reshard.open(saved).to_html(histograms="*.layers.9.b"), encoding="utf-8")
    page = browser.open(file)
    assert page.ask(chosen) == "model.layers.{0–11}.b"
    assert page.ask("detail.querySelectorAll('.values svg').length") == 1
    assert not page.ask("document.getElementById('asked').hidden")
    assert page.ask("[...tree.querySelectorAll('.row')].filter(row => row.textContent.includes('▪')).length") == 1
    page.ask("(search.value = 'w', search.oninput(), search.value = '', search.oninput())")
    assert page.ask(chosen) == "model.layers.{0–11}.b"
    assert_sound(page, 1400)


@needs_browser
def test_a_page_explains_folded_rows_only_if_it_has_some(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(checkpoint_page(shown(["layers.0.w", "layers.2.w", "norm"])), encoding="utf-8")
    page = browser.open(file)
    assert page.ask("rows.length") == 4
    assert "Identical layers" not in page.ask("document.body.innerText")


@needs_browser
def test_sizes_on_the_page_are_those_of_the_command(browser: Browser, saved: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(reshard.open(saved).to_html(), encoding="utf-8")
    page = browser.open(file)
    sizes = [0, 1, 1023, 1024, 1025, 39_168, 39_270, 1 << 20, (1 << 20) + (1 << 19) + (1 << 17), 5 << 40, 3 << 50]
    assert [page.ask(f"size({nbytes})") for nbytes in sizes] == [format_bytes(nbytes) for nbytes in sizes]


@needs_browser
def test_200_000_tensors_are_quick(browser: Browser, large: str, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(large, encoding="utf-8")
    page = browser.open(file)
    assert_sound(page, 1400)
    took = page.ask("(() => { const t = performance.now(); search.value = 'layers.42. w2'; search.oninput();"
                    " return performance.now() - t; })()")  # fmt: skip
    assert took < 5_000
    assert page.ask("rows.reduce((n, row) => n + row.all, 0)") == 500
    page.ask("(search.value = 'model', search.oninput(), 0)")
    assert page.ask("rows.reduce((n, row) => n + row.all, 0)") == 200_000
    page.ask("(tree.scrollTop = 1e6, draw())")
    assert 5 < page.ask("tree.querySelectorAll('.row').length") < 60
    assert page.ask("(() => { const t = performance.now(); draw(); return performance.now() - t; })()") < 200
    assert_sound(page, 1400)


@needs_browser
@pytest.mark.parametrize("width", [400, 1400])
def test_a_difference_is_seen_as_a_map(width: int, browser: Browser, saved: Path, tmp_path: Path, say) -> None:
    file = tmp_path / "diff.html"
    assert say("diff", saved / "step-1", saved / "step-2", "--html", file).code == 1
    page = browser.open(file, width=width)
    assert_sound(page, width)
    assert page.ask("[...document.querySelectorAll('#worst tbody td:first-child')].map(td => td.textContent)") == [
        "model.layers.9.b", "model.layers.7.w",
    ]  # fmt: skip
    assert "model.layers.*.b, 9" in page.ask("told.textContent")
    page.ask("first.focus()")
    page.press("ArrowLeft", "ArrowLeft")
    assert page.ask("document.activeElement.words") == "model.layers.*.b, 7: the same"
    assert page.ask("document.querySelectorAll('#map td.odd').length") == 1
    legend = page.ask("document.querySelector('.legend').innerText").split("\n")
    assert [*map(str.strip, legend)] == ["the same", "00.333 (linear scale)", "NaN or infinite on one side"]
    page.press("ArrowDown" if page.ask("map.rows[0][0].endsWith('.b')") else "ArrowUp")
    assert page.ask("document.activeElement.words").startswith("model.layers.*.w, 7: relative norm 0.333, largest 1.")
    assert page.ask("document.querySelector('#worst [aria-sort]').textContent") == "relative norm"
    assert page.ask("document.querySelector('#worst tbody td.number').textContent") == "not finite"
    page.ask("document.querySelector('th button').click()")
    assert page.ask("document.querySelector('#worst tbody td').textContent") == "model.layers.7.w"
    assert_sound(page, width)


@needs_browser
def test_long_names_beside_a_map_are_whole_on_a_narrow_screen(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    first = {f"model.layers.{i}.self_attention.query_key_value.weight": torch.ones(4) for i in range(2)}
    twice = {name: 2 * value for name, value in first.items()}
    file.write_text(reshard.compare(first, twice, measure=True).to_html(), encoding="utf-8")
    page = browser.open(file, width=400)

    assert page.ask("[...document.querySelectorAll('#map th')].every(th => th.scrollWidth <= th.clientWidth)")
    assert_sound(page, 400)


@needs_browser
def test_a_difference_in_single_elements_needs_no_map(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    counts = reshard.compare({"step": torch.tensor(1.0)}, {"step": torch.tensor(2.0)}, measure=True)
    file.write_text(counts.to_html(), encoding="utf-8")
    page = browser.open(file)

    assert page.ask("document.querySelector('#worst tbody td').textContent") == "step"
    assert page.ask("document.getElementById('layers').offsetHeight") == 0
    assert_sound(page, 1400)


def test_a_comparison_of_nothing_has_no_shares() -> None:
    page = difference_page("t", ("a", "b"), {}, [Finding("only in a", "w")], "r")

    assert "of none" not in page
    assert page.count("<dd>–</dd>") == 2


@needs_browser
def test_equal_checkpoints_have_no_empty_table(browser: Browser, saved: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(reshard.compare(saved, saved, measure=True).to_html(), encoding="utf-8")
    page = browser.open(file)

    assert page.ask("document.getElementById('worst').offsetHeight") == 0
    assert_sound(page, 1400)


@needs_browser
def test_a_tall_map_begins_with_what_differs_most_and_has_no_scroll_bar_of_its_own(
    browser: Browser, tmp_path: Path
) -> None:
    first = {f"model.layers.{i}.part{'x' * j}.weight": torch.ones(4) for j in range(50) for i in range(4)}
    second = {name: value * (2 if "x" * 49 in name else 1.1) for name, value in first.items()}  # the last row is worst
    file = tmp_path / "page.html"
    file.write_text(reshard.compare(first, second, measure=True).to_html(), encoding="utf-8")
    page = browser.open(file, width=1300)
    inner = "[...document.querySelectorAll('.map, .scroll')].some(one => one.scrollHeight > one.clientHeight)"
    shown = "[...box.querySelectorAll('tr')].filter(row => row.offsetHeight).length"

    assert page.ask("box.querySelector('tr:nth-child(2) th').textContent") == f"model.layers.*.part{'x' * 49}.weight"
    assert (page.ask(inner), page.ask(shown)) == (False, 31)
    page.ask("all_lines.click()")
    assert (page.ask(inner), page.ask(shown)) == (False, 51)
    assert page.ask("document.querySelectorAll('#worst tbody tr').length") == 20
    page.ask("document.querySelector('.scroll .more').click()")
    assert page.ask("document.querySelectorAll('#worst tbody tr').length") == 200
    assert_sound(page, 1300)


@needs_browser
def test_pictures_are_moved_in_by_keys_and_tables_sorted_by_them(browser: Browser, tmp_path: Path, say) -> None:
    reshard.save({f"layers.{i}.w": torch.zeros(6 + i, 8) for i in range(3)}, tmp_path / "c")
    file = tmp_path / "plan.html"
    say("plan", tmp_path / "c", "fsdp=2,tp=2", "--rule", "*=S(0),S(1)", "--html", file)
    page = browser.open(file)
    page.ask("document.querySelectorAll('.tensor.shown svg')[1].focus()")
    told = "document.querySelectorAll('.tensor.shown .pointed')[1].textContent"
    page.press("ArrowDown")
    assert page.ask(told) == "rank 0: [0:4, 0:4]"
    page.press("ArrowDown", "ArrowRight")
    assert page.ask(told) == "rank 3: [4:8, 4:8]"
    page.press("ArrowDown", "ArrowLeft")
    assert page.ask(told) == "rank 2: [4:8, 0:4]"
    page.ask("document.querySelector('.matrix').focus()")
    page.press("ArrowDown", "ArrowRight")
    assert page.ask("document.querySelector('.matrix').parentNode.nextSibling.textContent").startswith(
        "saved by rank 0, read by rank 1: "
    )
    rows = "[...document.querySelectorAll('tbody tr')].map(row => row.cells[2].textContent)"
    order = ["[8, 8] float32", "[7, 8] float32", "[6, 8] float32"]
    assert page.ask(rows) == order
    page.ask("document.querySelector('th[aria-sort] button').focus()")
    page.press("Enter")
    assert page.ask(rows) == order[::-1]
    assert page.ask("document.querySelector('th[aria-sort]').getAttribute('aria-sort')") == "ascending"
    assert_sound(page, 1400)


@needs_browser
def test_names_in_a_plan_s_table_break_at_dots_and_numbers_have_no_rim(browser: Browser, tmp_path: Path, say) -> None:
    names = [f"layers.{i}.post_attention.feed_forward.gate.weight" for i in range(3)]
    reshard.save({name: torch.zeros(8, 8) for name in names}, tmp_path / "c")
    file = tmp_path / "plan.html"
    say("plan", tmp_path / "c", "fsdp=2", "--html", file)
    page = browser.open(file, width=1300)
    cell = "document.querySelector('.scroll td')"

    assert page.ask(f"{cell}.textContent") == "layers.*.post_attention.feed_forward.gate.weight"
    assert page.ask(f"""[...{cell}.childNodes].filter(part => part.nodeType === 3).every(part => {{
        const range = document.createRange();
        range.selectNode(part);
        return range.getClientRects().length === 1;
    }})""")
    assert page.ask("getComputedStyle(document.querySelector('.tick.number')).stroke") == "none"
    page.ask("(search.value = 'feed_forward.gate', search.oninput())")
    assert page.ask("document.querySelectorAll('.scroll tbody tr').length") == 1
    page.ask("(search.value = 'attention.gate', search.oninput())")
    assert page.ask("document.querySelectorAll('.scroll tbody tr').length") == 0
    assert_sound(page, 1300)


@needs_browser
@pytest.mark.parametrize("width", [400, 1400])
def test_a_plan_s_table_of_long_names_is_seen_whole(width: int, browser: Browser, tmp_path: Path, say) -> None:
    names = [f"optim.state.model.layers.{i}.post_attention.mlp.gate_projection.weight.exp_avg_sq" for i in range(3)]
    reshard.save({name: torch.zeros(8, 8) for name in names}, tmp_path / "c")
    file = tmp_path / "plan.html"
    assert say("plan", tmp_path / "c", "fsdp=2,tp=2", "--rule", "*=S(0),S(0)", "--html", file).code == 0
    page = browser.open(file, width=width)
    assert_sound(page, width)
    table = "document.querySelector('.scroll')"
    assert page.ask(f"{table}.querySelector('td').offsetWidth") <= 0.6 * width
    if width == 1400:
        assert page.ask(f"{table}.scrollWidth") == page.ask(f"{table}.clientWidth"), "what is saved and wanted"
