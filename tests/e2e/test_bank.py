"""RSIPO with a skill bank in place of written skills, as a user runs it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from rsipo_lightning.cli import eval_main, fit_main
from rsipo_lightning.files import hash_file

BANKS = Path(__file__).parents[2] / "configs" / "banks"
RUN = ("--algo", "rsipo", "--env", "search", "algo.skill_source=bank")
SMALL = ("trainer.updates=1", "rollout.tasks=2", "rollout.group=4", "eval.episodes=0")


def test_a_bank_is_replayed_and_distilled_but_never_trained(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert fit_main([*RUN, *SMALL, "eval.every=0", f"run.dir={folder}"]) == 0
    lines = (folder / "skills.jsonl").read_text(encoding="utf-8").splitlines()
    skills = [json.loads(line) for line in lines]
    assert [s["valid"] for s in skills] == [True, True]
    assert all(s["raw"] is s["evidence_success"] is None for s in skills)
    assert all(isinstance(s["gain"], float) and s["trust"] == 1 for s in skills)
    assert all(s["text"].startswith("1. Search the") for s in skills)
    lines = (folder / "trajectories.jsonl").read_text(encoding="utf-8").splitlines()
    replays = [row for line in lines if (row := json.loads(line))["role"] == "replay"]
    assert len(replays) == 8
    assert all(f"[{row['skill']}]" in row["prompt"] for row in replays)
    with (folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert float(row["loss/teacher"]) != 0
    assert not {"loss/writer", "skill/analysed_frac"} & set(row)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["algo.bank={bank}"], "no skills for task type 'single' (have: one)"),
        (["algo.bank=serch"], "no skill bank 'serch'"),
        (["algo.bank_types.single=nothing"], "no skills 'nothing' for task type 'single'"),
        (["algo.bank=search", "rollout.context=256"], "a skill of the bank; algo.bank_top=N shows"),
        (["algo.skill_source=policy", "algo.bank=search"], "set algo.skill_source=bank to use it"),
    ],
)
def test_a_bank_that_does_not_fit_is_seen_before_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: list[str], message: str
) -> None:
    skill = {"title": "A", "principle": "do it", "when_to_apply": "always"}
    mistake = {"description": "late", "why_it_happens": "slow", "how_to_avoid": "hurry"}
    lists = {"general_skills": [skill], "common_mistakes": [mistake]}
    bank = tmp_path / "bank.json"
    bank.write_text(json.dumps({**lists, "task_specific_skills": {"one": [skill]}}))
    folder = tmp_path / "run"
    keys = [key.format(bank=bank) for key in keys]
    assert fit_main([*RUN, *keys, f"run.dir={folder}"]) == 2
    assert message in capsys.readouterr().err
    assert not folder.exists()


def test_an_evaluation_needs_no_bank(tmp_path: Path) -> None:
    bank, folder = tmp_path / "bank.json", tmp_path / "run"
    bank.write_text((BANKS / "search_compact.json").read_text())
    keys = [f"algo.bank={bank}", "eval.every=0", f"run.dir={folder}"]
    assert fit_main([*RUN, *SMALL, *keys]) == 0
    record = json.loads((folder / "run.json").read_text())
    assert record["bank"] == {"path": str(bank), "sha256": hash_file(bank)}
    bank.unlink()
    assert eval_main([str(folder), "--episodes", "2"]) == 0
