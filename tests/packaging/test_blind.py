"""The trainer, the command and the callbacks import no algorithm, and compare nothing with the name
of an algorithm or an environment.
"""

import ast
from pathlib import Path

import pytest

from rsipo_lightning import registry

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "rsipo_lightning"
ALGORITHMS = registry.BUILTIN["algorithms"]
ENVIRONMENTS = registry.BUILTIN["environments"]
NAMES = {*ALGORITHMS, *ENVIRONMENTS}
MODULES = {target.partition(":")[0].rpartition(".")[2] for target in ALGORITHMS.values()}
FILES = [
    path
    for path in sorted(p for folder in (PACKAGE, *PACKAGE.iterdir()) for p in folder.glob("*.py"))
    if path.parent.name != "algorithms" and path != PACKAGE / "registry.py"
]


def named(path: Path) -> set[str]:
    """Algorithms that a file imports, and names that it compares with."""
    found: set[str] = set()

    def texts(node: ast.AST) -> set[str]:
        parts = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
        return NAMES & parts

    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            names = []
        for name in names:
            parts = name.split(".")
            if parts[:2] == ["rsipo_lightning", "algorithms"]:
                found |= MODULES & set(parts[2:3])
        if isinstance(node, ast.Compare):
            found |= texts(node)
        elif isinstance(node, ast.match_case):
            found |= texts(node.pattern)
    return found


@pytest.mark.parametrize("path", [pytest.param(p, id=str(p.relative_to(PACKAGE))) for p in FILES])
def test_names_none(path: Path) -> None:
    own = ENVIRONMENTS.keys() if path.parent.name == "environments" else set()  # a tag, an action
    assert named(path) <= own


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("from rsipo_lightning.algorithms.rsipo import RSIPO", "rsipo"),
        ("from rsipo_lightning.algorithms import rsipo", "rsipo"),
        ("import rsipo_lightning.algorithms.rsipo", "rsipo"),
        ("x = name == 'rsipo'", "rsipo"),
        ("x = name in ('grpo', 'rsipo')", "rsipo"),
        ("match name:\n    case 'rsipo':\n        pass", "rsipo"),
        ("x = name == 'search'", "search"),
    ],
)
def test_the_check_finds_it(line: str, name: str, tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(line)
    assert name in named(file)
