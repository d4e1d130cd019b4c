"""A hook of mkdocs: pages of the site from elsewhere or generated, and links that lead out of `docs`."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from docs.command_line import as_page as command_line

_log = logging.getLogger("mkdocs.hooks.site_pages")
ROOT = Path(__file__).parents[1]
FROM_ROOT = {
    "start.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
    "contributing.md": "CONTRIBUTING.md",
    "results.md": "benchmarks/RESULTS.md",
    "testing.md": "tests/README.md",
    "kernel.md": "kernels/README.md",
    **{
        f"tests/{name}.md": f"tests/{name}.md"
        for name in ("complaints", "edge-cases", "faults", "fingerprint", "integrations", "torchs_tests")
    },
    **{f"examples/{path.stem}.md": f"examples/{path.name}" for path in sorted((ROOT / "examples").glob("*.py"))},
}
"""Page of the site -> file in the repository."""
_FOR_USERS = ("changelog.md", "compatibility.md", "security.md")
"""Of the pages about the project; the others are for developers."""
_FETCHED = re.compile(r"<(?:script|img|iframe|link[^>]*stylesheet)\b[^>]*=\"?(https?:[^\" >]+)")
_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_ROW = re.compile(r"<tr\b.*?</tr>", re.DOTALL)
_CELL = re.compile(r"<(t[hd])\b(.*?)</\1>", re.DOTALL)
_IMAGE = re.compile(r'<img [^>]*src="([^"]+)"[^>]*>')
_TYPE = re.compile(r"<code>(\w+)</code>")
_NAMED = re.compile(r'<span title="(?:reshard|planners)\.[\w.]*?(\w+)">(\w+)</span>')
_SENTENCE = 30
"""A table with a longer cell than this many characters is for reading; others compare numbers."""
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from the root."""
    for page, source in FROM_ROOT.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        if page == "start.md":  # as in the navigation
            text = text.replace("# reshard\n", "# Install and first save\n", 1)
        files.append(File.generated(config, page, content=as_code(source, text) if source.endswith(".py") else text))
    for notebook in sorted((ROOT / "docs").glob("*.ipynb")):
        files.append(File.generated(config, f"{notebook.stem}.md", content=as_page(notebook)))
    files.append(File.generated(config, "reference/command-line.md", content=command_line()))
    return files


def as_code(path: str, text: str) -> str:
    """A program as Markdown."""
    return f"# {path}\n\n```python\n{text}```\n"


def as_page(notebook: Path) -> str:
    """A notebook as Markdown: its texts, its code and what the code printed."""
    parts = [f"[Download this page as a notebook]({notebook.name})"]
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source, code = "".join(cell["source"]), cell["cell_type"] == "code"
        parts.append(f"```python\n{source}\n```" if code else source)
        parts += [f"```text\n{''.join(output['text']).rstrip()}\n```" for output in cell.get("outputs", ())]
    return "\n\n".join([parts[1], parts[0], *parts[2:]]) + "\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to where those pages and their neighbors are on the site; other links lead to the start. A search finds
    the pages for developers last."""
    if any(section.title == "Project" for section in page.ancestors) and page.file.src_uri not in _FOR_USERS:
        page.meta["search"] = {"boost": 0.0001}
    source = FROM_ROOT.get(page.file.src_uri)
    if source and source.endswith(".py"):
        return markdown
    folder = (ROOT / (source or f"docs/{page.file.src_uri}")).parent
    depth = page.file.src_uri.count("/")

    def moved(match: re.Match[str]) -> str:
        target = match[2]
        if re.match(r"\w+:", target):
            return match[0]
        path = (folder / target).resolve()
        inside = {(ROOT / of).resolve(): name for name, of in FROM_ROOT.items()}.get(path)
        if inside is None and path.is_relative_to(ROOT / "docs") and path.is_file():
            inside = path.relative_to(ROOT / "docs").as_posix()
            if path.suffix == ".ipynb" and path.stem != Path(page.file.src_uri).stem:
                inside = str(Path(inside).with_suffix(".md"))
        return f"{match[1]}{'../' * depth}{inside or 'README.md'}{match[3] if inside else ')'}"

    terms = "" if page.file.src_uri == "glossary.md" else f"\n\n[Glossary of terms]({'../' * depth}glossary.md)\n"
    return _LINK.sub(moved, markdown) + terms


def on_page_content(html: str, **_: Any) -> str:
    """On a narrow screen, the rows of tables for reading are lists: each cell says which column it is of. Pictures
    link to themselves, to be seen in full size."""
    return _IMAGE.sub(r'<a href="\1">\g<0></a>', _TABLE.sub(lambda table: labeled(table[0]), html))


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Types in signatures of the reference link to the page of types, whose first column has an anchor for each."""
    source = (ROOT / "docs" / "reference" / "types.md").read_text(encoding="utf-8")
    types = {name for cell in re.findall(r"^\| (`.*?) \|", source, re.M) for name in re.findall(r"`(\w+)`", cell)}
    if page.file.src_uri == "reference/types.md":
        rows = r"(?<=<td data-head=\"Type\">).*?(?=</td>)"
        return re.sub(rows, lambda cell: _TYPE.sub(r'<code id="\1">\1</code>', cell[0]), output)
    if not page.file.src_uri.startswith("reference/"):
        return output
    return _NAMED.sub(lambda one: f'<a href="types.html#{one[1]}">{one[2]}</a>' if one[1] in types else one[0], output)


def labeled(table: str) -> str:
    """The table with the heading of its column in each cell, if it has sentences."""
    rows = [[text_of(cell[0]) for cell in _CELL.finditer(row[0])] for row in _ROW.finditer(table)]
    if not any(len(text) > _SENTENCE for row in rows[1:] for text in row):
        return table

    def row_of(match: re.Match[str]) -> str:
        heads = iter(rows[0])
        return _CELL.sub(lambda cell: f'<{cell[1]} data-head="{next(heads, "")}"{cell[2]}</{cell[1]}>', match[0])

    return _ROW.sub(row_of, table)


def text_of(html: str) -> str:
    """What a person sees of an element, fit for an attribute."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", html)).strip().replace('"', "&quot;")


def on_post_build(config: Any) -> None:
    """A page that would fetch something from the network is a warning, and so ends a strict build."""
    for page in Path(config.site_dir).rglob("*.html"):
        for fetched in _FETCHED.findall(page.read_text(encoding="utf-8")):
            _log.warning("%s fetches %s", page.name, fetched)
