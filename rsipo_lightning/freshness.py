"""The engine gets the policy's weights, and a probe shows that it generates with them.

What is looked for has happened to others without a word: a cache kept from older weights, a tied
head that was never sent, log-probs at another temperature than the samples'. Each of them moves the
probe's log-probs by .1 to 5 (tests/vllm); between two right float32 engines 1e-5 was seen at most.
Weights that are one step of 1e-6 old move them less: ``engine/changed_count`` says that they were
sent, the engine's ``policy_version`` that it took them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from rsipo_lightning.config import RunConfig
from rsipo_lightning.errors import EngineError
from rsipo_lightning.metrics import gather
from rsipo_lightning.policy import Policy
from rsipo_lightning.rng import keyed_random
from rsipo_lightning.rollout import Player
from rsipo_lightning.sharding import acting_weights
from rsipo_lightning.types import Completion, Prompt

LENGTH = 272  # tokens: two blocks of the largest kind that vLLM caches by (128), and a rest
NEW = 8  # tokens that are sampled
TEMPERATURE = 2.0  # log-probs that leave it out are off
# Of the mean difference of NEW log-probs: 100 times what float32 gave, and 6 times what bfloat16
# gave, with the tiny policy on a CPU (1e-5, .008).
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}


class Sender:
    """Keeps the weights of a player's engine those of the policy."""

    def __init__(self, player: Player, config: RunConfig) -> None:
        self.engine = player.engine
        self._tokenizer = player.codec.tokenizer
        self._length = max(1, min(LENGTH, config.rollout.context - NEW))
        given = getattr(config.engine, "tolerance", 0.0)
        self._tolerance = given or TOLERANCE[config.model.dtype]
        self._sums: list[int] = []  # of the weights as they were sent last

    def send(self, policy: Policy, version: int) -> int | None:
        """Give the engine the policy's weights. Collective over the ranks.

        Number of tensors that differ from those sent before; None the first time, and where the
        engine generates with the policy's own. EngineError if a probe tells engine and policy
        apart.
        """
        weights = acting_weights(policy.model)
        if self.engine.own:
            self.engine.sync_weights(weights, version)
            return None
        sums: list[Tensor] = []
        self.engine.sync_weights(_summed(weights, sums), version)
        gather(None)  # where ranks share an engine, none asks before it has the weights
        self._probe(policy, version)
        before, self._sums = self._sums, torch.stack(sums).tolist()
        if not before:
            return None
        return sum(old != new for old, new in zip(before, self._sums, strict=True))

    @cached_property
    def _prompt(self) -> Prompt:
        """Always the same, so that a cache that was kept is met."""
        special = set(self._tokenizer.all_special_ids)
        words = [i for i in range(len(self._tokenizer)) if i not in special]
        ids = tuple(keyed_random("probe").choices(words, k=self._length))
        return Prompt(ids, NEW, TEMPERATURE, seed=0)

    def _probe(self, policy: Policy, version: int) -> None:
        (said,) = self.engine.generate([self._prompt])
        gap = float(
            (log_probs(policy, self._prompt, said) - torch.tensor(said.logprobs)).abs().mean()
        )
        if not gap <= self._tolerance:  # nor if it is no number
            raise EngineError(
                f"the engine does not generate with the policy's weights of version {version}: "
                f"log-probs of a probe differ by {gap:.2g}, engine.tolerance is "
                f"{self._tolerance:g}. Seen before: a cache kept from older weights, a weight that "
                "is not sent (a tied head, LoRA), another temperature, another run's server"
            )


@torch.no_grad()
def log_probs(policy: Policy, prompt: Prompt, said: Completion) -> Tensor:
    """Of the sampled tokens, [A], by one forward. Collective under ZeRO-3."""
    ids = torch.tensor([prompt.ids + said.ids], device=policy.device)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[0, len(prompt.ids) :] = True
    temperature = torch.full((len(said.ids),), said.temperature, device=policy.device)
    logp: Tensor = policy(ids, mask, temperature)[0]
    return logp.cpu()


def _summed(
    weights: Iterator[tuple[str, Tensor]], sums: list[Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The same; ``sums`` gets the sum of each weight's bits, taken as whole numbers."""
    for name, weight in weights:
        bits = weight.detach().view(torch.int32 if weight.element_size() == 4 else torch.int16)
        sums.append(bits.sum(dtype=torch.int64))
        yield name, weight
