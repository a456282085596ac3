"""Algorithms and environments of other packages: tests/plugin by pip, and broken ones."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rsipo_lightning.cli import fit_main
from rsipo_lightning.compare.cli import main as compare_main
from rsipo_lightning.testing import check_algorithm, check_environment

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "tests" / "plugin"
FILES = ["pyproject.toml", "rsipo_demo/algorithm.py", "rsipo_demo/environment.py"]
SMALL = (
    *("trainer.updates=1", "rollout.tasks=2", "rollout.group=2", "rollout.max_new_tokens=8"),
    *("eval.episodes=2", "eval.every=0", "log.progress=false"),
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the package, from a copy: building writes beside it."""
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(PLUGIN, folder / "source")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    where = ["--no-build-isolation", "--target", str(folder / "site"), str(source)]
    done = subprocess.run([*pip, *where], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """In this process; gives the folder that is worked in."""
    monkeypatch.syspath_prepend(site)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(site: Path, folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    program = [sys.executable, "-m", "rsipo_lightning", *argv]
    return subprocess.run(program, cwd=folder, env=env, capture_output=True, text=True)


def test_it_is_listed_with_its_package(site: Path, tmp_path: Path) -> None:
    done = command(site, tmp_path, "--list")
    assert done.returncode == 0, done.stderr
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines() if line]
    listed = {line[0]: line[-1] for line in lines}
    assert listed["focal"] == "from rsipo-demo 0.1 (rsipo_demo.algorithm:Focal)"
    assert listed["numbers"] == "from rsipo-demo 0.1 (rsipo_demo.environment:Numbers)"
    assert "from" not in listed["grpo"]


def test_it_trains(site: Path, tmp_path: Path) -> None:
    keys = [*SMALL, "algo.gamma=0.5", "run.dir=run"]
    done = command(site, tmp_path, "--algo", "focal", "--env", "numbers", *keys)
    assert done.returncode == 0, done.stderr
    assert "wide" in done.stdout  # a row of the table
    assert "gamma: 0.5" in (tmp_path / "run/config.yaml").read_text()
    with (tmp_path / "run/metrics.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert float(row["policy/mismatch_max"]) < 1e-5


def test_its_keys_are_keys(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    choice = ["--algo", "focal", "--env", "numbers"]
    assert fit_main([*choice, "algo.gamma=2", "--print-config"]) == 0
    lines = [line.split("#") for line in capsys.readouterr().out.splitlines()]
    found = {line[0].strip(): line[-1].strip() for line in lines}
    assert found["gamma: 2.0"] == "command line"
    assert found["max_steps: 7"] == "default"
    for key, says in [
        ("algo.gama=2", "no key 'algo.gama'; did you mean 'algo.gamma'?"),
        ("algo.gamma=-1", "algo.gamma=-1.0: must lie between 0 and 10 (command line)"),
    ]:
        assert fit_main([*choice, key]) == 2
        assert says in capsys.readouterr().err


def test_it_keeps_the_contracts(installed: Path) -> None:
    for gamma in (0.0, 2.0):
        check_algorithm("focal", gamma=gamma)
    check_environment("numbers", responses=[f"<guess>{n}</guess>" for n in (5, 1, 4, 3)])


@pytest.mark.parametrize("file", FILES)
def test_the_documentation_shows_these_files(file: str) -> None:
    text = (PLUGIN / file).read_text()
    kind = "python" if file.endswith(".py") else "toml"
    assert f"```{kind}\n{text}```\n" in (ROOT / "docs" / "plugins.md").read_text()
    limit = {"rsipo_demo/algorithm.py": 40, "rsipo_demo/environment.py": 60}.get(file, 20)
    assert len(text.splitlines()) < limit


MODULES = {
    "no_such": None,
    "raises": "raise ValueError('two\\nlines')",
    "syntax": "def f(:",
    "empty": "",
    "function": "def Thing(*args): ...",
    "foreign": "class Thing: ...",
    "abstract": "from rsipo_lightning.algorithms.base import Algorithm\n"
    "class Thing(Algorithm):\n    streams = {}",
    "config": "from rsipo_lightning.algorithms.grpo import GRPO\n"
    "class Thing(GRPO):\n    Config = dict",
}


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("no_such", "cannot be imported: No module named 'other_no_such'"),
        ("raises", "cannot be imported: ValueError('two\\nlines')"),
        ("syntax", "cannot be imported: SyntaxError("),
        ("empty", "cannot be imported: module 'other_empty' has no attribute 'Thing'"),
        ("function", "is no subclass of rsipo_lightning.algorithms.base.Algorithm"),
        ("foreign", "is no subclass of rsipo_lightning.algorithms.base.Algorithm"),
        ("abstract", "(other_abstract:Thing of other 7) lacks credit"),
        ("config", "Config of algorithm 'thing'"),
        ("clash", "two algorithms are called 'grpo': rsipo_lightning.algorithms.grpo:GRPO and "
         "other_clash:Thing of other 7; uninstall or rename one"),
        ("preset", "two algorithms are called 'rsipo_no_trust': a preset and that of other 7"),
    ],
)  # fmt: skip
def test_a_broken_package_is_one_line(
    module: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    site, work = tmp_path / "site", tmp_path / "work"
    info = site / "other-7.dist-info"
    info.mkdir(parents=True)
    work.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 7\n")
    name = {"clash": "grpo", "preset": "rsipo_no_trust"}.get(module, "thing")
    point = f"[rsipo_lightning.algorithms]\n{name} = other_{module}:Thing\n"
    (info / "entry_points.txt").write_text(point)
    if (text := MODULES.get(module)) is not None:
        (site / f"other_{module}.py").write_text(text)
    monkeypatch.syspath_prepend(site)
    monkeypatch.chdir(work)
    for main in (fit_main, compare_main):
        chosen = "--algo" if main is fit_main else "--algos"
        assert main([chosen, name, "--env", "search", *SMALL]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        assert says in err
        assert list(work.iterdir()) == []
