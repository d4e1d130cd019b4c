// pictures: the words of what the pointer or the arrow keys are at
const at = (svg, mark) => {
  svg.querySelector(".at")?.classList.remove("at");
  mark?.classList.add("at");
  const told = svg.parentNode.querySelector(":scope > .pointed") ?? svg.parentNode.parentNode.querySelector(":scope > .pointed");
  if (told) told.textContent = mark ? mark.querySelector(":scope > title").textContent : "";
};
const marked = node => node.closest?.("svg") && (node.closest("g:has(> title)") ?? node.closest("rect:has(> title)"));
document.addEventListener("mouseover", event => {
  const mark = marked(event.target);
  if (mark) at(mark.closest("svg"), mark);
});
document.addEventListener("keydown", event => {
  const svg = event.target.closest?.("svg[tabindex]");
  const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  if (!svg || !way || event.ctrlKey || event.altKey || event.metaKey) return;
  const marks = [...svg.querySelectorAll("title")].map(title => title.parentNode), now = svg.querySelector(".at");
  const middle = mark => { const b = mark.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; };
  const from = now && middle(now);
  const far = mark => {
    const to = middle(mark), along = (to[0] - from[0]) * way[0] + (to[1] - from[1]) * way[1];
    const aside = Math.abs((to[0] - from[0]) * way[1]) + Math.abs((to[1] - from[1]) * way[0]);
    return mark !== now && along > .5 ? along + 4 * aside : Infinity;
  };
  let next = marks[0], least = Infinity;
  if (now) {
    next = now;
    for (const mark of marks) { const d = far(mark); if (d < least) { least = d; next = mark; } }
  }
  event.preventDefault();
  if (next) {
    at(svg, next);
    next.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
});
// whether each word that was typed is in one of the texts; in a word, * stands for anything
const fits = (texts, typed) => typed.toLowerCase().split(/ +/).every(word => texts.some(text => {
  let at = 0;
  return word.split("*").every(part => { const found = text.toLowerCase().indexOf(part, at); at = found + part.length; return found >= 0; });
}));
// tables: sorted by a click on a heading, searched, and at first of 20 rows
const tabulate = (table, search) => {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells], more = document.createElement("button");
  const rows = [...body.rows];
  let all = rows.length <= 25;
  const fill = () => {
    const fit = rows.filter(row => fits([...row.cells].map(cell => cell.textContent), search?.value ?? ""));
    body.replaceChildren(...(all ? fit : fit.slice(0, 20)));
    more.hidden = all || fit.length <= 20;
    more.textContent = "Show all " + fit.length.toLocaleString("en") + " rows";
  };
  const open = () => { all = true; fill(); };
  more.type = "button";
  more.className = "more";
  more.onclick = open;
  addEventListener("beforeprint", open);
  table.after(more);
  if (search) search.oninput = fill;
  const order = (a, b) => (isNaN(+a) || isNaN(+b) || a === b ? a.localeCompare(b, "en", { numeric: true }) : a - b);
  heads.forEach((head, i) => {
    head.scope = "col";
    if (!head.textContent) return;
    const key = row => row.cells[i].dataset.sort ?? row.cells[i].textContent, button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.onclick = () => {
      const was = head.getAttribute("aria-sort"), down = was ? was === "ascending" : rows.some(row => row.cells[i].dataset.sort);
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      rows.sort((a, b) => order(key(a), key(b)) * (down ? -1 : 1));
      fill();
    };
  });
  fill();
};
