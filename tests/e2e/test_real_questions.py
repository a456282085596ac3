"""Real questions and passages through the whole line, with the tiny policy."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rsipo_lightning.cli import eval_main, fit_main

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("RSIPO_DATA") or ROOT.parent / "shared" / "data") / "search"
pytestmark = pytest.mark.skipif(
    not (DATA / "corpus.jsonl").is_file(), reason=f"no real search data at {DATA} (RSIPO_DATA)"
)


@pytest.mark.slow
def test_a_run_on_hotpotqa(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [
        f"env.questions={DATA / 'questions' / 'hotpotqa.jsonl'}",
        f"env.corpus={DATA / 'corpus.jsonl'}",
    ]
    small = ["trainer.updates=1", "rollout.tasks=2", "rollout.group=4", "eval.episodes=6"]
    folder = tmp_path / "run"
    argv = ["--algo", "rsipo", "--env", "search", *files, *small, "eval.every=0"]
    assert fit_main([*argv, f"run.dir={folder}"]) == 0
    record = json.loads((folder / "run.json").read_text())
    assert record["data"]["source"] == "files"
    rows = [json.loads(line) for line in (folder / "trajectories.jsonl").open(encoding="utf-8")]
    assert {row["type"] for row in rows} == {"hotpotqa"}
    assert all(row["stop"] in ("done", "max_turns") for row in rows)
    turns = [turn for row in rows for turn in row["turns"]]
    assert any("<information>" in turn["observation"] for turn in turns)
    capsys.readouterr()
    bamboogle = f"env.questions={DATA / 'questions' / 'bamboogle.jsonl'}"
    assert eval_main([str(folder), bamboogle, "--episodes", "5"]) == 0
    assert "bamboogle" in capsys.readouterr().out
