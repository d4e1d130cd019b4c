"""The frame of a plan's page: style and script, with `{{slots}}` for what `to_html` fills in."""

from __future__ import annotations

__all__ = ["PAGE"]

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{title}}</title>
<style>
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5b6675; --line: #dde2e9; --paper: #fbfcfd; --card: #fff;
  --accent: #21808d; --faint: #edf1f5; --right: #2f8f5b; --wrong: #c0392b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7ebf0; --soft: #9aa6b4; --line: #303945; --paper: #12161b;
  --card: #1a2027; --accent: #5cc3c9; --faint: #232b34; --right: #5cc98f; --wrong: #ff7b6b; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Liberation Sans", "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 36px 24px 64px; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -.02em; margin: 0 0 20px; font-weight: 650; }
h2 { font-size: 18px; margin: 0 0 4px; font-weight: 650; letter-spacing: -.01em; }
h3 { font: 600 14px/1.4 ui-monospace, "SF Mono", "Liberation Mono", "DejaVu Sans Mono", monospace; margin: 14px 0 0;
  overflow-wrap: anywhere; }
p { margin: 2px 0 10px; color: var(--soft); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 22px 24px;
  margin-top: 20px; min-width: 0; }
dl { display: flex; flex-wrap: wrap; gap: 1px; margin: 0; background: var(--line); border: 1px solid var(--line);
  border-radius: 12px; overflow: hidden; }
dl div { background: var(--card); padding: 14px 18px; flex: 1 1 140px; }
dt { color: var(--soft); font-size: 13px; }
dd { margin: 2px 0 0; font-size: 19px; font-weight: 600; font-variant-numeric: tabular-nums; line-height: 1.3; }
dd small { display: block; font-size: 13px; font-weight: 400; color: var(--soft); }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(260px, 1fr)); gap: 28px; }
.between { margin: -12px 0 14px; overflow-wrap: anywhere; }
.between b { color: var(--ink); font-weight: 600; }
.verdict { border-left: 4px solid var(--right); padding: 2px 12px; margin: 0 0 20px; color: var(--ink); }
.verdict.wrong { border-color: var(--wrong); }
.verdict ul { margin: 4px 0; padding-left: 20px; }
.wide { overflow-x: auto; }
.wide svg { min-width: 780px; }
figure { margin: 8px 0 0; }
figure.wide { margin: 12px 0 4px; }
figcaption { font-weight: 600; font-size: 14px; margin-bottom: 6px; }
figcaption small { display: block; font-weight: 400; color: var(--soft); font-size: 13px; }
svg { display: block; width: 100%; height: auto; }
.pair rect { stroke: var(--card); stroke-width: 1; }
.pair .fine rect { stroke: none; shape-rendering: crispEdges; }
.pair rect.hole { fill: none; stroke: var(--soft); stroke-dasharray: 3 3; }
.pair text { fill: #fff; font-size: 12px; font-weight: 600; text-anchor: middle; dominant-baseline: central;
  pointer-events: none; }
.matrix rect { fill: var(--accent); }
.matrix rect.ground { fill: var(--faint); }
.matrix rect:not(.ground):hover, .bars g:hover rect { stroke: var(--ink); stroke-width: 1.5; }
.tick { fill: var(--soft); font-size: 11px; text-anchor: middle; dominant-baseline: central;
  font-variant-numeric: tabular-nums; }
.tick.end { text-anchor: end; }
.bars rect { fill: var(--accent); }
.bars rect.peak { fill-opacity: .35; }
.bars line { stroke: var(--line); }
.legend { display: flex; white-space: nowrap; align-items: center; gap: 8px; font-size: 13px; margin-top: 10px; }
.swatch { width: 26px; height: 12px; border-radius: 3px; background: var(--accent); margin-left: 10px; }
.swatch.faint { opacity: .25; margin-left: 0; }
label { color: var(--soft); font-size: 13px; }
select, input { font: inherit; color: inherit; background: var(--paper); border: 1px solid var(--line);
  border-radius: 8px; padding: 7px 10px; max-width: 100%; }
input { width: 100%; margin: 8px 0 12px; }
select:focus-visible, input:focus-visible { outline: 2px solid var(--accent); outline-offset: 1px; }
.scroll { overflow: auto; max-height: 560px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th { position: sticky; top: 0; background: var(--card); color: var(--soft); font-weight: 500; text-align: left;
  cursor: pointer; }
th, td { vertical-align: top; padding: 7px 16px 7px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
td:nth-child(n+5) { white-space: normal; min-width: 150px; }
td:first-child { font-family: ui-monospace, "SF Mono", "Liberation Mono", "DejaVu Sans Mono", monospace; }
td:nth-child(2), th:nth-child(2), td:nth-child(4), th:nth-child(4) { text-align: right; }
.js .tensor:not(.shown) { display: none; }
</style>
<main>
<h1>{{title}}</h1>
{{between}}{{verdict}}
<dl>{{figures}}</dl>
<section aria-labelledby="cuts"><h2 id="cuts">How tensors are cut</h2>
<p>Each region has the color of the lowest rank that holds it; neighbouring ranks look alike, and a rank has the same
color on both sides.</p>
{{tensors}}</section>
{{traffic}}
<section aria-labelledby="loads"><h2 id="loads">Bytes per rank</h2>{{loads}}</section>
<section aria-labelledby="tensors"><h2 id="tensors">Tensors</h2>
<p>Names that differ only in numbers are one row.</p>
<label for="search">Search names, shapes and placements</label>
<input id="search" type="search" autocomplete="off">
<div class="scroll" tabindex="0">{{table}}</div></section>
</main>
<script>
document.documentElement.classList.add("js");
const tensors = [...document.querySelectorAll(".tensor")], pick = document.getElementById("pick");
const show = i => tensors.forEach((t, j) => t.classList.toggle("shown", i === j));
show(0);
if (pick) pick.onchange = () => show(Number(pick.value));
const body = document.querySelector("tbody"), rows = [...body.rows];
document.getElementById("search").oninput = event => {
  const words = event.target.value.toLowerCase().split(/ +/);
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every(word => text.includes(word));
  }
};
document.querySelectorAll("th").forEach((head, i) => {
  let up = true;
  head.onclick = () => {
    const key = row => row.cells[i].dataset.sort ?? row.cells[i].textContent;
    rows.sort((a, b) => key(a).localeCompare(key(b), undefined, { numeric: true }) * (up ? 1 : -1));
    up = !up;
    body.append(...rows);
  };
});
</script>
</html>
"""
