"""What an algorithm may ask of the trainer: context, accept, copies of the policy as teacher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rsipo_lightning.algorithms.base import PLAIN, TRAIN, Stream, Sums, Teacher
from rsipo_lightning.algorithms.credit import taught
from rsipo_lightning.algorithms.grpo import GRPO, GRPOConfig
from rsipo_lightning.algorithms.losses import gated_distillation, sigmoid_gate
from rsipo_lightning.callbacks.rollouts import RolloutCollector, others, task_batch
from rsipo_lightning.codec import Codec
from rsipo_lightning.config import (
    EvalSection,
    OptimSection,
    RolloutSection,
    RunConfig,
    TrainerSection,
)
from rsipo_lightning.engines.scripted import ScriptedEngine
from rsipo_lightning.metrics import Metrics
from rsipo_lightning.module import PolicyModule
from rsipo_lightning.policy import Policy
from rsipo_lightning.protocols import EnvironmentConfig, StepResult, TaskSuite
from rsipo_lightning.rollout import Player
from rsipo_lightning.testing import (
    ToyWorld,
    byte_tokenizer,
    gradient,
    make_algorithm,
    random_policy,
    toy_world,
)
from rsipo_lightning.tokens import null_sample, with_credit
from rsipo_lightning.types import Credit, Iteration, Prompt, Role, RolloutGroup, Sample, Stop, Task

TOKENIZER = byte_tokenizer()
CODEC = Codec(TOKENIZER)
TASKS = 12


class Toy:
    """A task is won by its even rollouts; "all" and "none" by all and by none."""

    def reset(self, task: Task) -> str:
        return f"Your question: {task.id}?\nSay it."

    def step(self, response: str) -> StepResult:
        won = response == "win"
        return StepResult(response, "", float(won), won, stop=Stop.DONE)

    def close(self) -> None:
        pass


class ToySuite(TaskSuite):
    name = "toy"
    types = ("a",)  # type: ignore[assignment]
    config = EnvironmentConfig(max_steps=3)

    def __init__(self, outcomes: str) -> None:
        self.outcomes = outcomes  # of each task in turn: "m" mixed, "1" all won, "0" none

    def tasks(self, split: str) -> list[Task]:
        return [Task(f"t{i}{o}", "toy", "a", {}) for i, o in enumerate(self.outcomes)]

    def make(self) -> Toy:
        return Toy()


def respond(prompt: Prompt, text: str) -> str:
    kind = text.split("?")[0][-1]
    wins = kind == "1" or (kind == "m" and prompt.session.endswith(("0", "2")))
    return "win" if wins else "lose"


class Told(GRPO[GRPOConfig]):
    """GRPO whose student is told something while it acts, and another thing in a second look."""

    phases = (PLAIN, "told")

    def context(self, task: Task, phase: str) -> str:
        return "" if phase == PLAIN else f"{phase} {task.id}"


def player(outcomes: str) -> Player:
    return Player(ToySuite(outcomes), ScriptedEngine(CODEC, respond), CODEC)


def collect(
    algorithm: Any,
    outcomes: str = "m" * TASKS,
    update: int = 0,
    rank: int = 0,
    ranks: int = 1,
    tasks: int = 4,
) -> Iteration:
    """The real RolloutCollector, without a trainer."""
    p = player(outcomes)
    config = RunConfig(rollout=RolloutSection(tasks=tasks, group=4, max_new_tokens=20))
    module: Any = SimpleNamespace(version=update, algorithm=algorithm, iteration=None)
    trainer: Any = SimpleNamespace(global_rank=rank, world_size=ranks, callbacks=[])
    RolloutCollector(p, p.suite.mixture(), config).on_train_epoch_start(trainer, module)
    it: Iteration = module.iteration
    return it


def ids(it: Iteration) -> list[str]:
    return [group.task.id for group in it.groups]


# ---- context


def test_context_is_in_the_students_prompt_where_a_skill_would_be() -> None:
    it = collect(Told(GRPOConfig(), 0, CODEC))
    for group in it.groups:
        advice = f"{TRAIN} {group.task.id}"
        for t in group.trajectories:
            assert t.turns[0].prompt_ids == CODEC.start(t.opening, advice)[0]
            assert t.turns[0].anchor == CODEC.start(t.opening)[1]
            assert (t.context, t.skill) == (advice, None)
            assert advice not in t.opening


def test_each_phase_of_an_evaluation_has_its_context() -> None:
    p = player("mm")
    module = PolicyModule(
        random_policy(len(TOKENIZER)),
        Told(GRPOConfig(), 0, CODEC),
        RunConfig(eval=EvalSection()),
        p,
    )
    tasks = p.suite.tasks("test")
    plain, told = (
        [g.trajectories[0].turns[0] for g in module.play(tasks, Role.EVAL, 1, 0.4, 0, phase=phase)]
        for phase in Told.phases
    )
    for task, one, other in zip(tasks, plain, told, strict=True):
        text = CODEC.decode(one.prompt_ids)
        assert "told" not in text
        assert f"told {task.id}" in CODEC.decode(other.prompt_ids)
        kept = CODEC.inject(one.prompt_ids, one.anchor, f"told {task.id}")
        assert kept == other.prompt_ids


# ---- accept


def dapo(max_batches: int = 10) -> Any:
    return make_algorithm("dapo", max_batches=max_batches)


def test_rejected_groups_are_replaced_by_tasks_of_later_batches() -> None:
    """Half of the tasks are mixed: the update is full, with no task twice, mixed ones only, those
    of the batch first.
    """
    outcomes = "m1m0" * 5
    shares = ToySuite(outcomes).mixture()
    it = collect(dapo(), outcomes)
    batch = task_batch(shares, 0, 0, 4)
    order = [t.id for t in (*batch, *others(shares, 0, 0, batch))]
    assert len(set(ids(it))) == 4
    assert ids(it) == [name for name in order if name[-1] == "m"][:4]
    assert [t.id for t in it.tasks] == ids(it)
    row = it.metrics.reduce()
    played = row["rollout/success_frac"]
    assert 0 < row["rollout/accepted_frac"] < 1
    assert played == pytest.approx(0.5, abs=0.3)


def test_replacements_are_a_function_of_the_update() -> None:
    outcomes = "m1m0" * 5
    assert ids(collect(dapo(), outcomes, 3)) == ids(collect(dapo(), outcomes, 3))
    assert ids(collect(dapo(), outcomes, 3)) != ids(collect(dapo(), outcomes, 4))


def test_max_batches_bounds_what_is_played() -> None:
    """One mixed task of twenty: an update may stay short."""
    outcomes = "1" * 19 + "m"
    whole = collect(dapo(), outcomes)
    assert ids(whole) == ["t19m"]
    assert whole.metrics.reduce()["rollout/accepted_frac"] == pytest.approx(1 / 20)
    two = collect(dapo(2), outcomes)
    assert two.metrics.reduce()["rollout/accepted_frac"] in (0.0, 1 / 8)


def test_where_all_are_rejected_the_first_batch_is_trained_on() -> None:
    """Its advantages are 0, but the ranks need rows."""
    it = collect(dapo(), "1" * 8)
    assert ids(it) == [t.id for t in task_batch(ToySuite("1" * 8).mixture(), 0, 0, 4)]
    assert it.metrics.reduce()["rollout/accepted_frac"] == 0.0


def test_ranks_replace_with_other_tasks() -> None:
    """What one rank plays in place of its tasks, no other rank plays."""
    outcomes, both = "0" * 12 + "m" * 12, 0
    for update in range(6):
        batch = {t.id for t in task_batch(ToySuite(outcomes).mixture(), 0, update, 4)}
        ranks = [ids(collect(dapo(), outcomes, update, rank, 2)) for rank in (0, 1)]
        both += all(set(names) - batch for names in ranks)
        assert len({*ranks[0], *ranks[1]}) == 4
        assert all(name.endswith("m") for names in ranks for name in names)
    assert both > 1  # updates in which each rank replaced some


def test_without_a_filter_nothing_is_played_twice_or_counted() -> None:
    row = collect(make_algorithm("grpo"), "1" * 8).metrics.reduce()
    assert "rollout/accepted_frac" not in row


# ---- the teacher's weights


class Copied(GRPO[GRPOConfig]):
    """A teacher with weights of its own, without advice: its gap is what the policy has moved."""

    how = Teacher()

    @property
    def teacher(self) -> Teacher:
        return self.how

    @property
    def streams(self) -> Mapping[str, Stream]:
        teacher = Stream(gated_distillation(5.0), 0.1, gate=sigmoid_gate(5.0))
        return {**super().streams, "teacher": teacher}

    def credit(self, it: Iteration, sums: Sums) -> list[Sample]:
        return [taught(s, ()) for s in super().credit(it, sums)]


def moved(how: Teacher, updates: int) -> tuple[PolicyModule, list[float]]:
    """A module after so many updates that each add 1 to every weight, and a weight of its teacher
    after each of them (relative to the start).
    """
    algorithm = Copied(GRPOConfig(kl=0.0, entropy=0.0), 0, CODEC)
    algorithm.how = how
    policy = random_policy(len(TOKENIZER), layers=1)
    module = PolicyModule(policy, algorithm, RunConfig(), None)  # type: ignore[arg-type]
    start = next(policy.parameters()).detach().flatten()[0].clone()
    seen = []
    for _ in range(updates):
        module._started = 0.0
        with torch.no_grad():
            for p in policy.parameters():
                p += 1
        module.close_update()
        module.version += 1
        held = module._teacher[0] if module._teacher else policy
        seen.append(float(next(held.parameters()).detach().flatten()[0] - start))
    return module, seen


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (Teacher(), [1, 2, 3, 4]),
        (Teacher(every=2), [0, 2, 2, 4]),
        (Teacher(every=0), [0, 0, 0, 0]),
        (Teacher(ema=0.5), [0.5, 1.25, 2.125, 3.0625]),
    ],
)
def test_which_weights_teach(how: Teacher, expected: list[float]) -> None:
    module, seen = moved(how, 4)
    assert seen == pytest.approx(expected, abs=1e-5)
    assert len(module._teacher) == (0 if how.live else 1)
    assert not any(name.startswith("_teacher") for name, _ in module.named_parameters())
    if module._teacher and how.every:
        held, policy = (dict(p.named_parameters()) for p in (module._teacher[0], module.policy))
        same = all(torch.equal(held[name], policy[name]) for name in held)
        assert same == (how.every == 2)  # after 4 updates; bit for bit


def gaps(policy: Policy, how: Teacher, shift: float) -> dict[str, float]:
    """``policy/teacher_*`` of an update in which the policy has left the teacher behind."""
    algorithm = Copied(GRPOConfig(kl=0.0, entropy=0.0), 0, CODEC)
    algorithm.how = how
    module = PolicyModule(policy, algorithm, RunConfig(), None)  # type: ignore[arg-type]
    with torch.no_grad():
        for p in policy.parameters():
            p *= 1 + shift
    module.iteration = it = ToyWorld(policy, TOKENIZER).iteration(algorithm)
    for part in module.micro_batches(module.samples(it), 1, 2):
        module.objective(part)
    return it.metrics.reduce()


def test_gap_and_gate_of_a_teacher_are_logged() -> None:
    live = gaps(random_policy(len(TOKENIZER), layers=1), Teacher(), 0.3)
    assert live["policy/teacher_gap_abs_mean"] == pytest.approx(0.0, abs=1e-5)
    assert live["policy/teacher_gate_mean"] == pytest.approx(0.5, abs=1e-4)
    stale = gaps(random_policy(len(TOKENIZER), layers=1), Teacher(every=5), 0.3)
    assert stale["policy/teacher_gap_abs_mean"] > 0.01
    assert abs(stale["policy/teacher_gap_mean"]) <= stale["policy/teacher_gap_abs_mean"]
    assert abs(stale["policy/teacher_gate_mean"] - 0.5) > 0.01
    assert 0 < stale["policy/teacher_gate_open_frac"] < 1


def test_a_copy_is_state_of_the_run() -> None:
    """Saved and taken over bit for bit; the live teacher saves nothing."""
    module, _ = moved(Teacher(every=3), 4)
    checkpoint: dict[str, Any] = {}
    module.on_save_checkpoint(checkpoint)
    again, _ = moved(Teacher(every=3), 0)
    again.on_load_checkpoint(checkpoint)
    one, other = (m._teacher[0].state_dict() for m in (module, again))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert again.version == 4
    live: dict[str, Any] = {}
    moved(Teacher(), 1)[0].on_save_checkpoint(live)
    assert live["rsipo"]["teacher"] == []


# ---- nothing to train


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_rows_of_equal_rewards_need_no_forward(kl: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless another term wants them; the update is the same either way."""
    algorithm = make_algorithm("grpo", kl=kl, entropy=0.0)
    policy, reference = (random_policy(len(TOKENIZER), seed, layers=1) for seed in (1, 2))
    world = ToyWorld(policy, TOKENIZER, reference)
    module = world.module(algorithm, world.iteration(algorithm))
    samples = module.samples(module.iteration)
    for s in samples[::3]:
        s.credits["actor"].value.zero_()
    parts = module.micro_batches(samples, 1, 3)
    flat = 0 if kl else len(samples[::3])
    assert sum(len(part.samples) for part in parts) == len(samples) - flat
    alone = samples[::3]  # where no other row is left, they are looked at
    assert sum(len(part.samples) for part in module.micro_batches(alone, 1, 3)) == len(alone)
    found = gradient(module, samples, 3)
    monkeypatch.setattr(PolicyModule, "_teaches", lambda *_: True)
    assert torch.allclose(found, gradient(module, samples, 3), atol=1e-7)
    assert found.norm() > 1e-4


@pytest.mark.parametrize("name", ["vanilla", "skill_prompt"])
def test_without_a_term_the_learning_rate_is_0(name: str) -> None:
    config = RunConfig(optim=OptimSection(lr=1.0, weight_decay=0.5))
    policy = random_policy(len(TOKENIZER), layers=1)
    before = {k: v.clone() for k, v in policy.state_dict().items()}
    algorithm = make_algorithm(name)
    module = PolicyModule(policy, algorithm, config, None)  # type: ignore[arg-type]
    it = Iteration(0, [], Metrics())
    it.groups = [RolloutGroup(Task("t", "toy", "type0", {}), ())]
    module.iteration = it
    assert module.samples(it) == []
    optimizer = module.configure_optimizers()
    for part in module.micro_batches([], 1, 2):
        module.objective(part).backward()
    optimizer.step()
    assert all(torch.equal(before[k], v) for k, v in policy.state_dict().items())


# ---- scoring


def test_rows_go_where_the_policy_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not to the module's own device: under ZeRO-3 nobody sets it."""
    world = toy_world()
    algorithm = make_algorithm("seed", world.codec)
    module = world.module(algorithm, world.iteration(algorithm))
    monkeypatch.setattr(PolicyModule, "device", torch.device("meta"))
    assert gradient(module, module.samples(module.iteration), 1).any()


def test_scoring_runs_no_more_rows_at_once_than_training() -> None:
    trainer = TrainerSection(minibatches=2, micro_batches=2)
    policy = random_policy(len(TOKENIZER), layers=1)
    rows: list[int] = []
    policy.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    config = RunConfig(trainer=trainer)
    module = PolicyModule(policy, make_algorithm("grpo"), config, None)  # type: ignore[arg-type]
    one = torch.ones(1)
    row = with_credit(null_sample(), actor=Credit(one, one))
    module.score([replace(row, ids=torch.tensor([i, 0])) for i in range(8)])
    assert rows == [2, 2, 2, 2]
