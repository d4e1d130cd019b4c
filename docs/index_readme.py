"""README.md for a package index, where relative links do not work: `python -m docs.index_readme PAGES FILES`.

PAGES is the address at which a person reads the files of this release, and FILES that of the files themselves, for
images: https://github.com/OWNER/reshard/blob/vX.Y.Z and https://raw.githubusercontent.com/OWNER/reshard/vX.Y.Z.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
_RELATIVE = re.compile(r"(!?)(\[[^]]*\]\()(?!\w+:|#)([^)]+\))")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)


def for_index(text: str, pages: str, files: str) -> str:
    """The text without comments, with links relative to `pages` and images relative to `files`."""

    def absolute(match: re.Match[str]) -> str:
        image, label, target = match.groups()
        return f"{image}{label}{(files if image else pages).rstrip('/')}/{target}"

    return _RELATIVE.sub(absolute, _COMMENT.sub("", text))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    print(for_index(README.read_text(encoding="utf-8"), *sys.argv[1:]), end="")
