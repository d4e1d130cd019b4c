"""README.md for a package index, where relative links do not work: `python -m docs.index_readme URL`.

URL is where the files of this release can be read, such as the address of the repository's tree at the release tag.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
_RELATIVE = re.compile(r"(\]\()(?!\w+:|#)([^)]+\))")


def for_index(text: str, url: str) -> str:
    """The text with links relative to `url`."""
    return _RELATIVE.sub(lambda match: f"{match[1]}{url.rstrip('/')}/{match[2]}", text)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(for_index(README.read_text(encoding="utf-8"), sys.argv[1]), end="")
