"""StepOPSD (arXiv 2605.27140; methods.md 5.10): hindsight from a peer weighs the advantage.

A failed rollout of a group with a success -> the policy of some updates ago, which has read the
first success, scores its steps: d = l_T - l_old -> w = clip(2 sigma(sign(A) d), 1 - a, 1 + a) ->
A' = (1 - lam) A + lam w A -> each step gets the same budget of |A'| -> GRPO with A'.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rsipo_lightning.algorithms.base import Sums, Teacher
from rsipo_lightning.algorithms.credit import fading, reweighted
from rsipo_lightning.algorithms.grpo import GRPO, GRPOConfig
from rsipo_lightning.checks import one_of, within
from rsipo_lightning.tokens import narrowed, places, with_credit, with_skill
from rsipo_lightning.types import Credit, Iteration, Sample, Trajectory, Turn

_BLOCK = re.compile(r"<(\w+)>(?:(?!</?\1>).)*</\1>", re.DOTALL)


@dataclass
class StepOPSDConfig(GRPOConfig):
    """Keys of StepOPSD."""

    lam: float = 0.2  # at the first update
    lam_updates: int = 50  # until it is 0, in a line; 0: it stays
    bound: float = 0.2  # a, of the weight
    refresh: int = 10  # updates between copies of the policy into the teacher; 1: the policy itself
    span: str = "turn"  # turn (thought and action) | action (its block only)
    placement: str = (
        "user_tail"  # of the peer: end of the first user message | raw_suffix (behind it)
    )
    budget: bool = True  # give each step of a trajectory the same mean |A'|

    def __post_init__(self) -> None:
        super().__post_init__()
        within("algo.lam", self.lam, 0, 1)
        within("algo.bound", self.bound, 0, 1)
        within("algo.lam_updates", self.lam_updates, 0, math.inf)
        within("algo.refresh", self.refresh, 1, math.inf)
        one_of("algo.span", self.span, ("turn", "action"))
        one_of("algo.placement", self.placement, ("user_tail", "raw_suffix"))


class StepOPSD(GRPO[StepOPSDConfig]):
    """GRPO with advantages re-weighted step by step."""

    Config = StepOPSDConfig

    @property
    def teacher(self) -> Teacher:
        """A copy of the policy, refreshed every ``refresh`` updates."""
        return Teacher(every=self.config.refresh if self.config.lam > 0 else 1)

    @property
    def shapes(self) -> bool:
        """It reads l_old."""
        return self.config.lam > 0

    def lam(self, update: int) -> float:
        """lam(update) = lam (1 - update/N)_+."""
        return fading(self.config.lam, self.config.lam_updates, update)

    def credit(self, it: Iteration, sums: Sums) -> list[Sample]:
        """GRPO's rows, each with a teacher's view of its spans.

        Without hindsight (successes, and groups without one) the view is the row itself, and d is
        what the policy has moved since the teacher was copied.
        """
        samples = []
        for group in it.groups:
            peer = next((t for t in group.scored if t.success), None)
            for trajectory, part in zip(group.scored, self.actor(group), strict=True):
                if self.lam(it.update) > 0:
                    told = peer if peer and not trajectory.success else None
                    part = [self.seen(s, trajectory, told) for s in part]
                samples += part
        return samples

    def seen(self, sample: Sample, trajectory: Trajectory, peer: Trajectory | None) -> Sample:
        """The row with a teacher's view, in which the peer's episode stands before the first
        response.
        """
        assert self.codec is not None
        tail = self.codec.tail if self.config.placement == "user_tail" else 0
        section = self.codec.encode(hindsight(peer)) if peer else ()
        view = with_skill(sample, section, at=int(places(sample)[0]) - tail)
        if self.config.span == "action":
            view = narrowed(view, self.actions(sample, trajectory))
        return replace(sample, views={**sample.views, "teacher": view})

    def actions(self, sample: Sample, trajectory: Trajectory) -> Tensor:
        """[N] tokens of the last <tag>...</tag> of each response; of all of one without any."""
        keep = torch.zeros(sample.n, dtype=torch.bool)
        for k in torch.unique(sample.turn).tolist():
            mine = (sample.turn == k).nonzero().flatten()
            begin, end = self.block(trajectory.turns[k])
            keep[mine[begin:end]] = True
        return keep

    def block(self, turn: Turn) -> tuple[int, int]:
        """First and last + 1 of the tokens that the action's block touches."""
        assert self.codec is not None
        ids, decode = turn.completion.ids, self.codec.decode
        blocks = list(_BLOCK.finditer(decode(ids)))
        if not blocks:
            return 0, len(ids)
        ends = range(1, len(ids) + 1)  # of token i: characters that ids[: i + 1] spell
        first = bisect_left(ends, blocks[-1].start() + 1, key=lambda n: len(decode(ids[:n])))
        last = bisect_left(ends, blocks[-1].end(), key=lambda n: len(decode(ids[:n])))
        return first, last + 1

    def shape(self, samples: list[Sample], it: Iteration) -> list[Sample]:
        """A', then the budget of steps."""
        lam = self.lam(it.update)
        if lam == 0:
            return samples
        shaped = [
            reweighted(s, lambda x: 2 * torch.sigmoid(x), self.config.bound, lam, it.metrics)
            for s in samples
        ]
        return budgeted(shaped) if self.config.budget else shaped


def hindsight(peer: Trajectory) -> str:
    """What the teacher is told of a success (3.3)."""
    said = "\n".join(f"{t.completion.text}\n{t.observation}".strip() for t in peer.turns)
    return (
        "\n<hindsight>\npeer_correct_trajectory:\n<peer_correct_trajectory>\n"
        f"{said}\n</peer_correct_trajectory>\n</hindsight>"
    )


def budgeted(samples: list[Sample]) -> list[Sample]:
    """Step k of a trajectory times clip(Mbar / (M_k + 1e-6), 1/2, 2), where M_k is the mean of |A'|
    over its span and Mbar their mean; a single step stays as it is. A trajectory may have several
    rows.
    """
    rows: dict[str, list[int]] = defaultdict(list)
    for i, sample in enumerate(samples):
        rows[sample.episode].append(i)
    done = list(samples)
    for mine in rows.values():
        parts = [samples[i] for i in mine]
        span = ~torch.cat([s.scores["teacher"] for s in parts]).isnan()
        value = torch.cat([s.credits["actor"].value for s in parts])
        steps, step = torch.unique(torch.cat([s.turn for s in parts])[span], return_inverse=True)
        if len(steps) < 2:
            continue
        size = torch.zeros(len(steps)).index_add(0, step, value[span].abs()) / step.bincount()
        value[span] *= (size.mean() / (size + 1e-6)).clamp(0.5, 2)[step]
        for i, s, new in zip(mine, parts, torch.split(value, [s.n for s in parts]), strict=True):
            done[i] = with_credit(s, actor=Credit(s.credits["actor"].weight, new))
    return done
