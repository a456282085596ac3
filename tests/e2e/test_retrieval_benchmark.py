"""benchmarks/retrieval.py over the real passages; the README has its tables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("RSIPO_DATA") or ROOT.parent / "shared" / "data")
pytestmark = pytest.mark.skipif(
    not (DATA / "search" / "corpus.jsonl").is_file(), reason=f"no real search data at {DATA}"
)


@pytest.mark.slow
def test_recall_of_the_local_retrievers(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "benchmarks/retrieval.py", "--engines", "bm25,disk"]
    done = subprocess.run(
        [*command, "--data", str(DATA), "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Recall@3" in done.stdout
    results = json.loads(out.read_text())
    for engine, macro in (("bm25", 49.3), ("disk", 49.9)):
        recall = [100 * fmean(hits) for hits in results[engine]["hits"].values()]
        assert len(recall) == 7
        assert fmean(recall) == pytest.approx(macro, abs=0.2)
