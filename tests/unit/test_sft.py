"""Stage 1 in its parts: experts that play, labels, rows, epochs."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rsipo_lightning import web
from rsipo_lightning.build import Actors
from rsipo_lightning.codec import Codec
from rsipo_lightning.composing import SFT, compose_kind
from rsipo_lightning.config import SftConfig
from rsipo_lightning.endpoint import Endpoint, EndpointConfig
from rsipo_lightning.engines.scripted import ScriptedEngine
from rsipo_lightning.environments.search import SearchConfig, SearchSuite
from rsipo_lightning.errors import ConfigError, DataError, EngineError
from rsipo_lightning.imitation import Epochs, Row, episode_rows, sample, skill_row
from rsipo_lightning.policy import TINY, Policy, load_model
from rsipo_lightning.protocols import StepResult, TaskSuite
from rsipo_lightning.rollout import ExpertPlayer, Job, Player, Sampling
from rsipo_lightning.sft.episodes import held_out, play, rows
from rsipo_lightning.sft.labels import (
    MISSING,
    OTHER,
    Label,
    Labeller,
    fingerprint,
    read_known,
    read_label,
)
from rsipo_lightning.skills import analysis_messages, read_analysis
from rsipo_lightning.tokens import rows as token_rows
from rsipo_lightning.types import Completion, Role, Stop, Task, Trajectory

ASK = partial(analysis_messages, style="compact")
GOOD = {"episode_summary": "won", "episode_skill": "search the name, then answer at once"}


@pytest.fixture(scope="module")
def config() -> SftConfig:
    keys = ["rollout.tasks=6", "rollout.group=2"]
    return compose_kind(SFT, {"env": "search"}, None, keys).config


@pytest.fixture(scope="module")
def made(config: SftConfig) -> Actors:
    codec = Codec(AutoTokenizer.from_pretrained(TINY))
    suite = SearchSuite(config.env, 0)
    policy = Policy(load_model("tiny"))
    engine = ScriptedEngine(codec, lambda prompt, text: "<answer> nobody</answer>")
    player = Player(suite, engine, codec)
    return Actors(suite, codec, policy, player, lambda: policy.model, None)


@pytest.fixture(scope="module")
def played(config: SftConfig, made: Actors) -> list[Trajectory]:
    return play(config, made, lambda n: None)


# ---- experts


def test_experts_win_as_if_a_policy_had_said_it(
    config: SftConfig, made: Actors, played: list[Trajectory]
) -> None:
    assert len(played) == 12
    assert len({t.task.id for t in played}) == 6
    assert all(t.success and t.stop is Stop.DONE for t in played)
    said = {(t.task.id, i): turn.completion.text for t in played for i, turn in enumerate(t.turns)}
    calls: dict[str, int] = {}

    def respond(prompt: object, text: str) -> str:
        task = prompt.session.split("/")[0]  # type: ignore[attr-defined]
        calls[task] = calls.get(task, -1) + 1
        return said[task, calls[task]]

    player = Player(made.suite, ScriptedEngine(made.codec, respond), made.codec)
    jobs = [Job(t.task, Role.STUDENT, 0, 0) for t in played[::2]]
    again = player.play(jobs, Sampling(0, 1.0, 64, 4096, 8))
    for one, other in zip(again, played[::2], strict=True):
        assert [t.prompt_ids for t in one.turns] == [t.prompt_ids for t in other.turns]
        assert [t.completion.ids for t in one.turns] == [t.completion.ids for t in other.turns]


class Counting(TaskSuite):
    """No stop strings, a window context, and an episode that breaks on demand."""

    name = "counting"
    config = SearchConfig(max_steps=3)
    types = ("count",)

    def tasks(self, split: str) -> list[Task]:
        return [Task(name, "counting", "count", {}) for name in ("fine", "broken")]

    def make(self) -> Counting.Episode:
        return self.Episode()

    class Episode:
        def reset(self, task: Task) -> str:
            self.task, self.taken = task, 0
            return "Your task is: count."

        def step(self, response: str) -> StepResult:
            if self.task.id == "broken":
                raise RuntimeError("snapped")
            self.taken += 1
            stop = Stop.DONE if self.taken == 3 else None
            window = f"Your task is: count. So far {self.taken}."
            return StepResult(response, "next", 1.0, stop is not None, stop=stop, prompt=window)

        def close(self) -> None:
            pass


def test_an_expert_sees_each_message_and_ends_its_turns(made: Actors) -> None:
    seen: list[str] = []
    closed: list[Teller] = []

    class Teller:
        def act(self, observation: str) -> str:
            seen.append(observation)
            return "one"

        def close(self) -> None:
            closed.append(self)

    player = ExpertPlayer(Counting(), made.codec, lambda job: Teller())
    jobs = [Job(task, Role.STUDENT, 0, 0) for task in Counting().tasks("train")]
    fine, broken = player.play(jobs, Sampling(0, 1.0, 8, 4096, 8))
    assert fine.success
    assert (broken.stop, broken.error) == (Stop.ERROR, "RuntimeError: snapped")
    assert len(closed) == 2
    windows = [f"Your task is: count. So far {i}." for i in (1, 2)]
    assert [s for s in seen if "far" in s] == windows
    for turn in fine.turns:
        assert turn.completion.ids == (*made.codec.encode("one"), *made.codec.end_ids)
    made_rows = list(episode_rows(fine, 1.0))
    assert [row.ids for row in made_rows] == [t.prompt_ids + t.completion.ids for t in fine.turns]


def test_an_expert_that_breaks_breaks_its_episode(made: Actors) -> None:
    class Fails:
        def act(self, observation: str) -> str:
            if "So far" in observation:
                raise RuntimeError("lost")
            return "one"

        def close(self) -> None:
            pass

    player = ExpertPlayer(Counting(), made.codec, lambda job: Fails())
    jobs = [Job(Counting().tasks("train")[0], Role.STUDENT, i, 0) for i in range(2)]
    for trajectory in player.play(jobs, Sampling(0, 1.0, 8, 4096, 8)):
        assert (trajectory.stop, trajectory.error) == (Stop.ERROR, "RuntimeError: lost")
        assert trajectory.steps == 1


def test_environments_without_help_say_what_to_do(tmp_path: Path) -> None:
    suite = Counting()
    task = suite.tasks("train")[0]
    with pytest.raises(ConfigError, match=r"counting has no scripted expert: set sft\.actor=polic"):
        suite.expert(task, random.Random(0))
    with pytest.raises(ConfigError, match=r"no scripted skills: set sft\.labels=endpoint or file"):
        suite.hindsight(Trajectory(task, 0, (), False, 0.0, Stop.DONE, 1), random.Random(0))


# ---- rows


def test_rows_of_an_episode_train_what_was_said(made: Actors, played: list[Trajectory]) -> None:
    trajectory = max(played, key=lambda t: t.steps)
    (row,) = episode_rows(trajectory, 0.5, 0.25)
    (expected,) = token_rows(trajectory)
    assert list(row.ids) == expected.ids.tolist()
    first = len(trajectory.turns[0].prompt_ids)
    assert set(row.weights[:first]) == {0.0}
    said = expected.mask.tolist()
    assert all((w == 0.5) is s for w, s in zip(row.weights, said, strict=True))
    assert {w for w, s in zip(row.weights[first:], said[first:], strict=True) if not s} == {0.25}


def test_the_row_of_a_label_trains_the_json_and_the_end(
    made: Actors, played: list[Trajectory]
) -> None:
    row = skill_row(made.codec, ASK(played[0]), "ging gut — ja", "such den Namen «hier» nach")
    trained = [i for i, w in zip(row.ids, row.weights, strict=True) if w]
    assert row.ids[-1] == trained[-1] == made.codec.tokenizer.eos_token_id
    text = made.codec.decode(trained)
    assert read_analysis(text) == ("ging gut — ja", "such den Namen «hier» nach", "")
    assert "—" in text  # as it is written, not as \u2014
    assert played[0].task.payload["question"] in made.codec.decode(row.ids[: -len(trained)])


def labelled(
    played: list[Trajectory], problem: dict[int, str] | None = None
) -> list[tuple[Trajectory, Label]]:
    problems = problem or {}
    return [
        (t, Label(problem=problems[i]) if i in problems else Label("won", GOOD["episode_skill"]))
        for i, t in enumerate(played)
    ]


def test_held_out_tasks_are_not_trained_on(
    config: SftConfig, made: Actors, played: list[Trajectory]
) -> None:
    held = held_out(played, 0.1, 0)
    assert len(held) == 1
    assert held == held_out(played, 0.1, 0)
    assert len(held_out(played, 0.5, 0)) == 3
    assert held_out(played, 0, 0) == set()
    done = rows(config, made, ASK, labelled(played), held)
    assert (len(done.train), len(done.held)) == (10, 2)
    shown = [made.codec.decode(s.ids.tolist()) for s in done.train]
    (question,) = {t.task.payload["question"] for t in played if t.task.id in held}
    assert not [text for text in shown if question in text]


def test_what_is_left_out_is_counted(
    config: SftConfig, made: Actors, played: list[Trajectory]
) -> None:
    labels = labelled(played, {0: "no JSON object", 1: "gives the answer away: names 'x'"})
    done = rows(config, made, ASK, labels, set())
    assert done.left_out == {"no JSON object": 1, "gives the answer away": 1}
    assert len(done.train) == 10

    lengths = sorted(len(s.ids) for s in done.train)
    short = replace(config, rollout=replace(config.rollout, context=lengths[4]))
    cut = rows(short, made, ASK, labels, set())
    assert sorted(len(s.ids) for s in cut.train) == [n for n in lengths if n <= lengths[4]]
    assert cut.left_out["row longer than rollout.context"] == 10 - len(cut.train) > 0

    none = replace(config, rollout=replace(config.rollout, context=1))
    with pytest.raises(DataError, match=r"no row is left to train on \(.*10 x row longer than"):
        rows(none, made, ASK, labels, set())


def test_actions_of_experts_are_trained_if_asked(
    config: SftConfig, made: Actors, played: list[Trajectory]
) -> None:
    asked = replace(config, sft=replace(config.sft, actions=0.5))
    held = held_out(played, 0.1, 0)
    lost = [replace(played[0], success=False), *played[1:]]
    done = rows(asked, made, ASK, labelled(lost), held)
    failed = done.left_out["actions of an expert that failed"]
    assert failed == (played[0].task.id not in held)
    weights = [set(s.credits["imitate"].weight.tolist()) for s in done.train]
    assert weights.count({0.5}) == 10 - failed
    assert weights.count({1.0}) == 10
    assert all(set(s.credits["imitate"].weight.tolist()) == {1.0} for s in done.held)


def test_an_epoch_is_every_sample_once() -> None:
    samples = [sample(Row((i, 1), (0.0, 1.0))) for i in range(10)]
    epochs = Epochs(samples, 4, seed=0)
    assert epochs.length == 3

    def seen(updates: range) -> list[int]:
        return [int(s.ids[0]) for u in updates for s in epochs.batch(u)]

    first, second = seen(range(3)), seen(range(3, 6))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert first == seen(range(3))
    assert first != [int(s.ids[0]) for u in range(3) for s in Epochs(samples, 4, 1).batch(u)]


# ---- labels


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_scripted_labels_are_valid_and_their_file_gives_them_back(
    made: Actors, played: list[Trajectory], tmp_path: Path
) -> None:
    file, counts = tmp_path / "labels.jsonl", []
    labels = Labeller(made.suite, ASK, 0).label(played, file, counts.append)
    assert all(label.skill.startswith("1. ") and not label.problem for label in labels)
    assert sum(counts) == len(lines(file)) == 12
    assert labels[0].summary == f"success after {played[0].steps} turns"
    again = Labeller(made.suite, ASK, 0, read_known(str(file)))
    assert again.label(played, tmp_path / "again.jsonl") == labels


def test_a_failure_by_form_gets_advice_on_form(made: Actors, played: list[Trajectory]) -> None:
    turn = replace(played[0].turns[0], valid=False)
    lost = replace(played[0], success=False, turns=(turn,))
    text = made.suite.hindsight(lost, random.Random(0))
    assert "tag" in text


def test_a_skill_is_checked_as_that_of_the_policy(made: Actors, played: list[Trajectory]) -> None:
    trajectory = next(t for t in played if t.task.type != "compare")
    answer = trajectory.task.payload["answers"][0]
    for skill, problem in (
        (GOOD["episode_skill"], ""),
        ("too short", "fewer than 5 words"),
        (f"the answer is always {answer} here", "gives the answer away: "),
        ("word " * 400, "more than 1200 characters"),
    ):
        label = read_label(made.suite, trajectory, json.dumps({**GOOD, "episode_skill": skill}))
        assert label.problem.startswith(problem)
        assert bool(label.problem) is bool(problem)
        assert bool(label.skill) is not bool(problem)
    assert read_label(made.suite, trajectory, "no idea").problem.startswith("no JSON object")


def test_labels_of_a_file(made: Actors, played: list[Trajectory], tmp_path: Path) -> None:
    def row(i: int, **more: object) -> str:
        return json.dumps({"task": played[i].task.id, "index": played[i].index, **GOOD, **more})

    file = tmp_path / "mine.jsonl"
    text = [
        row(0, episode=None),  # by hand, without a hash
        row(1, episode=fingerprint(played[1])),
        row(2, episode="of another run"),
        row(3, problem="was not to be used"),
        row(4, episode_skill="short"),
        row(5)[:40],  # cut off by a kill
    ]
    file.write_text("\n".join(text))
    labels = Labeller(made.suite, ASK, 0, read_known(str(file))).label(
        played, tmp_path / "out.jsonl"
    )
    problems = [label.problem for label in labels]
    assert problems == ["", "", OTHER, MISSING, "fewer than 5 words"] + [MISSING] * 7
    assert labels[0].skill == GOOD["episode_skill"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{\n{}", ":1: not JSON"),
        ("[]\n", ":1: a JSON object is expected"),
        ('{"index": 0}\n', ":1: field 'task' must be text"),
        ('\n{"task": "t", "index": "0"}\n', ":2: field 'index' must be a whole number"),
        ('{"task": "t", "index": true}\n', "field 'index'"),
        ('{"task": "t", "index": 0, "episode_summary": "x"}\n', "'episode_skill' must be text"),
        (json.dumps({"task": "t", "index": 0, **GOOD, "episode": 5}), "'episode' must be text"),
    ],
)
def test_rows_that_are_no_labels(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(text)
    with pytest.raises(DataError, match=says) as caught:
        read_known(str(file))
    assert str(caught.value).startswith(str(file))


@pytest.mark.parametrize("text", ["", '{"task": "t", "index": 0, "problem": "x"}\n', '{"task'])
def test_a_run_that_stopped_before_its_first_label(text: str, tmp_path: Path) -> None:
    """It says to start again with this file."""
    file = tmp_path / "labels.jsonl"
    file.write_text(text)
    assert read_known(str(file)) == {}


def test_labels_of_an_endpoint_survive_its_death(
    chat_server: object, made: Actors, played: list[Trajectory], tmp_path: Path, monkeypatch
) -> None:
    """What was paid for is in the file, and the next run asks for the rest only."""
    monkeypatch.setattr(web, "PAUSE_S", 0.01)
    server = chat_server

    def answer(handler: object, request: dict) -> None:
        if len(server.requests) > 5:
            server.send(handler, {"error": "no credit"}, 402)
        else:
            server.say(handler, "Here it is:\n```json\n" + json.dumps(GOOD) + "\n```")

    server.answer = answer
    endpoint = Endpoint(EndpointConfig(server.url, "m", concurrency=1), "sft.endpoint")
    file = tmp_path / "labels.jsonl"
    with pytest.raises(EngineError, match="HTTP 402"):
        Labeller(made.suite, ASK, 0, endpoint=endpoint).label(played, file)
    assert len(lines(file)) == 5

    server.requests.clear()
    server.answer = lambda handler, request: server.say(handler, json.dumps(GOOD))
    known = read_known(str(file))
    again = Labeller(made.suite, ASK, 0, known, endpoint).label(played, tmp_path / "again.jsonl")
    assert [label.skill for label in again] == [GOOD["episode_skill"]] * 12
    assert len(server.requests) == 7
    assert len(lines(tmp_path / "again.jsonl")) == 12


def test_the_file_appears_with_all_that_is_known(
    chat_server: object, made: Actors, played: list[Trajectory], tmp_path: Path, monkeypatch
) -> None:
    """A run that stops while they are copied points to the old file, which has them all."""
    known = {(t.task.id, t.index): [("", json.dumps(GOOD))] for t in played[:5]}
    endpoint = Endpoint(EndpointConfig(chat_server.url, "m"), "sft.endpoint")
    labeller = Labeller(made.suite, ASK, 0, known, endpoint)
    seen = []
    file = tmp_path / "labels.jsonl"
    chat_server.answer = lambda handler, request: (
        seen.append(len(lines(file))),
        chat_server.say(handler, json.dumps(GOOD)),
    )
    with monkeypatch.context() as patch:
        patch.setattr(SearchSuite, "check_skill", Stops(3))
        with pytest.raises(KeyboardInterrupt):
            labeller.label(played, file)
    assert not file.exists()
    labeller.label(played, file)
    assert min(seen) == 5
    assert len(lines(file)) == 12


class Stops:
    """Ctrl-C at the n-th call."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self, *args: object) -> str:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return ""


def test_unusable_answers_are_kept_as_they_are(
    chat_server: object, made: Actors, played: list[Trajectory], tmp_path: Path
) -> None:
    chat_server.answer = lambda handler, request: chat_server.say(handler, "I cannot do that")
    endpoint = Endpoint(EndpointConfig(chat_server.url, "m"), "sft.endpoint")
    file = tmp_path / "labels.jsonl"
    (label,) = Labeller(made.suite, ASK, 0, endpoint=endpoint).label(played[:1], file)
    assert label.reason.startswith("no JSON object")
    assert lines(file)[0]["answer"] == "I cannot do that"
    assert len(chat_server.requests) == 2
    assert "no JSON object" in chat_server.requests[1]["messages"][-1]["content"]


def test_the_hash_sees_answers_and_observations(played: list[Trajectory]) -> None:
    turn = played[0].turns[0]
    for other in (
        replace(turn, observation="other"),
        replace(turn, completion=Completion((), (), "other", False, 0)),
    ):
        changed = replace(played[0], turns=(other, *played[0].turns[1:]))
        assert fingerprint(changed) != fingerprint(played[0])
