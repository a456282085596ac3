"""Imports go one way (docs/design.md), and nothing that must answer at once imports torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "rsipo_lightning"

# A module imports from its own line and those above it. A folder counts as one module.
LAYERS: list[set[str]] = [
    {"types", "errors", "keys", "rng", "checks", "metrics", "reduce", "web", "files", "ranks"},
    {"protocols", "registry", "endpoint", "config", "composing", "run_folder", "metrics_csv"},
    {
        "codec",
        "skills",
        "tokens",
        "adapter",
        "sharding",
        "head",
        "packing",
        "policy",
        "frozen",
        "strategy",
    }
    | {"rollout", "replay", "bank", "freshness"},
    {"algorithms"},
    {"module"},
    {"callbacks", "tiny", "imitation", "demonstrations", "household", "smollm2", "memory"},
    {"eval_report", "published"},
    {"build", "testing"},
    {"sft"},
    {"listing", "cli"},
    {"retriever_server", "compare"},
    {"__init__", "__main__"},
]
# These stand beside the line: they see the nouns and what they implement or run, and only those
# that put parts together see them.
NOUNS = {"types", "errors", "keys", "rng", "checks", "protocols", "web", "files"}
BESIDE = {"environments": NOUNS, "engines": NOUNS | {"policy", "codec"}}
SEES_BESIDE = {"tiny", "demonstrations", "household", "sft", "build", "testing", "retriever_server"}
# Data that is found by importlib.resources.
DATA = {"configs", "models"}


def modules() -> list[tuple[str, Path]]:
    files = [(path.stem, path) for path in PACKAGE.glob("*.py")]
    for package in PACKAGE.iterdir():
        if package.is_dir():  # links to the top-level folders too
            files += [(package.name, path) for path in package.rglob("*.py")]
    return sorted(files)


def imported(path: Path) -> set[str]:
    """The x of each ``rsipo_lightning.x`` that a file imports, inside functions too."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith("rsipo_lightning.")}


def allowed(module: str) -> set[str]:
    if module in DATA:
        return set()
    if module in BESIDE:
        return BESIDE[module] | {module}
    rank = next((i for i, layer in enumerate(LAYERS) if module in layer), None)
    assert rank is not None, f"say in LAYERS where {module} belongs"
    seen = set().union(DATA, *LAYERS[: rank + 1])
    return seen | set(BESIDE) if module in SEES_BESIDE else seen


@pytest.mark.parametrize(
    ("module", "path"), [pytest.param(m, p, id=str(p.relative_to(PACKAGE))) for m, p in modules()]
)
def test_imports_go_one_way(module: str, path: Path) -> None:
    assert imported(path) <= allowed(module)


def test_the_check_sees_imports_inside_functions(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("import torch\ndef f():\n    from rsipo_lightning.cli import main\n")
    assert imported(file) == {"cli"}
    assert not imported(file) <= allowed("config")


@pytest.mark.parametrize(
    "statement",
    [
        "import rsipo_lightning",
        "import rsipo_lightning.config",
        "import rsipo_lightning.registry",
        "from rsipo_lightning import compose",
        "from rsipo_lightning.cli import fit_main; assert fit_main(['--list']) == 0",
        "from rsipo_lightning.cli import fit_main; fit_main(['--help'])",
        "from rsipo_lightning.cli import eval_main; eval_main(['--help'])",
        "from rsipo_lightning.cli import fit_main; assert fit_main(['--nope']) == 2",
        "from rsipo_lightning.cli import sft_main; assert sft_main(['--list']) == 0",
        "from rsipo_lightning.cli import sft_main; sft_main(['--help'])",
        "from rsipo_lightning.retriever_server import main; main(['--help'])",
        "from rsipo_lightning.compare.cli import main; main(['--help'])",
        "from rsipo_lightning.compare.cli import main; assert main(['--nope']) == 2",
        "import rsipo_lightning.run_folder",
    ],
)
def test_no_torch_is_imported_by(statement: str) -> None:
    code = (
        f"import sys\ntry:\n    {statement}\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert not {'torch', 'transformers', 'lightning'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
