"""The mapping of setup.cfg, the links and the wheel hold the same files."""

import configparser
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "rsipo_lightning"


def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(comment_prefixes=("#",))
    parser.read(ROOT / "setup.cfg")
    return parser


def listed(section: str, key: str) -> list[str]:
    return setup_cfg()[section][key].split("\n")[1:]


def folder(package: str) -> Path:
    """The real folder of a dotted package name: below the package, its links resolve."""
    return ROOT / package.replace(".", "/")


def test_each_mapping_has_its_link_and_each_link_its_mapping() -> None:
    mapped = dict(line.split(" = ") for line in listed("options", "package_dir"))
    links = {
        f"rsipo_lightning.{path.name}": os.path.relpath(path.resolve(), ROOT)
        for path in PACKAGE.iterdir()
        if path.is_symlink()
    }
    assert links == mapped
    assert len(links) == 4


def test_every_folder_with_an_init_is_listed() -> None:
    found = {
        ".".join(Path(directory, name).relative_to(ROOT).parts[:-1])
        for directory, _, names in os.walk(PACKAGE, followlinks=True)
        for name in names
        if name == "__init__.py"
    }
    assert found == set(listed("options", "packages"))


@pytest.mark.parametrize("name", ["algorithms", "environments", "callbacks", "configs"])
def test_a_mapped_folder_is_not_importable_by_its_own_name(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True
    )
    assert f"ImportError: import rsipo_lightning.{name}, not {name}" in done.stderr


def test_every_key_of_package_data_is_a_package() -> None:
    keys = set(setup_cfg()["options.package_data"])
    assert keys <= set(listed("options", "packages"))


@pytest.mark.slow
def test_a_wheel_built_from_the_sdist_holds_every_file(tmp_path: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    source = tmp_path / "source"
    for name in filter(None, tracked):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    build = "import sys; from setuptools import build_meta; "
    python = [sys.executable, "-c", build + "getattr(build_meta, sys.argv[1])(sys.argv[2])"]
    subprocess.run([*python, "build_sdist", str(tmp_path)], cwd=source, check=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as sdist:
        sdist.extractall(tmp_path / "sdist", filter="data")
    unpacked = next((tmp_path / "sdist").iterdir())
    assert (unpacked / "tests" / "conftest.py").exists()
    subprocess.run([*python, "build_wheel", str(tmp_path)], cwd=unpacked, check=True)

    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    mapped = ("algorithms/", "environments/", "callbacks/", "configs/")
    expected = {f"rsipo_lightning/{name}" for name in tracked if name.startswith(mapped)} | {
        name
        for name in tracked
        if name.startswith("rsipo_lightning/") and not (ROOT / name).is_symlink()
    }
    assert held == expected
