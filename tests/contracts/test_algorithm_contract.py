"""A broken algorithm for each rule of ``check_algorithm``; sound ones: tests/invariants."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from rsipo_lightning.algorithms.base import AlgorithmConfig, Stream
from rsipo_lightning.algorithms.credit import shown, taught
from rsipo_lightning.algorithms.grpo import GRPO, GRPOConfig
from rsipo_lightning.algorithms.losses import gated_distillation
from rsipo_lightning.testing import ContractError, check_algorithm
from rsipo_lightning.tokens import with_credit
from rsipo_lightning.types import Credit, Iteration, ReplayRequest, Sample, SkillRequest, Stop


@dataclass
class PlainConfig(GRPOConfig):
    kl: float = 0.0
    entropy: float = 0.0


class Plain(GRPO[Any]):
    """Sound; what is changed below breaks it."""

    Config = PlainConfig

    def credit(self, it: Iteration, sums: Any) -> list[Sample]:
        return [self.row(s) for s in super().credit(it, sums)]

    def row(self, sample: Sample) -> Sample:
        return sample


def changed(**members: Any) -> type[Plain]:
    return type("Broken", (Plain,), members)


def rowwise(change: Callable[[Sample], Sample]) -> type[Plain]:
    return changed(row=lambda self, sample: change(sample))


def credited(weigh: Callable[[Any], Any] = lambda w: w, value: Any = lambda v: v) -> type[Plain]:
    def change(s: Sample) -> Sample:
        weight, advantage = s.credits["actor"]
        return with_credit(s, actor=Credit(weigh(weight), value(advantage)))

    return rowwise(change)


def losing(loss: Callable[..., Any], coef: float = 1.0) -> type[Plain]:
    return changed(streams=property(lambda self: {"actor": Stream(loss, coef)}))


def gated(gate: Callable[..., Any]) -> type[Plain]:
    streams = {"teacher": Stream(gated_distillation(5.0), gate=gate)}
    return changed(streams=streams, row=lambda self, s: without_actor(taught(s, (5, 6))))


def without_actor(s: Sample) -> Sample:
    return replace(s, credits={"teacher": s.credits["teacher"]})


def requests(it: Iteration) -> list[SkillRequest]:
    return [SkillRequest(group.scored[0]) for group in it.groups if group.scored]


def replays(self: Any, it: Iteration) -> list[ReplayRequest]:
    return [ReplayRequest(s, 2, (), 0.5) for s in it.skills if s.valid]


ASKS = {"propose": lambda self, it: requests(it), "plan": replays, "extra_episodes": 2}


def all_of(it: Iteration) -> list[Any]:
    return [t for group in it.groups for t in group.trajectories]


def before(hook: str, do: Callable[[Any, Iteration], Any], **members: Any) -> type[Plain]:
    """Something is done in a hook, beside what it should do."""

    def replaced(self: Any, *args: Any) -> Any:
        do(self, args[1] if hook == "shape" else args[0])
        return getattr(super(broken, self), hook)(*args)

    broken = changed(**{hook: replaced}, **members)
    return broken


class Counts(Plain):
    """Weighs by where it has begun."""

    seen = 9

    def statistics(self, it: Iteration) -> Any:
        self.seen = min(self.seen, it.update)
        return {}

    def row(self, sample: Sample) -> Sample:
        weight, advantage = sample.credits["actor"]
        return with_credit(sample, actor=Credit(weight, advantage * (1 + self.seen)))


class Lazy(Plain):
    """Its state is written and not read."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen = 0

    def credit(self, it: Iteration, sums: Any) -> list[Sample]:
        self.seen = 1
        return super().credit(it, sums)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}


class Unkeyed(Plain):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.scale = random.random()

    def row(self, sample: Sample) -> Sample:
        return with_credit(sample, actor=Credit(*(self.scale * x for x in sample.credits["actor"])))


class Scores(Plain):
    """The baseline sees broken episodes."""

    def credit(self, it: Iteration, sums: Any) -> list[Sample]:
        mean = sum(t.score for t in all_of(it))
        rows = super().credit(it, sums)
        return [
            with_credit(s, actor=Credit(s.credits["actor"].weight, s.credits["actor"].value - mean))
            for s in rows
        ]


class TrainsBroken(Plain):
    def credit(self, it: Iteration, sums: Any) -> list[Sample]:
        other = Iteration(it.update, it.tasks, it.metrics)
        other.groups = [
            replace(g, trajectories=tuple(replace(t, stop=Stop.DONE) for t in g.trajectories))
            for g in it.groups
        ]
        return super().credit(other, sums)


def first_token(s: Sample) -> Sample:
    mask = s.mask.index_fill(0, torch.tensor([0]), True)
    zero = torch.zeros(1)
    return replace(
        s,
        mask=mask,
        turn=torch.cat([s.turn[:1], s.turn]),
        engine_logprobs=torch.cat([zero, s.engine_logprobs]),
        credits={},
    )


def view_of_others(s: Sample) -> Sample:
    view = shown(s, (5, 6)).views["teacher"]
    return replace(s, views={"teacher": replace(view, ids=view.ids.flip(0))})


def raises_for_no_episode(self: Any, it: Iteration, sums: Any) -> list[Sample]:
    if it.groups:
        1 / len([t for t in all_of(it) if t.scored])
    return []


def valid_skill(self: Any, it: Iteration) -> None:
    if it.skills:
        [s.valid for s in it.skills].index(True)


def drawn(self: Any, it: Iteration) -> list[SkillRequest]:
    return [replace(r, temperature=random.random()) for r in requests(it)]


def in_place(self: Any, samples: list[Sample], it: Iteration) -> list[Sample]:
    for s in samples:
        s.credits["actor"].value.mul_(2)
    return samples


def unscored(self: Any, samples: list[Sample], it: Iteration) -> list[Sample]:
    return [with_credit(s, actor=Credit(s.scores["none"], s.scores["old"])) for s in samples]


def undeclared(self: Any, samples: list[Sample], it: Iteration) -> list[Sample]:
    """Sound only where ``shapes`` says that l_old is read."""
    return [
        with_credit(s, actor=Credit(s.credits["actor"].weight, s.scores["old"])) for s in samples
    ]


def referred(self: Any, samples: list[Sample], it: Iteration) -> list[Sample]:
    """Sound: a stream that counts reads the reference, so that it is scored."""
    return [
        with_credit(s, actor=Credit(s.credits["actor"].weight, s.scores["reference"]))
        for s in samples
    ]


def unread(self: Any, it: Iteration) -> list[ReplayRequest]:
    return [ReplayRequest(s, 2, (), 0.5) for s in it.skills]


AGAIN = "gives another result when it is called again with the same"
BROKEN: list[tuple[Any, str]] = [
    (AlgorithmConfig, "AlgorithmConfig: is no subclass of Algorithm"),
    # what is declared
    (changed(phases=()), "Broken: phases is empty"),
    (changed(teacher="live"), "teacher is no Teacher"),
    (changed(max_batches=0), "max_batches must be at least 1"),
    (changed(extra_episodes=-1), "extra_episodes must be at least 0"),
    (changed(streams={"actor": 1.0}), "stream 'actor' is no Stream"),
    (losing(lambda b, logp, v: logp, float("nan")), "the coefficient of 'actor' is nan"),
    # pure hooks
    (changed(context=lambda self, task, phase: None), "context of 'train' is no text"),
    (changed(context=lambda self, *a: str(random.random())), f"context {AGAIN}"),
    (changed(accept=lambda self, group: None), "accept returns no bool"),
    (changed(propose=drawn), f"propose {AGAIN}"),
    (changed(statistics=lambda self, it: {"n": (random.random(),)}), f"statistics {AGAIN}"),
    (credited(value=lambda v: v * random.random()), f"credit {AGAIN}"),
    (changed(shape=lambda self, s, it: random.sample(s, len(s))), f"shape {AGAIN}"),
    (Unkeyed, "update 0: two runs with the same seed differ"),
    (before("credit", lambda self, it: it.groups.reverse()), "credit changes the iteration"),
    (before("shape", lambda self, it: it.groups.reverse()), "shape changes the iteration"),
    (before("plan", lambda self, it: it.trust.update(x=1.0)), "plan changes the iteration"),
    (before("propose", lambda self, it: it.skills.append(1)), "propose changes the iteration"),
    (changed(shape=in_place), "shape changes the samples that it is given"),
    # what they return
    (changed(**{**ASKS, "extra_episodes": 0}), "for 2 replays of a task, extra_episodes says 0"),
    (changed(propose=lambda self, it: [1]), "propose must return SkillRequests and Skills"),
    (
        changed(propose=lambda self, it: [SkillRequest(t) for t in all_of(it)]),
        "all episodes broke: propose asks for a skill of an episode that broke",
    ),
    (changed(**{**ASKS, "plan": unread}), "plan replays a skill that is not valid"),
    (changed(statistics=lambda self, it: {"n": (float("inf"),)}), "statistics must be"),
    (credited(lambda w: torch.ones(1)), "the weight of 'actor' must have the shape of the row's"),
    (credited(value=lambda v: v[:, None]), "the value of 'actor' must have the shape of the row's"),
    (credited(value=lambda v: v * torch.nan), "the value of 'actor' is not finite"),
    (credited(lambda w: -w), "a weight of 'actor' is below 0"),
    (changed(shape=unscored, shapes=True), "shape raised KeyError: 'none'"),
    (changed(shape=undeclared), "shape raised KeyError: 'old'"),
    (changed(shape=referred), "shape raised KeyError: 'reference'"),
    (
        rowwise(lambda s: with_credit(s, aktor=s.credits["actor"])),
        "no stream 'aktor' for a credit (have: actor, kl, entropy)",
    ),
    (rowwise(lambda s: replace(s, turn=s.turn[1:])), "mask, turn and engine_logprobs of a row"),
    (rowwise(first_token), "position 0 of a row cannot be trained"),
    (rowwise(lambda s: replace(s, ids=s.ids + 1)), "a row trains on tokens that nobody sampled"),
    (rowwise(view_of_others), "the view 'teacher' must show sampled tokens of its row"),
    # iterations that lack something
    (before("credit", lambda self, it: it.groups[0]), "without groups: credit raised IndexError"),
    (changed(credit=raises_for_no_episode), "all episodes broke: credit raised ZeroDivisionError"),
    (
        before("credit", valid_skill, **ASKS),
        "no skill is valid: credit raised ValueError: True is not in list",
    ),
    (
        before("credit", lambda self, it: [r.gain + 1 for r in it.replays], **ASKS),
        "no gain could be measured: credit raised TypeError",
    ),
    (TrainsBroken, "an episode broke: credit trains on it: use group.scored"),
    (Scores, "an episode broke: its score changes the credits of others: use group.scored"),
    # state
    (changed(state_dict=lambda self: {"c": self.config}), "torch.load(weights_only=True) of"),
    (Lazy, "load_state_dict(state_dict()) gives another state_dict()"),
    (Counts, "a resumed run goes on differently: state_dict() lacks what the hooks depend on"),
    # the update
    (credited(lambda w: w / len(w)), "the weights of 'actor' depend on the number of rows"),
    (credited(value=lambda v: v * len(v)), "the values of 'actor' depend on the number of rows"),
    (losing(lambda b, logp, v: (v * logp).mean()), "the loss of 'actor' must give one number per"),
    (losing(lambda b, logp, v: logp / 0.0), "the loss of 'actor' is not finite"),
    (losing(lambda b, logp, v: -logp), "the loss of 'actor' must be 0, with its gradient, where"),
    (losing(lambda b, logp, v: logp - logp.detach()), "the loss of 'actor' must be 0, with its"),
    (losing(lambda b, logp, v: v * logp * len(v)), "the gradient depends on micro-batches, order"),
    (gated(lambda b, logp: logp * 0 + 2), "the gate of 'teacher' must give one number in [0, 1]"),
    (gated(lambda b, logp: logp.sum().sigmoid()), "the gate of 'teacher' must give one number in"),
    (gated(lambda b, logp: b.scores["none"]), "the gate of 'teacher' raised KeyError: 'none'"),
]


@pytest.mark.parametrize(("broken", "says"), BROKEN)
def test_a_rule(broken: type[Any], says: str) -> None:
    with pytest.raises(ContractError, match=re.escape(says)) as caught:
        check_algorithm(broken)
    assert "\n" not in str(caught.value)


def test_what_was_changed_is_what_is_wrong() -> None:
    """The base of the broken ones is sound, and so is one that asks for skills and replays."""
    check_algorithm(Plain)
    check_algorithm(changed(**ASKS))
    check_algorithm(changed(shape=undeclared, shapes=True))
    check_algorithm(changed(shape=referred), kl=0.1)
