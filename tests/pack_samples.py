"""Packs folders of samples into `tests/data`, an archive for each framework: `python -m tests.pack_samples FOLDER`.

FOLDER has a folder for each sample. Packs what tests read: checkpoints, `truth.pt`, and `keymap.json`, without files
that `tests/data` already has. Archives record no owner and no time, so equal files give equal bytes.
"""

from __future__ import annotations

import lzma
import sys
import tarfile
from collections import defaultdict
from pathlib import Path

from tests.samples import DATA, framework_of

PACKED = ("ckpt", "ckpt_universal", "truth.pt", "keymap.json")


def pack(folder: Path, target: Path = DATA) -> list[Path]:
    """Write archives into `target`, and return them."""
    files: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder)
        if len(name.parts) > 1 and name.parts[1] in PACKED and not (DATA / name).exists():
            files[framework_of(name.parts[0])].append(name)
    return [_write(target / f"{framework}.tar.xz", folder, names) for framework, names in files.items()]


def _write(archive: Path, folder: Path, names: list[Path]) -> Path:
    with tarfile.open(archive, "w:xz", preset=9 | lzma.PRESET_EXTREME) as tar:
        for name in names:
            entry = tarfile.TarInfo(name.as_posix())  # a new entry has no owner, no time, and the usual mode
            entry.size = (folder / name).stat().st_size
            with (folder / name).open("rb") as file:
                tar.addfile(entry, file)
    return archive


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        raise SystemExit(__doc__)
    for written in pack(Path(sys.argv[1])):
        print(f"{written.stat().st_size:>9,} {written.relative_to(DATA.parents[1])}")
