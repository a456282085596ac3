"""Contexts, presets, templates and weighted files of search, through ``rsipo-fit``."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rsipo_lightning.cli import fit_main

SMALL = (
    "trainer.updates=2",
    "rollout.tasks=4",
    "rollout.group=4",
    "eval.episodes=0",
    "eval.every=0",
    "log.groups=4",
)


def run(folder: Path, *argv: str) -> Path:
    assert fit_main([*argv, *SMALL, f"run.dir={folder}"]) == 0
    return folder


def jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def metrics(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def policies(folder: Path) -> list[dict[str, torch.Tensor]]:
    """Weights after each update."""
    paths = sorted((folder / "checkpoints").glob("*.ckpt"))
    return [torch.load(path, weights_only=True)["state_dict"] for path in paths]


@pytest.mark.slow
def test_the_window_context_trains(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", "--algo", "rsipo", "--env", "search_verl")
    one, two = policies(folder)
    assert any(not torch.equal(one[name], two[name]) for name in one)
    rows = metrics(folder)
    # the prompts that the engine continued are those of the training rows
    assert all(float(row["policy/mismatch_max"]) < 1e-5 for row in rows)
    assert all(float(row["loss/teacher"]) != 0 for row in rows)
    played = jsonl(folder / "trajectories.jsonl")
    assert {row["role"] for row in played} == {"student", "replay"}
    long = [row for row in played if row["steps"] > 2]
    assert long
    for row in long:
        assert all("Step " not in turn["observation"] for turn in row["turns"])
    skills = jsonl(folder / "skills.jsonl")
    assert any(skill["valid"] for skill in skills)


@pytest.mark.slow
def test_search_r1_runs_with_five_actions(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", "--algo", "grpo", "--env", "search_r1")
    played = jsonl(folder / "trajectories.jsonl")
    assert max(row["steps"] for row in played) == 5
    assert {row["score"] for row in played} <= {0.0, 1.0}  # invalid actions cost nothing
    seen = [turn["observation"] for row in played for turn in row["turns"][:-1]]
    assert all(text.startswith("\n\n") for text in seen)


@pytest.mark.slow
def test_a_resumed_run_draws_the_same_weighted_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RSIPO_CACHE", str(tmp_path / "cache"))
    files = {}
    for name, n in {"many": 60, "few": 9, "held": 2}.items():
        rows = [{"question": f"Who is {name} {i}?", "answers": ["Al"]} for i in range(n)]
        files[name] = tmp_path / f"{name}.jsonl"
        files[name].write_text("\n".join(map(json.dumps, rows)))
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"id": "1", "title": "Al", "text": "Al is nobody."}))
    argv = [
        *("--algo", "grpo", "--env", "search", f"env.corpus={corpus}"),
        f"env.eval_questions={files['held']}",
        f"env.questions={{{files['many']}: 1, {files['few']}: 2}}",
    ]
    assert fit_main([*argv, *SMALL, "trainer.updates=6", f"run.dir={tmp_path / 'one'}"]) == 0
    two = run(tmp_path / "two", *argv)
    assert fit_main(["--resume", str(two), "trainer.updates=6"]) == 0
    played = jsonl(tmp_path / "one" / "trajectories.jsonl")
    assert played == jsonl(two / "trajectories.jsonl")
    assert metrics(tmp_path / "one") == metrics(two)
    assert 14 <= len({(row["update"], row["task"]) for row in played if row["type"] == "few"}) <= 18


@pytest.mark.slow
def test_a_run_asks_for_skills_in_the_users_words(tmp_path: Path) -> None:
    ask = tmp_path / "ask.txt"
    ask.write_text("$task $outcome $steps Say hello.")
    argv = ["--algo", "rsipo", "--env", "search", f"rollout.analysis_template={ask}"]
    other = run(tmp_path / "other", *argv, "trainer.updates=1")
    plain = run(tmp_path / "plain", *argv[:4], "trainer.updates=1")
    texts = [[row["raw"] for row in jsonl(f / "skills.jsonl")[:4]] for f in (other, plain)]
    assert texts[0] != texts[1]


@pytest.mark.parametrize(
    ("key", "text", "says"),
    [
        (
            "env.template",
            "opening: 'Your question: {what}'",
            "has an unknown placeholder {what}",
        ),
        ("env.template", "opening: 'Q: {question}'", "needs the line 'Your question: {question}'"),
        ("rollout.analysis_template", "$task $steps", "lacks $outcome"),
    ],
)
def test_a_template_that_cannot_be_used_is_said_before_work_starts(
    key: str, text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine"
    file.write_text(text)
    argv = ["--algo", "rsipo", "--env", "search", f"run.dir={tmp_path / 'run'}", f"{key}={file}"]
    assert fit_main(argv) == 2
    err = capsys.readouterr().err
    assert f"error: {key}={file}: " in err
    assert says in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [file]
