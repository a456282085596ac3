"""Episodes, skills and replays with a scripted policy in a toy environment; nothing is trained."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rsipo_lightning.algorithms.rsipo import RSIPO, RSIPOConfig
from rsipo_lightning.callbacks.replays import ReplayGains
from rsipo_lightning.callbacks.rollout_stats import check_broken
from rsipo_lightning.callbacks.rollouts import RolloutCollector, most, task_batch
from rsipo_lightning.codec import Codec
from rsipo_lightning.config import RolloutSection, RunConfig
from rsipo_lightning.engines.scripted import ScriptedEngine
from rsipo_lightning.errors import EnvironmentFault
from rsipo_lightning.protocols import EnvironmentConfig, Share, StepResult, TaskSuite
from rsipo_lightning.rollout import Job, Player, Sampling
from rsipo_lightning.testing import byte_tokenizer
from rsipo_lightning.tokens import rows, with_skill
from rsipo_lightning.types import Prompt, Role, Skill, SkillRequest, Stop, Task, Trajectory

CODEC = Codec(byte_tokenizer())
HOW = Sampling(seed=0, temperature=1.0, max_new_tokens=200, context=4096, live=3)
SKILL = "look around first, then say the word"
Respond = Callable[[Prompt, str], str]


class Toy:
    """ "win" wins, "lose" ends, "boom" raises, "?" is invalid; three steps in all."""

    def __init__(self, suite: ToySuite) -> None:
        self.suite = suite

    def reset(self, task: Task) -> str:
        if task.payload.get("broken"):
            raise ValueError("no such world")
        self.taken = 0
        return f"A toy.\nYour question: {task.id}?\nSay it."

    def step(self, response: str) -> StepResult:
        self.taken += 1
        if response == "boom":
            raise RuntimeError("the toy broke")
        if response in ("win", "lose"):
            won = response == "win"
            return StepResult(response, "", float(won), won, stop=Stop.DONE)
        stop = Stop.MAX_TURNS if self.taken == 3 else None
        seen = f"seen {self.taken}"
        prompt = f"{seen}\nYour question: again?\nSay it." if response == "window" else ""
        measures = {"taken": float(self.taken)} if stop else {}
        return StepResult(
            response, seen, valid=response != "?", stop=stop, prompt=prompt, measures=measures
        )

    def close(self) -> None:
        self.suite.closed += 1


class ToySuite(TaskSuite):
    name = "toy"
    types = ("a",)  # type: ignore[assignment]

    def __init__(self) -> None:
        self.config = EnvironmentConfig(max_steps=3, invalid_penalty=0.3)
        self.closed = 0

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(f"t{i}", "toy", "a", {}) for i in range(6)]

    def make(self) -> Toy:
        return Toy(self)

    def check_skill(self, trajectory: Trajectory, text: str) -> str:
        return "contains the answer" if "secret" in text else ""


def player(respond: Respond) -> Player:
    return Player(ToySuite(), ScriptedEngine(CODEC, respond), CODEC)


def jobs(n: int, **payload: Any) -> list[Job]:
    return [Job(Task(f"t{i}", "toy", "a", payload), Role.STUDENT, 0, 0) for i in range(n)]


def say(*words: str) -> Respond:
    """One word a turn, the last one again and again."""
    return lambda prompt, text: words[min(text.count("seen "), len(words) - 1)]


def test_episodes_end_as_the_environment_says() -> None:
    p = player(say("look", "win"))
    played = p.play(jobs(5), HOW)
    assert [t.stop for t in played] == [Stop.DONE] * 5
    assert {(t.steps, t.success, t.score, t.max_steps) for t in played} == {(2, True, 1.0, 3)}
    assert p.suite.closed == 5
    assert {x.stop for x in player(say("look")).play(jobs(2), HOW)} == {Stop.MAX_TURNS}


def test_turns_extend_one_another_and_ids_are_those_of_the_engine() -> None:
    (t,) = player(say("look", "look", "win")).play(jobs(1), HOW)
    (row,) = rows(t)
    assert row.turn.unique().tolist() == [0, 1, 2]
    sampled = [i for turn in t.turns for i in turn.completion.ids]
    assert row.ids[row.mask].tolist() == sampled
    for earlier, later in zip(t.turns, t.turns[1:], strict=False):
        said = earlier.prompt_ids + earlier.completion.ids
        assert later.prompt_ids[: len(said)] == said


def test_a_window_starts_a_new_conversation_with_its_own_anchor_and_skill() -> None:
    skill = Skill(jobs(1)[0].task, SKILL, "")
    job = replace(jobs(1)[0], skill=skill)
    (t,) = player(say("window", "look")).play([job], HOW)
    assert t.measures == {"taken": 3.0}
    first, second, third = rows(t)[0], rows(t)[1], t.turns[2]
    assert (first.turn.tolist(), len(rows(t))) == ([0] * first.n, 2)  # the third turn extends
    assert second.turn.unique().tolist() == [1, 2]
    fresh, anchor = CODEC.start("seen 1\nYour question: again?\nSay it.", SKILL)
    assert (t.turns[1].prompt_ids, t.turns[1].anchor, third.anchor) == (fresh, anchor, anchor)
    assert t.turns[0].observation == "seen 1"


def test_finished_episodes_are_not_generated_for() -> None:
    """The second call holds only what is live; the third batch of live=3 is the rest."""
    respond = say("look", "win")
    p = player(lambda prompt, text: "win" if "t1?" in text else respond(prompt, text))
    p.play(jobs(4), HOW)
    assert [len(call) for call in p.engine.calls] == [3, 2, 1, 1]  # type: ignore[attr-defined]


def test_the_score_pays_for_the_share_of_invalid_turns() -> None:
    (t,) = player(say("?", "?", "win")).play(jobs(1), HOW)
    assert t.score == pytest.approx(1 - 0.3 * 2 / 3)


def test_a_broken_episode_is_data() -> None:
    p = player(lambda prompt, text: "boom" if "t1?" in text else "win")
    played = p.play(jobs(3), HOW)
    assert [t.stop for t in played] == [Stop.DONE, Stop.ERROR, Stop.DONE]
    assert played[1].error == "RuntimeError: the toy broke"
    assert not played[1].scored
    (t,) = player(say("win")).play(jobs(1, broken=True), HOW)
    assert (t.stop, t.turns, t.error) == (Stop.ERROR, (), "ValueError: no such world")


def test_a_fault_of_what_all_share_is_raised() -> None:
    p = player(say("win"))

    def step_many(*_: Any) -> Any:
        raise EnvironmentFault("dead")

    p.suite.step_many = step_many  # type: ignore[method-assign]
    with pytest.raises(EnvironmentFault, match="dead"):
        p.play(jobs(2), HOW)
    assert p.suite.closed == 2


def test_context_ends_an_episode_before_it_is_too_long() -> None:
    (t,) = player(say("look")).play(jobs(1), HOW)
    first = len(t.turns[0].prompt_ids)
    tight = Sampling(0, 1.0, 200, first + 200, 3)
    (t,) = player(say("look")).play(jobs(1), tight)
    assert (t.stop, t.steps) == (Stop.CONTEXT, 1)
    none = Sampling(0, 1.0, 200, first + 199, 3)
    (t,) = player(say("look")).play(jobs(1), none)
    assert t.stop is Stop.ERROR
    assert "does not fit rollout.context" in t.error


def test_noise_is_keyed_by_role_index_turn_and_update_not_by_place() -> None:
    p = player(say("look", "win"))
    p.play(jobs(3), HOW)
    seeds = {x.seed for call in p.engine.calls for x in call}  # type: ignore[attr-defined]
    assert len(seeds) == 6
    for other in (Role.REPLAY, Role.EVAL):
        p.engine.calls.clear()  # type: ignore[attr-defined]
        p.play([Job(j.task, other, j.index, j.update) for j in jobs(3)], HOW)
        assert not seeds & {x.seed for c in p.engine.calls for x in c}  # type: ignore[attr-defined]
    p.engine.calls.clear()  # type: ignore[attr-defined]
    p.play(jobs(3)[::-1], Sampling(0, 1.0, 200, 4096, 1))
    assert seeds == {x.seed for call in p.engine.calls for x in call}  # type: ignore[attr-defined]


# ---- skills and replays


def written(text: str) -> str:
    return json.dumps({"episode_summary": "s", "episode_skill": text})


def iterate(
    respond: Respond, context: int = 4096, **keys: Any
) -> tuple[SimpleNamespace, Player, RSIPO]:
    """One iteration up to the replays, by the real callbacks."""
    p = player(respond)
    config = RunConfig(
        rollout=RolloutSection(
            tasks=2,
            group=4,
            max_new_tokens=200,
            max_skill_tokens=300,
            context=context,
            max_error_frac=1.0,
        )
    )
    config.rollout.max_error_frac = keys.pop("max_error_frac", 1.0)
    algorithm = RSIPO(RSIPOConfig(n_min=1, **keys), 0, CODEC)
    module = SimpleNamespace(version=0, algorithm=algorithm, iteration=None)
    trainer: Any = SimpleNamespace(global_rank=0, world_size=1, callbacks=[])
    host: Any = module
    RolloutCollector(p, p.suite.mixture(), config).on_train_epoch_start(trainer, host)
    ReplayGains(p, config).on_train_epoch_start(trainer, host)
    return module, p, algorithm


def student_fails(prompt: Prompt, text: str) -> str:
    """Loses alone, wins with the skill, writes the skill when asked to analyse."""
    if "Analyse it" in text:
        return written(SKILL)
    return "win" if SKILL in text else "lose"


def test_replays_act_with_the_skill_in_the_teachers_prompt() -> None:
    """The replay's first prompt is bit for bit the teacher's view of the student's row."""
    module, _, _ = iterate(student_fails)
    it = module.iteration
    assert len(it.skills) == len(it.replays) == 2
    for result in it.replays:
        group = next(g for g in it.groups if g.task.id == result.skill.task.id)
        assert [t.success for t in result.treated] == [True] * 4
        assert not any(t.success for t in result.control)
        assert result.gain == pytest.approx(1 - 0.5 / 3)  # u = 1 - alpha T / T_max, T = 1
        view = with_skill(rows(group.trajectories[0])[0], CODEC.section_ids(SKILL))
        prompt = result.treated[0].turns[0].prompt_ids
        assert tuple(view.ids[: len(prompt)].tolist()) == prompt
        assert result.treated[0].opening == group.trajectories[0].opening


def test_controls_are_half_of_the_group_and_cost_no_episode() -> None:
    module, p, algorithm = iterate(student_fails)
    episodes = sum(len(g.trajectories) for g in module.iteration.groups)
    assert p.suite.closed == episodes + 2 * 4  # K replays of each task and nothing else
    for result in module.iteration.replays:
        group = next(g for g in module.iteration.groups if g.task.id == result.skill.task.id)
        assert list(result.control) == algorithm.halves(group, 0)[1]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("no JSON at all", "no JSON object"),
        (written("too short"), "fewer than 5 words"),
        (written("the secret word is what you should say"), "contains the answer"),
    ],
)
def test_invalid_skills_are_not_replayed(said: str, reason: str) -> None:
    module, _, _ = iterate(lambda p, text: said if "Analyse it" in text else "lose")
    it = module.iteration
    assert all(reason in s.invalid for s in it.skills)
    assert it.replays == []
    assert it.metrics.reduce()["skill/analysed_frac"] == 1.0


def test_an_analysis_that_cannot_be_read_is_asked_for_once_more() -> None:
    """With the reason and the end of the first answer; noise of its own; then it is final."""
    task = ToySuite().tasks("train")[0]
    steps = {"1": "say it now", "2": "never", "3": "the secret"}
    good = json.dumps({"episode_summary": "s", "episode_skill": SKILL, "step_skills": steps})

    def respond(prompt: Prompt, text: str) -> str:
        if "Analyse it" not in text:
            return "lose"
        return (
            good if "fewer than 5 words" in text and "too short" in text else written("too short")
        )

    p = player(respond)
    config = RunConfig(rollout=RolloutSection(max_new_tokens=200, max_skill_tokens=300))
    (episode,) = p.play([Job(task, Role.STUDENT, 0, 0)], HOW)
    p.engine.calls.clear()  # type: ignore[attr-defined]
    once = SkillRequest(episode, 0.4, step_skills=5)
    twice = replace(once, attempts=2)
    first, second = ReplayGains(p, config).write([once, twice], 0)
    assert first.invalid.startswith("fewer than 5 words")
    assert (second.text, second.invalid) == (SKILL, "")
    assert second.steps == {0: "say it now"}  # of one step; what gives the answer away is left out
    one, other = p.engine.calls  # type: ignore[attr-defined]
    assert (len(one), len(other)) == (2, 1)
    assert second.prompt_ids == other[0].ids
    assert other[0].seed not in {prompt.seed for prompt in one}
    assert second.completion.text == good


def test_an_episode_too_long_to_analyse_has_no_skill_and_is_counted() -> None:
    module, _, _ = iterate(student_fails, context=420)
    assert module.iteration.skills == []
    assert module.iteration.metrics.reduce()["skill/analysed_frac"] == 0.0


def test_too_many_broken_episodes_stop_the_run() -> None:
    def breaks(prompt: Prompt, text: str) -> str:
        if "Analyse it" in text:
            return written(SKILL)
        return "boom" if SKILL in text else "lose"

    with pytest.raises(EnvironmentFault, match=r"replays: 8 of 8 episodes broke.*the toy broke"):
        iterate(breaks, max_error_frac=0.2)
    module, _, _ = iterate(breaks)
    assert [r.gain for r in module.iteration.replays] == [None, None]
    with pytest.raises(EnvironmentFault, match="rollouts: 8 of 8"):
        iterate(say("boom"), max_error_frac=0.2)
    check_broken("x", [], 0.0)


def test_tasks_of_updates() -> None:
    """A pass without repeats, another order in the next one, no task twice in an update."""
    shares = ToySuite().mixture()

    def ids(seed: int, update: int, count: int) -> list[str]:
        return [t.id for t in task_batch(shares, seed, update, count)]

    passes = [[i for u in (0, 1) for i in ids(3, u + 2 * e, 3)] for e in (0, 1)]
    assert sorted(passes[0]) == sorted(passes[1]) == [t.id for t in shares[0].tasks]
    assert passes[0] != passes[1]
    assert ids(3, 0, 3) == passes[0][:3]
    assert ids(4, 0, 3) != passes[0][:3]
    for update in range(20):
        assert len(set(ids(0, update, 4))) == 4


def test_tasks_of_weighted_shares() -> None:
    """The weights decide, not the sizes: in each update up to rounding, and over many of them."""
    sizes, weights = {"a": 40, "b": 9, "c": 500}, {"a": 2.0, "b": 1.0, "c": 0.3}
    shares = [
        Share([Task(f"{x}{i}", "toy", x, {}) for i in range(n)], weights[x], x)
        for x, n in sizes.items()
    ]
    assert most(shares, 16) == [10, 5, 2]  # 16 * weight / 3.3 = 9.7, 4.8, 1.5
    drawn: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for update in range(600):
        batch = task_batch(shares, 0, update, 16)
        assert len({task.id for task in batch}) == 16
        counts = Counter(task.type for task in batch)
        assert all(most(shares, 16)[k] - counts[x] in (0, 1) for k, x in enumerate(sizes))
        drawn.update(counts)
        seen.update(task.id for task in batch)
        assert batch == task_batch(shares, 0, update, 16)
    for name, weight in weights.items():
        assert drawn[name] / (600 * 16) == pytest.approx(weight / 3.3, rel=0.03)
    twins = [Share([Task(f"{x}{i}", "toy", x, {}) for i in range(40)], 1.0, x) for x in "ab"]
    drawn_together = [t.id for u in range(5) for t in task_batch(twins, 0, u, 8)]
    places = [{i[1:] for i in drawn_together if i[0] == x} for x in "ab"]
    assert places[0] != places[1]  # files of equal length are not drawn row by row
    often = {x: [seen[f"{x}{i}"] for i in range(sizes[x])] for x in "ab"}  # many passes of them
    assert all(max(of_one) < 1.6 * min(of_one) for of_one in often.values())
