"""Rows to be imitated, and the algorithm with one stream that imitates them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from rsipo_lightning.algorithms.base import Algorithm, AlgorithmConfig, Stream, Sums
from rsipo_lightning.algorithms.losses import reward_weighted_nll
from rsipo_lightning.codec import Codec
from rsipo_lightning.rng import keyed_random
from rsipo_lightning.skills import write_analysis
from rsipo_lightning.types import (
    Credit,
    Iteration,
    Message,
    Sample,
    Trajectory,
)


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids (L,) and the weight of each in the loss (L,); weight 0 is context."""

    ids: tuple[int, ...]
    weights: tuple[float, ...]


def sample(row: Row) -> Sample:
    """A training row; the first token is never trained."""
    weights = torch.tensor(row.weights)
    mask = weights > 0
    mask[0] = False
    n = int(mask.sum())
    return Sample(
        ids=torch.tensor(row.ids),
        mask=mask,
        turn=torch.zeros(n, dtype=torch.long),
        engine_logprobs=torch.full((n,), torch.nan),
        credits={"imitate": Credit(weights[mask], torch.ones(n))},
    )


def episode_rows(trajectory: Trajectory, action: float, observation: float = 0.0) -> Iterator[Row]:
    """Rows that imitate an episode: one, or one for each conversation of a window context.

    ``action`` is the weight of what was said, ``observation`` that of what the environment
    answered; a first message is context.
    """
    ids: tuple[int, ...] = ()
    weights: list[float] = []
    for turn in trajectory.turns:
        follows = ids and turn.prompt_ids[: len(ids)] == ids
        if ids and not follows:
            yield Row(ids, tuple(weights))
        shown = len(turn.prompt_ids) - (len(ids) if follows else 0)
        context = [observation] * shown if follows else [0.0] * shown
        weights = (weights if follows else []) + context + [action] * len(turn.completion.ids)
        ids = (*turn.prompt_ids, *turn.completion.ids)
    if ids:
        yield Row(ids, tuple(weights))


def skill_row(codec: Codec, asked: Sequence[Message], summary: str, skill: str) -> Row:
    """The analysis prompt as context, then the JSON of a skill and the end of the turn."""
    prompt = codec.chat(asked)
    said = (*codec.encode(write_analysis(summary, skill)), *codec.end_ids)
    return Row((*prompt, *said), (0.0,) * len(prompt) + (1.0,) * len(said))


def outcome(trajectory: Trajectory) -> str:
    """The scripted summary of an episode: ``"success after 3 turns"``."""
    return f"{'success' if trajectory.success else 'failure'} after {trajectory.steps} turns"


class Batches(Protocol):
    """Rows of an update: a function of its number alone, so that nothing has to be saved."""

    def batch(self, update: int) -> Sequence[Sample]: ...


class Epochs:
    """Passes over a fixed set of samples, each in an order of its own; the last batch is short."""

    def __init__(self, samples: Sequence[Sample], size: int, seed: int) -> None:
        self.samples, self.size, self.seed = samples, size, seed
        self.length = -(-len(samples) // size)  # updates of one epoch

    def batch(self, update: int) -> list[Sample]:
        """``size`` samples at most."""
        epoch, place = divmod(update, self.length)
        order = list(range(len(self.samples)))
        keyed_random(self.seed, "epoch", epoch).shuffle(order)
        return [self.samples[i] for i in order[place * self.size : (place + 1) * self.size]]


class Imitate(Algorithm[AlgorithmConfig]):
    """Negative log-likelihood of rows, weighted by token."""

    def __init__(self, batches: Batches) -> None:
        super().__init__(AlgorithmConfig(), 0)
        self.batches = batches

    @property
    def streams(self) -> dict[str, Stream]:
        return {"imitate": Stream(reward_weighted_nll)}

    def credit(self, it: Iteration, sums: Sums) -> list[Sample]:
        return list(self.batches.batch(it.update))
