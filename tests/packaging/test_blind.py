"""The trainer, the command and the callbacks know no algorithm and no environment by name."""

import ast
from pathlib import Path

import pytest

from rsipo_lightning import registry

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "rsipo_lightning"
ALGORITHMS = registry.BUILTIN["algorithms"]
MODULES = {target.partition(":")[0].rpartition(".")[2] for target in ALGORITHMS.values()}
FILES = [
    path
    for path in sorted(p for folder in (PACKAGE, *PACKAGE.iterdir()) for p in folder.glob("*.py"))
    if path.parent.name != "algorithms" and path != PACKAGE / "registry.py"
]


def named(path: Path) -> set[str]:
    """Algorithms that a file imports or compares with."""
    found: set[str] = set()

    def texts(node: ast.AST) -> set[str]:
        parts = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
        return ALGORITHMS.keys() & parts

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
def test_names_no_algorithm(path: Path) -> None:
    assert named(path) == set()


@pytest.mark.parametrize(
    "line",
    [
        "from rsipo_lightning.algorithms.rsipo import RSIPO",
        "from rsipo_lightning.algorithms import rsipo",
        "import rsipo_lightning.algorithms.rsipo",
        "x = name == 'rsipo'",
        "x = name in ('grpo', 'rsipo')",
        "match name:\n    case 'rsipo':\n        pass",
    ],
)
def test_the_check_finds_it(line: str, tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(line)
    assert "rsipo" in named(file)
