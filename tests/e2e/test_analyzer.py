"""Hindsight skills from an OpenAI-compatible server: ``algo.analyzer=endpoint``."""

from __future__ import annotations

import csv
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from rsipo_lightning import registry, web
from rsipo_lightning.callbacks.replays import ReplayGains
from rsipo_lightning.cli import fit_main
from rsipo_lightning.codec import Codec
from rsipo_lightning.composing import compose
from rsipo_lightning.config import RunConfig
from rsipo_lightning.endpoint import AnalyzerConfig, Endpoint, EndpointConfig
from rsipo_lightning.engines.scripted import ScriptedEngine
from rsipo_lightning.environments.search import SearchConfig, SearchSuite
from rsipo_lightning.rollout import Job, Player, Sampling
from rsipo_lightning.testing import byte_tokenizer
from rsipo_lightning.types import Role, Skill, SkillRequest, Trajectory, WrittenSkill

SKILL = "first search, then answer it"
STEPS = {"1": "search for the name", "9": "there is no such step"}
GOOD = json.dumps({"episode_summary": "s", "episode_skill": SKILL, "step_skills": STEPS})
SMALL = (
    *("trainer.updates=2", "rollout.tasks=2", "rollout.group=2", "rollout.max_new_tokens=16"),
    *("eval.episodes=0", "eval.every=0", "log.progress=false", "run.dir=run"),
    *("algo.analyzer=endpoint", "algo.endpoint.model=m", "algo.endpoint.retries=0"),
)


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(web, "PAUSE_S", 0.01)


@pytest.fixture(scope="module")
def player() -> Player:
    codec = Codec(byte_tokenizer())
    answers = ScriptedEngine(codec, lambda prompt, text: "<answer>Oz</answer>")
    return Player(SearchSuite(SearchConfig(prompt="compact"), 0), answers, codec)


def episodes(player: Player) -> list[Trajectory]:
    jobs = [Job(task, Role.STUDENT, 0, 0) for task in player.suite.tasks("train")[:8]]
    return player.play(jobs, Sampling(0, 1.0, 60, 2000, 8))


def ask(player: Player, server: Any, requests: list[SkillRequest], **keys: Any) -> list[Skill]:
    config = EndpointConfig(url=server.url, model="m", retries=0, **keys)
    endpoint = Endpoint(config, "algo.endpoint")
    return list(ReplayGains(player, RunConfig(), endpoint).write(requests, 0))


def question(request: dict[str, Any]) -> str:
    found = request["messages"][0]["content"]
    return next(line for line in found.split("\n") if line.startswith("Your question: "))


def test_skills_are_those_of_the_requests_whatever_comes_first(
    chat_server: Any, player: Player
) -> None:
    def answer(handler: Any, request: dict[str, Any]) -> None:
        time.sleep(random.uniform(0, 0.02))
        words = " ".join(str(ord(c)) for c in question(request)[-9:])
        said = {"episode_summary": "s", "episode_skill": words, "step_skills": STEPS}
        chat_server.say(handler, json.dumps(said))

    chat_server.answer = answer
    requests = [SkillRequest(t, step_skills=5) for t in episodes(player)]
    one, many = (ask(player, chat_server, requests, concurrency=n) for n in (1, 8))
    assert one == many
    for skill, request in zip(one, requests, strict=True):
        asked = request.trajectory.task.payload["question"][-9:]
        assert skill.text == " ".join(str(ord(c)) for c in asked)
        assert skill.trajectory is request.trajectory
        assert skill.steps == {0: STEPS["1"]}
        assert not isinstance(skill, WrittenSkill)  # nothing of it could be trained
    prompt = chat_server.requests[0]["messages"][0]["content"]
    assert "step_skills" in prompt  # a large model gets the full prompt beside a tiny policy


def test_a_bad_answer_is_an_invalid_skill_and_asked_for_again_only_if_wanted(
    chat_server: Any, player: Player
) -> None:
    trajectory, *_ = episodes(player)
    once, twice = (SkillRequest(trajectory, attempts=n) for n in (1, 2))

    def answer(handler: Any, request: dict[str, Any]) -> None:
        chat_server.say(handler, GOOD if len(request["messages"]) > 1 else "no JSON")

    chat_server.answer = answer
    assert [s.invalid[:14] for s in ask(player, chat_server, [once])] == ["no JSON object"]
    assert len(chat_server.requests) == 1
    (skill,) = ask(player, chat_server, [twice])
    assert (skill.text, skill.invalid) == (SKILL, "")
    assert len(chat_server.requests) == 3

    chat_server.answer = lambda handler, request: chat_server.send(handler, {"error": "long"}, 413)
    (skill,) = ask(player, chat_server, [twice])
    assert (skill.text, skill.valid) == ("", False)
    assert skill.invalid.startswith("refused: HTTP 413")


def test_a_server_that_dies_stops_the_run_which_then_goes_on(
    chat_server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two updates of 4 analyses each behind the first question; the seventh request is refused."""

    def answer(handler: Any, request: dict[str, Any]) -> None:
        if len(chat_server.requests) > 6:
            chat_server.send(handler, {"error": "no credit"}, 402)
        else:
            chat_server.say(handler, GOOD if len(chat_server.requests) % 2 else "no JSON")

    chat_server.answer = answer
    argv = ["--algo", "opid", "--env", "search", *SMALL, f"algo.endpoint.url={chat_server.url}"]
    assert fit_main([*argv, "algo.attempts=1", "algo.endpoint.concurrency=1"]) == 75
    err = capsys.readouterr().err
    assert "HTTP 402" in err
    assert "checkpoint: run/checkpoints/update-000001.ckpt" in err

    chat_server.answer = lambda handler, request: chat_server.say(handler, GOOD)
    assert fit_main(["--resume", "run"]) == 0
    with open("run/metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["skill/valid_frac"]) for row in rows] == [0.5, 1.0]
    assert [float(row["skill/analysed_frac"]) for row in rows] == [1.0, 1.0]
    skills = [json.loads(line) for line in Path("run/skills.jsonl").read_text().splitlines()]
    assert [skill["raw"] for skill in skills] == [None] * 8
    assert {skill["text"] for skill in skills if skill["valid"]} == {SKILL}
    assert all(float(row["policy/episode_gap_abs_mean"]) > 0 for row in rows)


@pytest.mark.parametrize(
    ("algo", "keys", "says"),
    [
        ("opid", ["algo.endpoint.url=URL"], "algo.endpoint.url=URL: HTTP 401"),
        ("opid", ["algo.endpoint.url=http://127.0.0.1:1/v1"], "127.0.0.1:1/v1: ConnectionRefused"),
        ("seed", [], "algo.endpoint.url is missing: which server, which model?"),
        ("seed", ["algo.endpoint.url=URL", "algo.endpoint.key_env=NO_KEY"], "is not set"),
        ("seed", ["algo.endpoint.url=URL", "algo.analyzer=policy"], "set algo.analyzer=endpoint"),
        ("seed", ["algo.analyzer=server"], "algo.analyzer=server: must be one of policy, endpoint"),
        ("seed", ["algo.endpoint.retries=-1"], "algo.endpoint.retries=-1: must be at least 0"),
        ("skill_sd", [], "there is nothing to analyse with algo.skill_source=bank"),
        ("rsipo", [], "no key 'algo.analyzer'"),
    ],
)
def test_what_cannot_start_is_one_line_and_writes_nothing(
    algo: str,
    keys: list[str],
    says: str,
    chat_server: Any,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    chat_server.answer = lambda handler, request: chat_server.send(handler, {"error": "no"}, 401)
    keys = [key.replace("URL", chat_server.url) for key in keys]
    assert fit_main(["--algo", algo, "--env", "search", *SMALL, *keys]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert says.replace("URL", chat_server.url) in err
    assert len(chat_server.requests) <= 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("algo", registry.names("algorithms"))
def test_who_offers_the_key(algo: str) -> None:
    """Those that learn from hindsight skills and train nobody to write them."""
    found = registry.load("algorithms", algo)
    offers = {"grpo_opsd", "opid", "opsd", "rlsd", "sdar", "seed", "skill_sd"}
    assert issubclass(found.Config, AnalyzerConfig) is (algo in offers)
    if algo in offers:
        more = [] if algo == "opid" else ["algo.skill_source=trajectory"]
        where = ["algo.analyzer=endpoint", "algo.endpoint.url=http://h/v1"]
        config = compose(algo=algo, env="search", overrides=[*more, *where]).algo
        assert found(config, 0).analyzer == config.endpoint
        assert found(found.Config(), 0).analyzer is None
