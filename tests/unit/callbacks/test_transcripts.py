"""The two jsonl files, of a run and of a resumed one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rsipo_lightning.callbacks.checkpoints import Checkpoints
from rsipo_lightning.callbacks.transcripts import Transcripts, transcript
from rsipo_lightning.metrics import Metrics
from rsipo_lightning.types import Iteration, RolloutGroup, Stop


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def filler(make: SimpleNamespace) -> Any:
    def fill(it: Iteration) -> None:
        it.groups = [make.group(make.task(f"task-{i}")) for i in range(3)]
        good = make.skill(make.task("task-0"), "1. sökt först")
        bad = make.skill(make.task("task-1"), invalid="under 5 words")
        it.skills = [good, bad]
        it.replays = [make.replay(good, [True, True], [True, False], 0.5)]
        it.trust = {"task-0": 1.25}

    return make.Collector(fill)


def test_files_of_a_run(make: SimpleNamespace, tmp_path: Path) -> None:
    make.fit(make.Toy(), tmp_path, [filler(make), Transcripts(tmp_path, groups=1)], 2)
    episodes = rows(tmp_path / "trajectories.jsonl")
    assert [(e["update"], e["role"], e["task"], e["index"]) for e in episodes] == [
        (update, role, "task-0", index)
        for update in (1, 2)
        for role, index in (("student", 0), ("student", 1), ("replay", 0), ("replay", 1))
    ]
    assert episodes[1] == {
        "update": 1,
        "role": "student",
        "task": "task-0",
        "env": "search",
        "type": "two_hop",
        "index": 1,
        "success": False,
        "score": 0.0,
        "stop": "done",
        "steps": 1,
        "error": "",
        "skill": None,
        "prompt": "<b>prompt</b> of 3 tokens",
        "turns": [
            {
                "response": "<answer>x</answer>",
                "action": "<answer>x</answer>",
                "observation": "seen",
                "valid": True,
                "reward": 0.0,
                "logprob_mean": -0.5,
            }
        ],
    }
    assert (episodes[2]["skill"], episodes[2]["gain"]) == ("1. sökt först", 0.5)

    first, second = rows(tmp_path / "skills.jsonl")[:2]
    assert first == {
        "update": 1,
        "task": "task-0",
        "env": "search",
        "type": "two_hop",
        "category": "procedural",
        "valid": True,
        "reason": "",
        "text": "1. sökt först",
        "steps": {},
        "raw": '{"skill": "1. sökt först"}',
        "gain": 0.5,
        "noise": 0.01,
        "trust": 1.25,
        "evidence_success": True,
        "group_successes": 1,
        "control_successes": 1,
        "treated_success_frac": 1.0,
        "control_success_frac": 0.5,
    }
    assert (second["valid"], second["reason"], second["gain"]) == (False, "under 5 words", None)


def test_a_resumed_run_writes_each_update_once(make: SimpleNamespace, tmp_path: Path) -> None:
    whole = [filler(make), Transcripts(tmp_path, 1), Checkpoints(tmp_path, 1, 9)]
    make.fit(make.Toy(), tmp_path, whole, 3)
    expected = {
        name: (tmp_path / name).read_text() for name in ("trajectories.jsonl", "skills.jsonl")
    }
    with (tmp_path / "skills.jsonl").open("a") as file:
        file.write('{"update": 4, "task": "cut o')  # the run was killed here
    resumed = [filler(make), Transcripts(tmp_path, 1)]
    checkpoint = tmp_path / "checkpoints" / "update-000001.ckpt"
    make.fit(make.Toy(), tmp_path, resumed, 3, ckpt_path=checkpoint)
    assert {name: (tmp_path / name).read_text() for name in expected} == expected


def test_a_transcript_prefers_a_task_with_a_replay(make: SimpleNamespace) -> None:
    it = Iteration(0, [], Metrics())
    it.groups = [make.group(make.task("plain")), make.group(make.task("replayed"))]
    assert "student: plain" in transcript(it, make.Decoder())
    it.replays = [make.replay(make.skill(make.task("replayed")), [True], [False], None)]
    page = transcript(it, make.Decoder())
    assert "student: replayed" in page
    assert "replay with this skill, no gain: replayed" in page


def test_an_episode_that_broke_before_its_first_turn(make: SimpleNamespace) -> None:
    it = Iteration(0, [], Metrics())
    it.groups = [RolloutGroup(make.task(), (make.trajectory(turns=[], stop=Stop.ERROR),))]
    assert "broke: boom" in transcript(it, make.Decoder())
