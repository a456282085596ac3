"""The best skills by type: which are kept, that a resume goes on with them, and their file."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rsipo_lightning.callbacks.best_skills import BestSkills, bank
from rsipo_lightning.callbacks.checkpoints import Checkpoints, latest
from rsipo_lightning.types import Iteration, Skill

# (update it was written in, task, type, text, gain, noise)
WRITTEN = [
    (1, "a", "one_hop", "search the name first", 0.5, 0.01),  # lower end 0.4
    (1, "b", "one_hop", "answer at once, friend", 0.6, 0.09),  # 0.3
    (1, "c", "two_hop", "search both names first", 0.1, 0.04),  # -0.1, but it gained
    (2, "d", "one_hop", "search the name first", 0.9, 0.01),  # 0.8, the first one's text
    (2, "e", "one_hop", "never search for anything", -0.2, 0.0),
    (2, "f", "one_hop", "nothing to compare with", None, None),
    (3, "h", "one_hop", "look twice, then answer", 0.3, 0.0),  # 0.3, as old ones: later
    (3, "g", "one_hop", "look thrice, then answer", 0.3, 0.0),
]


def callbacks(make: SimpleNamespace, folder: Path, count: int = 5, keep: int = 2) -> list[Any]:
    def fill(it: Iteration) -> None:
        for update, task, kind, text, gain, noise in WRITTEN:
            if update == it.update + 1:
                skill = make.skill(make.task(task, kind), text)
                result = make.replay(skill, [True], [False], gain)
                it.skills.append(skill)
                it.replays.append(replace(result, noise=noise))
                it.trust[task] = 1.5
        it.skills.append(make.skill(make.task("x"), "no replays at all", invalid="too short"))
        of_a_bank = Skill(make.task("x", "one_hop"), "nobody wrote this one", "other")
        it.skills.append(of_a_bank)
        it.replays.append(make.replay(of_a_bank, [True], [False], 0.9))

    best = BestSkills(folder, count)
    return [make.Collector(fill), best, Checkpoints(folder, 1, keep, best)]


def read(path: Path) -> dict[str, list[dict[str, Any]]]:
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert loaded["general_skills"] == loaded["common_mistakes"] == []
    return dict(loaded["task_specific_skills"])


def tasks(path: Path) -> dict[str, list[str]]:
    return {kind: [row["task"] for row in rows] for kind, rows in read(path).items()}


def test_ranked_by_the_lower_end_of_the_gain_each_text_once(
    make: SimpleNamespace, tmp_path: Path
) -> None:
    make.fit(make.Toy(), tmp_path, callbacks(make, tmp_path), 3)
    assert tasks(tmp_path / "best_skills.json") == {
        "one_hop": ["d", "b", "g", "h"],  # ties: the older, then by task
        "two_hop": ["c"],
    }


def test_the_file_is_a_skill_bank_that_says_what_was_measured(
    make: SimpleNamespace, tmp_path: Path
) -> None:
    make.fit(make.Toy(), tmp_path, callbacks(make, tmp_path), 1)
    assert read(tmp_path / "best_skills.json")["one_hop"][0] == {
        "skill_id": "one_hop-1",
        "title": "procedural",
        "principle": "search the name first",
        "when_to_apply": "tasks of type one_hop",
        "category": "procedural",
        "gain": 0.5,
        "noise": 0.01,
        "trust": 1.5,
        "update": 1,
        "task": "a",
    }


def test_one_stands_beside_each_checkpoint_and_goes_with_it(
    make: SimpleNamespace, tmp_path: Path
) -> None:
    make.fit(make.Toy(), tmp_path, callbacks(make, tmp_path, count=1), 4)
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == [
        "update-000003.ckpt",
        "update-000003.skills.json",
        "update-000004.ckpt",
        "update-000004.skills.json",
    ]
    newest = (folder / "update-000004.skills.json").read_text()
    assert (tmp_path / "best_skills.json").read_text() == newest
    assert tasks(tmp_path / "best_skills.json") == {"one_hop": ["d"], "two_hop": ["c"]}


@pytest.mark.parametrize("updates", [0, 1, 2])
def test_a_resumed_run_goes_on_with_them(
    make: SimpleNamespace, tmp_path: Path, updates: int
) -> None:
    make.fit(make.Toy(), tmp_path / "whole", callbacks(make, tmp_path / "whole"), 3)
    parts = tmp_path / "parts"
    if updates:
        make.fit(make.Toy(), parts, callbacks(make, parts), updates)
    else:
        make.fit(make.Toy(), parts, callbacks(make, parts, keep=9), 1)
    path = parts / "checkpoints" / f"update-{updates:06d}.ckpt"
    torch.load(path, weights_only=True)
    make.fit(make.Toy(), parts, callbacks(make, parts), 3, ckpt_path=path)
    assert read(parts / "best_skills.json") == read(tmp_path / "whole" / "best_skills.json")


def test_zero_keeps_none_and_writes_nothing(make: SimpleNamespace, tmp_path: Path) -> None:
    make.fit(make.Toy(), tmp_path, callbacks(make, tmp_path, count=0), 2)
    assert not list(tmp_path.rglob("*skills*"))
    assert latest(tmp_path).name == "update-000002.ckpt"


def test_the_order_of_ranks_and_of_updates_does_not_matter(
    make: SimpleNamespace, tmp_path: Path
) -> None:
    from rsipo_lightning.callbacks.best_skills import _best

    rows = [
        {"text": text, "gain": gain, "noise": noise, "update": update, "task": task}
        for update, task, _, text, gain, noise in WRITTEN
        if gain is not None
    ]
    first = _best(rows, 3)
    for seed in range(20):
        random.Random(seed).shuffle(rows)
        assert _best([*_best(rows[:4], 3), *rows[4:]], 3) == first


def test_a_bank_of_nothing() -> None:
    assert bank({"one_hop": []}) == {
        "general_skills": [],
        "task_specific_skills": {},
        "common_mistakes": [],
    }
