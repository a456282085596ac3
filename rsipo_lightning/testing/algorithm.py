"""``check_algorithm``: what the trainer relies on in every algorithm, on real conversations."""

from __future__ import annotations

import copy
import io
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from rsipo_lightning.algorithms.base import TRAIN, Algorithm, Stream, Sums, Teacher, active
from rsipo_lightning.config import RolloutSection
from rsipo_lightning.testing.contract import Contract, same
from rsipo_lightning.testing.toys import (
    ToyWorld,
    byte_tokenizer,
    gradient,
    make_algorithm,
    random_policy,
)
from rsipo_lightning.tokens import TokenBatch, rows
from rsipo_lightning.types import (
    Iteration,
    ReplayRequest,
    RolloutGroup,
    Sample,
    Skill,
    SkillRequest,
    Task,
    Trajectory,
    WrittenSkill,
)

CORPUS = ["Your question: where was the director of the film born?"] * 9


def check_algorithm(algorithm: str | type[Algorithm[Any]], **config: Any) -> None:
    """Raise ContractError for the first rule that an algorithm breaks.

    ``algorithm`` is a registered name or a class, ``config`` are keys of its Config; large
    coefficients let a mistake of a small term show. The rules: hooks are functions of the
    iteration, of (config, seed) and of ``state_dict``, and change nothing but ``it.trust`` and
    ``it.metrics``; trained tokens are sampled tokens, with finite credits of shape [N] and weights
    of at least 0 on streams that exist; views show the same tokens; broken episodes count nowhere;
    an iteration may hold no group, no episode, no valid skill and no gain; the update depends on
    neither rows nor micro-batches; the state is plain and complete.
    """
    _Check(algorithm, config).run()


@lru_cache(1)
def toy_world() -> ToyWorld:
    """The world of the checks: a random policy of 0.1 M weights and another one as reference."""
    tokenizer = byte_tokenizer(CORPUS)
    policy, reference = (random_policy(len(tokenizer), seed) for seed in (1, 2))
    return ToyWorld(policy, tokenizer, reference)


class _Check(Contract):
    def __init__(self, algorithm: str | type[Algorithm[Any]], keys: Mapping[str, Any]) -> None:
        super().__init__(algorithm if isinstance(algorithm, str) else algorithm.__name__)
        self.algorithm, self.keys, self.world = algorithm, keys, toy_world()

    def make(self) -> Watched:
        """A fresh one, the same each time."""
        made = make_algorithm(self.algorithm, self.world.codec, **self.keys)
        return Watched(made, self)

    def run(self) -> None:
        kind = self.algorithm
        if not isinstance(kind, str):
            rule = "is no subclass of Algorithm"
            self.require(isinstance(kind, type) and issubclass(kind, Algorithm), rule)
        inner = self.make().inner
        self.call("OmegaConf.structured(Config)", OmegaConf.structured, type(inner.config))
        self.call("check", type(inner).check, inner.config, RolloutSection())
        self.declares(inner)
        for update in (0, 1000):  # coefficients may fade
            self.where = f"update {update}"
            first = self.play(self.make(), self.world.iteration(self.make(), update))
            again = self.play(self.make(), self.world.iteration(self.make(), update))
            rule = "two runs with the same seed differ: draw with keyed_random(self.seed, ...)"
            self.require(same(first, again), rule)
        self.odd_iterations()
        self.state()
        self.broken()
        if active(inner.streams):
            self.row_splits()
            self.micro_batches()

    # ---- the rules, one method each

    def declares(self, a: Algorithm[Any]) -> None:
        """What stands in properties."""
        self.require(len(a.phases) > 0, "phases is empty: a run needs an evaluation")
        self.require(isinstance(a.teacher, Teacher), "teacher is no Teacher")
        self.require(a.max_batches >= 1, "max_batches must be at least 1")
        self.require(a.extra_episodes >= 0, "extra_episodes must be at least 0")
        for name, stream in a.streams.items():
            self.require(isinstance(stream, Stream), f"stream '{name}' is no Stream")
            self.require(_finite(stream.coef), f"the coefficient of '{name}' is {stream.coef}")

    def play(self, a: Watched, it: Iteration) -> list[Sample]:
        """Credits after ``shape``, with scores that depend on a token's turn and id alone: those
        that the trainer makes for what is declared.
        """
        declared = {
            "old": a.shapes,
            "reference": any(s.reference for s in active(a.streams).values()),
        }
        samples, scored = a.credit(it, a.statistics(it)), []
        for s in samples:
            token = s.ids[s.mask] + 7.0 * s.turn
            scores = {
                name: -1 - torch.sin(token + k)
                for k, (name, made) in enumerate(declared.items())
                if made
            }
            for i, (name, view) in enumerate(sorted(s.views.items())):
                score = torch.full((s.n,), torch.nan)
                score[view.index] = -1 - torch.cos(token[view.index] + (i == 0))
                scores[name] = score
            scored.append(replace(s, scores=scores))
        return a.shape(scored, it)

    def odd_iterations(self) -> None:
        """What happens in practice, if rarely."""
        cases: dict[str, dict[str, Any]] = {
            "an iteration without groups": {"tasks": 0},
            "all episodes broke": {"broken": 4},
            "no skill is valid": {"valid": False},
            "no gain could be measured": {"lost": True},
        }
        for where, case in cases.items():
            self.where, a = where, self.make()
            self.play(a, self.world.iteration(a, **case))
        self.where = ""

    def state(self) -> None:
        """``state_dict`` is plain and holds all that the next iteration depends on."""
        a, fresh = self.make(), self.make()
        self.play(a, self.world.iteration(a))
        state, file = a.inner.state_dict(), io.BytesIO()
        self.call("torch.save(state_dict())", torch.save, state, file)
        file.seek(0)
        what = "torch.load(weights_only=True) of state_dict()"
        loaded = self.call(what, lambda: torch.load(file, weights_only=True))
        self.require(same(loaded, state), "state_dict() holds what torch.save changes")
        self.call("load_state_dict", fresh.inner.load_state_dict, loaded)
        rule = "load_state_dict(state_dict()) gives another state_dict()"
        self.require(same(fresh.inner.state_dict(), state), rule)
        one, other = (self.play(x, self.world.iteration(x, 1)) for x in (a, fresh))
        rule = "a resumed run goes on differently: state_dict() lacks what the hooks depend on"
        self.require(same(one, other), rule)

    def broken(self) -> None:
        """Episodes that broke have no reward; neither their tokens nor their scores count."""
        self.where = "an episode broke"
        a = self.make()
        it = self.world.iteration(a, broken=1)
        samples = self.play(a, it)
        lost = [t for g in it.groups for t in g.trajectories if not t.scored]
        gone = {(tuple(s.ids.tolist()), tuple(s.mask.tolist())) for t in lost for s in rows(t)}
        trained = {(tuple(s.ids.tolist()), tuple(s.mask.tolist())) for s in samples if s.credits}
        self.require(not gone & trained, "credit trains on it: use group.scored")
        scores = {id(t): replace(t, score=-t.score) for t in lost}
        it.groups = [_changed(g, scores) for g in it.groups]
        it.trust = {}
        rule = "its score changes the credits of others: use group.scored"
        self.require(same(self.play(self.make(), it), samples), rule)
        self.where = ""

    def row_splits(self) -> None:
        """A trajectory cut into rows keeps its tokens, advantages and total weight."""
        a = self.make()
        it = self.world.iteration(a)
        whole = self.play(a, it)
        forks = {id(t): _forked(t) for g in it.groups for t in g.trajectories}
        it.groups = [_changed(g, forks) for g in it.groups]
        skills = {id(s): _told(s, forks) for s in it.skills}
        it.skills = [skills[id(s)] for s in it.skills]
        it.replays = [
            replace(r, skill=skills[id(r.skill)], treated=tuple(map(_forked, r.treated)))
            for r in it.replays
        ]
        it.trust = {}
        cut = self.play(self.make(), it)
        names, others = ({n for s in x for n in s.credits} for x in (whole, cut))
        self.require(names == others, "which streams have credits depends on the number of rows")
        for name in sorted(names):
            for part in ("weight", "value"):
                one, other = (
                    torch.cat([getattr(s.credits[name], part) for s in x if name in s.credits])
                    for x in (whole, cut)
                )
                equal = one.shape == other.shape and torch.allclose(one, other, atol=1e-6)
                rule = f"the {part}s of '{name}' depend on the number of rows of a trajectory"
                self.require(equal, rule)

    def micro_batches(self) -> None:
        """Gradients of 1, 3, 9 micro-batches (some empty) and of shuffled rows; and of each term
        alone, since a wrong denominator of a small term would hide in the sum.
        """
        a = self.make()
        m = self.world.module(a, self.world.iteration(a))
        samples, streams = m.samples(m.iteration), m.streams
        shuffled = random.Random(0).sample(samples, len(samples))
        whole = gradient(m, samples, 1)
        self.require(bool(whole.isfinite().all()), "the gradient is not finite")
        rule = "the gradient depends on micro-batches, order or padding of rows"
        for order, micro in ((samples, 3), (samples, 9), (shuffled, 2)):
            self.require(_close(whole, gradient(m, order, micro)), rule)
        for name in streams:
            m.streams = {name: streams[name]}
            one, other = gradient(m, samples, 1), gradient(m, samples, 3)
            self.require(_close(one, other), f"{rule} in the stream '{name}'")


def _silent(stream: Stream, batch: TokenBatch, logp: Tensor) -> bool:
    """Whether values of 0 give losses and gradients of 0."""
    inputs = [x for x in (logp, batch.entropy) if x is not None and x.requires_grad]
    loss = stream.loss(batch, logp, torch.zeros_like(logp))
    if bool(loss.any()):
        return False
    if not loss.requires_grad:
        return True
    found = torch.autograd.grad(loss.sum(), inputs, retain_graph=True, allow_unused=True)
    return not any(bool(grad.any()) for grad in found if grad is not None)


class Watched(Algorithm[Any]):
    """Another algorithm, each of whose hooks is called twice; what it returns is checked."""

    def __init__(self, inner: Algorithm[Any], contract: Contract) -> None:
        super().__init__(inner.config, inner.seed, inner.codec, inner.bank)
        self.inner, self.contract = inner, contract

    # ---- properties

    @property
    def streams(self) -> Mapping[str, Stream]:
        """The same terms, with losses and gates that are checked."""
        return {
            name: replace(
                stream,
                loss=self._loss(name, stream),
                gate=self._gate(name, stream.gate) if stream.gate else None,
            )
            for name, stream in self.inner.streams.items()
        }

    def _loss(self, name: str, stream: Stream) -> Callable[[TokenBatch, Tensor, Tensor], Tensor]:
        def loss(batch: TokenBatch, logp: Tensor, value: Tensor) -> Tensor:
            what = f"the loss of '{name}'"
            found = self.contract.call(what, stream.loss, batch, logp, value)
            shape = tuple(found.shape)
            rule = f"{what} must give one number per token, [N]; its shape is {shape}"
            self.contract.require(shape == tuple(logp.shape), rule)
            self.contract.require(bool(found.isfinite().all()), f"{what} is not finite")
            rule = f"{what} must be 0, with its gradient, where the value is 0"
            self.contract.require(_silent(stream, batch, logp), rule)
            return found

        return loss

    def _gate(
        self, name: str, gate: Callable[[TokenBatch, Tensor], Tensor]
    ) -> Callable[[TokenBatch, Tensor], Tensor]:
        def checked(batch: TokenBatch, logp: Tensor) -> Tensor:
            what = f"the gate of '{name}'"
            found = self.contract.call(what, gate, batch, logp)
            good = found.shape == logp.shape and bool(((found >= 0) & (found <= 1)).all())
            self.contract.require(good, f"{what} must give one number in [0, 1] per token, [N]")
            return found

        return checked

    @property
    def teacher(self) -> Teacher:
        """As it is."""
        return self.inner.teacher

    @property
    def analyzer(self) -> Any:
        """As it is."""
        return self.inner.analyzer

    @property
    def shapes(self) -> bool:
        """As it is."""
        return self.inner.shapes

    # ---- hooks

    def context(self, task: Task, phase: str) -> str:
        """Text, in training and in each phase."""
        for name in (TRAIN, *self.inner.phases):
            found = self._twice("context", task, name)
            self.contract.require(isinstance(found, str), f"context of '{name}' is no text")
        return self.inner.context(task, phase)

    def propose(self, it: Iteration) -> Sequence[SkillRequest | Skill]:
        """Requests for scored episodes of the iteration, and skills of its tasks."""
        for group in it.groups:
            found = self._twice("accept", group)
            self.contract.require(isinstance(found, bool), "accept returns no bool")
        proposed: Sequence[SkillRequest | Skill] = self._hook(it, "propose")
        episodes = {id(t) for g in it.groups for t in g.scored}
        tasks = {g.task.id for g in it.groups}
        for item in proposed:
            if isinstance(item, SkillRequest):
                rule = "propose asks for a skill of an episode that broke or is not in it.groups"
                self.contract.require(id(item.trajectory) in episodes, rule)
            else:
                rule = "propose must return SkillRequests and Skills for tasks of the iteration"
                self.contract.require(isinstance(item, Skill) and item.task.id in tasks, rule)
        return proposed

    def plan(self, it: Iteration) -> list[ReplayRequest]:
        """Replays of valid skills of the iteration, no more than are declared."""
        plans: list[ReplayRequest] = self._hook(it, "plan")
        skills, extra = {id(s) for s in it.skills if s.valid}, Counter[str]()
        for plan in plans:
            rule = "plan replays a skill that is not valid or not in it.skills"
            self.contract.require(id(plan.skill) in skills, rule)
            extra[plan.skill.task.id] += plan.n
        most = max(extra.values(), default=0)
        rule = f"plan asks for {most} replays of a task, extra_episodes says "
        self.contract.require(
            most <= self.inner.extra_episodes, f"{rule}{self.inner.extra_episodes}"
        )
        return plans

    def statistics(self, it: Iteration) -> Sums:
        """Finite numbers."""
        sums: Sums = self._hook(it, "statistics")
        good = all(_finite(x) for values in sums.values() for x in values)
        self.contract.require(good, "statistics must be {key: (finite numbers)}")
        return sums

    def credit(self, it: Iteration, sums: Sums) -> list[Sample]:
        """Twice from the same state."""
        state = copy.deepcopy(self.inner.state_dict())
        first: list[Sample] = self._watched("credit", it, self.inner.credit, it, sums)
        trust = dict(it.trust)
        self.inner.load_state_dict(copy.deepcopy(state))
        second: list[Sample] = self._watched("credit", it, self.inner.credit, it, sums)
        self._equal("credit", (first, trust), (second, dict(it.trust)))
        self._check(first, it)
        return second

    def shape(self, samples: list[Sample], it: Iteration) -> list[Sample]:
        """Twice, without changing the samples."""
        before = copy.deepcopy(samples)
        first: list[Sample] = self._watched("shape", it, self.inner.shape, samples, it)
        rule = "shape changes the samples that it is given: return others"
        self.contract.require(same(before, samples), rule)
        self._equal("shape", first, self._watched("shape", it, self.inner.shape, samples, it))
        self._check(first, it)
        return first

    def state_dict(self) -> dict[str, Any]:
        """As it is."""
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As it is."""
        self.inner.load_state_dict(state)

    # ---- how hooks are watched

    def _hook(self, it: Iteration, name: str) -> Any:
        hook = getattr(self.inner, name)
        first, second = (self._watched(name, it, hook, it) for _ in range(2))
        self._equal(name, first, second)
        return first

    def _twice(self, name: str, *args: Any) -> Any:
        first, second = (self.contract.call(name, getattr(self.inner, name), *args) for _ in "ab")
        self._equal(name, first, second)
        return first

    def _watched(self, name: str, it: Iteration, hook: Callable[..., Any], *args: Any) -> Any:
        def seen() -> str:
            trust = {} if name == "credit" else it.trust
            return repr((it.update, it.tasks, it.groups, it.skills, it.replays, trust))

        before = seen()
        found = self.contract.call(name, hook, *args)
        rule = f"{name} changes the iteration: only it.metrics and, in credit, it.trust may change"
        self.contract.require(seen() == before, rule)
        return found

    def _equal(self, name: str, first: Any, second: Any) -> None:
        rule = f"{name} gives another result when it is called again with the same"
        self.contract.require(same(first, second), rule)

    def _check(self, samples: list[Sample], it: Iteration) -> None:
        """Rows as the trainer needs them."""
        require, streams = self.contract.require, self.inner.streams
        sampled = set(_completions(it))
        for s in samples:
            tokens = s.ids[s.mask]
            numbers = (len(tokens), s.n, len(s.engine_logprobs))
            rule = f"mask, turn and engine_logprobs of a row differ in length: {numbers}"
            require(len(set(numbers)) == 1, rule)
            require(not bool(s.mask[0]), "position 0 of a row cannot be trained")
            said = {tuple(tokens[s.turn == k].tolist()) for k in s.turn.tolist()}
            rule = "a row trains on tokens that nobody sampled: make rows with tokens.rows"
            require(said <= sampled, rule)
            for name, credit in s.credits.items():
                have = ", ".join(streams) or "none"
                require(name in streams, f"no stream '{name}' for a credit (have: {have})")
                for part, x in zip(credit._fields, credit, strict=True):
                    what = f"the {part} of '{name}'"
                    rule = f"{what} must have the shape of the row's tokens, [{s.n}]; it has "
                    require(tuple(x.shape) == (s.n,), f"{rule}{list(x.shape)}")
                    require(bool(x.isfinite().all()), f"{what} is not finite")
                require(bool((credit.weight >= 0).all()), f"a weight of '{name}' is below 0")
            for name, view in s.views.items():
                shown, at = view.ids[view.mask], view.index.tolist()
                inside = all(0 <= i < s.n for i in at) and len(set(at)) == len(at)
                good = inside and len(shown) == len(at) and not bool(view.mask[:1].any())
                rule = f"the view '{name}' must show sampled tokens of its row, where index says"
                require(good and torch.equal(shown, tokens[view.index]), rule)


def _completions(it: Iteration) -> Iterator[tuple[int, ...]]:
    trajectories = [t for g in it.groups for t in g.trajectories]
    trajectories += [t for r in it.replays for t in r.treated]
    yield from (turn.completion.ids for t in trajectories for turn in t.turns)
    yield from (s.completion.ids for s in it.skills if isinstance(s, WrittenSkill))


def _forked(t: Trajectory) -> Trajectory:
    """The same turns under prompts that do not extend one another, so that each is a row."""
    turns = tuple(replace(x, prompt_ids=(k + 5, *x.prompt_ids)) for k, x in enumerate(t.turns))
    return replace(t, turns=turns)


def _changed(group: RolloutGroup, changed: Mapping[int, Trajectory]) -> RolloutGroup:
    return replace(group, trajectories=tuple(changed.get(id(t), t) for t in group.trajectories))


def _told(skill: Skill, changed: Mapping[int, Trajectory]) -> Skill:
    t = skill.trajectory
    return replace(skill, trajectory=changed[id(t)]) if t else replace(skill)


def _finite(x: Any) -> bool:
    return isinstance(x, int | float) and abs(x) < float("inf")


def _close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-5 * float(one.norm()) + 1e-12)
