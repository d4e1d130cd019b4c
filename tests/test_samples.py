"""Samples of other frameworks are listed, contain no paths of a machine, and are available to each process of a run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.pack_samples import pack
from tests.samples import DATA, framework_of, sample, truth

ARCHIVES = sorted(DATA.glob("*.tar.xz"))


def test_the_readme_lists_every_sample() -> None:
    """And each sample is at its path."""
    found = {path.name for path in DATA.iterdir() if path.is_dir()}
    for archive in ARCHIVES:
        with tarfile.open(archive) as tar:
            names = {name.split("/")[0] for name in tar.getnames()}
        assert {framework_of(name) for name in names} == {archive.name.removesuffix(".tar.xz")}
        found |= names

    rows = re.findall(r"^\| ([a-z]\w+(?:, \w+)*) \|", (DATA / "README.md").read_text(encoding="utf-8"), re.M)

    assert sorted(name for row in rows for name in row.split(", ")) == sorted(found)


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name)
def test_no_path_of_a_machine_is_in_an_archive(archive: Path) -> None:
    with tarfile.open(archive) as tar:
        for entry in tar:
            assert (entry.uid, entry.gid, entry.uname, entry.gname, entry.mtime) == (0, 0, "", "", 0), entry.name
            file = tar.extractfile(entry)
            assert file is not None, f"{entry.name} is no file"
            found = re.findall(rb"/(?:home|root|tmp|work|mnt|usr|Users)/[ -~]{0,40}", file.read())
            assert not found, f"{entry.name}: {found[:3]}"


def test_folder_and_archive_make_one_sample() -> None:
    """The recipe for DeepSpeed reads the folder. The rest of the sample is packed."""
    assert not (DATA / "ds_z3_w2" / "ckpt_universal").exists()
    assert {"ckpt", "ckpt_universal", "truth.pt"} == {path.name for path in sample("ds_z3_w2").iterdir()}
    assert {"model", "optim"} <= set(truth("ds_z3_w2/ckpt"))


@pytest.mark.parametrize("name", ["dcp_pp3", "dcp_pp2/ckpt/stage_9.pt", "unknown"])
def test_a_sample_that_is_not_there_fails(name: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"no sample {name}"):
        sample(name)


def test_the_same_files_give_the_same_archive(tmp_path: Path) -> None:
    """Files in a folder of the repository are not packed again."""
    source = sample("ds_z3_w2").parent
    shutil.copytree(source, tmp_path / "copy", copy_function=shutil.copyfile)
    for name in ("one", "other"):
        (tmp_path / name).mkdir()

    [one], [other] = pack(source, tmp_path / "one"), pack(tmp_path / "copy", tmp_path / "other")

    assert one.read_bytes() == other.read_bytes()
    with tarfile.open(one) as packed, tarfile.open(DATA / "ds.tar.xz") as known:
        assert packed.getnames() == known.getnames()
        assert not any((DATA / name).exists() for name in known.getnames())


def test_processes_share_a_folder_that_is_removed_at_the_end(tmp_path: Path) -> None:
    """Two processes need the same samples at the same time, in a separate run."""
    (tmp_path / "test_one.py").write_text(
        "import os, subprocess, sys\n"
        "import pytest\n"
        "ASK = 'from tests.samples import sample; print(sample(\"hf_gpt2/truth.pt\"))'\n"
        "def test_two_at_once():\n"
        "    run = [sys.executable, '-c', ASK]\n"
        "    two = [subprocess.Popen(run, stdout=subprocess.PIPE, text=True) for _ in range(2)]\n"
        "    said = {one.communicate()[0].strip() for one in two}\n"
        "    assert len(said) == 1 and os.path.exists(*said)\n"
        "    print('told', os.environ['RESHARD_TESTS_SAMPLES'])\n"
    )
    root = DATA.parents[1]
    env = {name: value for name, value in os.environ.items() if name != "RESHARD_TESTS_SAMPLES"}
    env["PYTHONPATH"] = str(root)
    run = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-s",
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        ".",
    ]

    done = subprocess.run([*run, "test_one.py"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    told = re.search(r"^\.?told (.+)$", done.stdout, re.M)
    assert told is not None, done.stdout
    assert told[1] != os.environ["RESHARD_TESTS_SAMPLES"]
    assert not Path(told[1]).exists()
