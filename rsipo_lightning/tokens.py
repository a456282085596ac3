"""Trajectories -> training rows -> batches. Per-token values are packed to the N sampled tokens,
row after row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from rsipo_lightning.types import (
    Completion,
    Credit,
    Role,
    Sample,
    TeacherView,
    Trajectory,
    WrittenSkill,
)

T = TypeVar("T")


def rows(trajectory: Trajectory) -> list[Sample]:
    """Training rows of a trajectory, each sampled token in exactly one.

    A turn whose prompt starts with everything before it joins the row; otherwise (history windows,
    templates that re-render) it starts a new one. Example: prompts [1 2], [1 2 | 7 8 | 3] with
    samples [7 8], [9]
    make one row ids [1 2 7 8 3 9], mask [F F T T F T], turn [0 0 1].
    """
    done: list[_Row] = []
    role = Role.REPLAY if trajectory.skill else Role.STUDENT
    episode = f"{trajectory.task.id}/{role}/{trajectory.index}"
    for k, turn in enumerate(trajectory.turns):
        if not done or turn.prompt_ids[: len(done[-1].ids)] != tuple(done[-1].ids):
            done.append(_Row(turn.anchor, episode))
        done[-1].add(k, turn.prompt_ids, turn.completion)
    return [row.sample() for row in done if row.turn]


def skill_row(skill: WrittenSkill) -> Sample:
    """The row of a written skill: its prompt, then its sampled tokens (end token included)."""
    row = _Row()
    row.add(0, skill.prompt_ids, skill.completion)
    return row.sample()


class _Row:
    def __init__(self, anchor: int = 0, episode: str = "") -> None:
        self.anchor, self.episode = anchor, episode
        self.ids: list[int] = []
        self.mask: list[bool] = []
        self.turn: list[int] = []
        self.logprobs: list[float] = []
        self.temperature = 1.0

    def add(self, k: int, prompt: Sequence[int], completion: Completion) -> None:
        context = prompt[len(self.ids) :]
        self.ids += [*context, *completion.ids]
        self.mask += [False] * len(context) + [True] * len(completion.ids)
        self.turn += [k] * len(completion.ids)
        self.logprobs += completion.logprobs
        self.temperature = completion.temperature

    def sample(self) -> Sample:
        return Sample(
            ids=torch.tensor(self.ids),
            mask=torch.tensor(self.mask),
            turn=torch.tensor(self.turn, dtype=torch.long),
            engine_logprobs=torch.tensor(self.logprobs, dtype=torch.float32),
            temperature=self.temperature,
            anchor=self.anchor,
            episode=self.episode,
        )


def with_skill(sample: Sample, section: Sequence[int], at: int | None = None) -> TeacherView:
    """The whole row with a section inserted, at its anchor or at an index of its ids; every other
    id stays as it is.
    """
    at = sample.anchor if at is None else at
    ids = torch.cat([sample.ids[:at], torch.tensor(section, dtype=torch.long), sample.ids[at:]])
    mask = torch.cat(
        [sample.mask[:at], torch.zeros(len(section), dtype=torch.bool), sample.mask[at:]]
    )
    return TeacherView(ids=ids, mask=mask, index=torch.arange(sample.n))


def places(sample: Sample) -> Tensor:
    """[N] where in ``ids`` the sampled tokens are."""
    return sample.mask.nonzero().flatten()


def narrowed(view: TeacherView, keep: Tensor) -> TeacherView:
    """A view that scores only those of its tokens where ``keep`` [M] is True.

    Ids behind the last of them are dropped: nothing that is scored depends on them.
    """
    at = view.mask.nonzero().flatten()[keep]
    end = int(at[-1]) + 1 if len(at) else 0
    mask = torch.zeros_like(view.mask).index_fill(0, at, True)
    return TeacherView(ids=view.ids[:end], mask=mask[:end], index=view.index[keep])


def constant(sample: Sample, weight: float, value: float) -> Credit:
    """The same weight and value for all N tokens."""
    return Credit(torch.full((sample.n,), float(weight)), torch.full((sample.n,), float(value)))


def with_credit(sample: Sample, **credits: Credit) -> Sample:
    """A copy with these streams added."""
    return replace(sample, credits={**sample.credits, **credits})


@dataclass
class TokenBatch:
    """Rows of one forward. Only ids and mask are padded (on the right); N counts the tokens of all
    rows.
    """

    ids: Tensor  # [B, L] int64
    mask: Tensor  # [B, L] bool
    row: Tensor  # [N] int64
    turn: Tensor  # [N] int64
    engine_logprobs: Tensor  # [N] float32, NaN where no engine has sampled the token
    temperature: Tensor  # [N] float32
    credits: Mapping[str, Credit]  # {stream: [N], [N]}; weight 0 where a row has no such stream
    scores: Mapping[
        str, Tensor
    ]  # {name: [N]} no-grad log-probs; NaN where a row has none, until the forward is done
    entropy: Tensor | None = None  # [N], filled by the forward
    old_logprobs: Tensor | None = None  # [N], filled by the forward: pi_old of this update
    importance: Tensor | None = None  # [N], filled by the forward: see ``importance``


def pad(
    ids: Sequence[Tensor], masks: Sequence[Tensor], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Ragged rows -> [B, L] ids (0 behind the end) and mask (False behind the end)."""
    padded = torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence(list(masks), batch_first=True)
    return padded.to(device), mask.to(device)


def collate(samples: Sequence[Sample], device: torch.device) -> TokenBatch:
    """Samples -> TokenBatch; everything but ids and mask is float32 whatever the policy's dtype."""
    ids, mask = pad([s.ids for s in samples], [s.mask for s in samples], device)

    def packed(get: Iterable[Tensor]) -> Tensor:
        return torch.cat(list(get)).to(device)

    streams = sorted({name for s in samples for name in s.credits})
    names = sorted({name for s in samples for name in s.scores})
    empty = {id(s): constant(s, 0.0, 0.0) for s in samples}
    unknown = {id(s): torch.full((s.n,), torch.nan) for s in samples}
    return TokenBatch(
        ids=ids,
        mask=mask,
        row=packed(torch.full((s.n,), i) for i, s in enumerate(samples)),
        turn=packed(s.turn for s in samples),
        engine_logprobs=packed(s.engine_logprobs for s in samples),
        temperature=packed(torch.full((s.n,), s.temperature) for s in samples),
        credits={
            name: Credit(
                packed(s.credits.get(name, empty[id(s)]).weight for s in samples),
                packed(s.credits.get(name, empty[id(s)]).value for s in samples),
            )
            for name in streams
        },
        scores={
            name: packed(s.scores.get(name, unknown[id(s)]) for s in samples) for name in names
        },
    )


SAME = 1e-4  # nats: log-probs of engine and trainer that are equal up to rounding in float32


def importance(old: Tensor, engine: Tensor, cap: float) -> Tensor:
    """min(pi_old / pi_engine, cap) of each token, from log-probs [N]; exactly 1 where they are the
    same or no engine has sampled the token (methods.md 12, pitfall 2). ``cap`` 0: 1.
    """
    gap = old - engine
    differs = gap.abs() > SAME  # not where it is NaN
    return torch.where(differs & (cap > 0), gap.exp().clamp(max=cap), 1.0)


def null_sample() -> Sample:
    """One token of weight 0: a real forward for a rank that has nothing, since ZeRO-3's gathers are
    collective.
    """
    return Sample(
        ids=torch.zeros(2, dtype=torch.long),
        mask=torch.tensor([False, True]),
        turn=torch.zeros(1, dtype=torch.long),
        engine_logprobs=torch.zeros(1),
    )


def shared(rows: Sequence[Sequence[int]]) -> list[int]:
    """How many tokens each row has in common with the beginning of the one before it.

    >>> shared([(1, 2, 3), (1, 2, 4), (1, 2)])
    [0, 2, 2]
    """
    found = [0] * min(len(rows), 1)
    for before, row in pairwise(rows):
        pairs = enumerate(zip(before, row, strict=False))
        found.append(next((i for i, (a, b) in pairs if a != b), min(len(before), len(row))))
    return found


def split(
    items: Sequence[T],
    ids: Sequence[Tensor],
    masks: Sequence[Tensor],
    parts: int,
    packed: bool = True,
) -> list[list[T]]:
    """Exactly ``parts`` lists (some may be empty) of similar work, by the row of each item: tokens
    that are run, and trained ones, which meet the vocabulary.

    Rows that are packed stay with those that begin alike, whose common tokens are run once; others
    with those of similar length.
    """
    rows = [tuple(x.tolist()) for x in ids]
    order = sorted(range(len(rows)), key=lambda i: rows[i] if packed else len(rows[i]))
    common = shared([rows[i] for i in order]) if packed else [0] * len(order)
    work = [len(rows[i]) - n + int(masks[i].sum()) for i, n in zip(order, common, strict=True)]
    total, filled, done = sum(work), 0, [[] for _ in range(parts)]  # type: tuple[int, int, list[list[T]]]
    for i, n in zip(order, work, strict=True):
        done[min(parts - 1, (filled + n // 2) * parts // max(total, 1))].append(items[i])
        filled += n
    return done
