"""Token losses: (batch, log-probs [N] with gradient, values [N]) -> [N]. Numbers of sections are
those of methods.md.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rsipo_lightning.algorithms.base import Stream, TokenLoss
from rsipo_lightning.tokens import TokenBatch


def surrogate(clip_low: float, clip_high: float, dual: float) -> TokenLoss:
    """Clipped policy-gradient loss (1.6); value A. max(-A r, -A clip(r)), for A < 0 at most -A c;
    ``dual`` 0 is off.
    """

    def loss(batch: TokenBatch, logp: Tensor, value: Tensor) -> Tensor:
        assert batch.old_logprobs is not None
        ratio = (logp - batch.old_logprobs).exp()
        return _clipped(ratio, value, clip_low, clip_high, dual)

    return loss


def sequence_surrogate(clip_low: float, clip_high: float, dual: float) -> TokenLoss:
    """As ``surrogate``, with one ratio per response: s = exp(mean_t(l_theta - l_old)) (5.14)."""

    def loss(batch: TokenBatch, logp: Tensor, value: Tensor) -> Tensor:
        assert batch.old_logprobs is not None
        places = torch.stack([batch.row, batch.turn])
        _, response, count = torch.unique_consecutive(
            places, return_inverse=True, return_counts=True, dim=1
        )
        gap = torch.zeros_like(count, dtype=logp.dtype)
        gap = gap.index_add(0, response, logp - batch.old_logprobs) / count
        return _clipped(gap.exp()[response], value, clip_low, clip_high, dual)

    return loss


def _clipped(ratio: Tensor, value: Tensor, low: float, high: float, dual: float) -> Tensor:
    clipped = ratio.clamp(1 - low, 1 + high)
    pessimistic = torch.maximum(-value * ratio, -value * clipped)
    if not dual:
        return pessimistic
    return torch.where(value < 0, torch.minimum(pessimistic, -value * dual), pessimistic)


def k3_to_reference(batch: TokenBatch, logp: Tensor, value: Tensor) -> Tensor:
    """exp(x) - x - 1 with x = l_ref - l_theta, clamped to [-10, 10] (1.6)."""
    x = batch.scores["reference"] - logp
    return value * (x.exp() - x - 1).clamp(-10, 10)


def negative_entropy(batch: TokenBatch, logp: Tensor, value: Tensor) -> Tensor:
    """-H, so that a positive coefficient rewards entropy (1.6)."""
    assert batch.entropy is not None
    return -value * batch.entropy


def sigmoid_gate(beta: float, view: str = "teacher") -> Callable[[TokenBatch, Tensor], Tensor]:
    """g = sg sigma(beta (l_T - l_theta)) (5.9, 6.1), above 1/2 where the teacher is the surer."""

    def gate(batch: TokenBatch, logp: Tensor) -> Tensor:
        return torch.sigmoid(beta * (batch.scores[view] - logp.detach()))

    return gate


def gated_distillation(beta: float, view: str = "teacher") -> TokenLoss:
    """omega g (sg l_T - l_theta) (5.9, 6.1); value omega."""
    gate = sigmoid_gate(beta, view)

    def loss(batch: TokenBatch, logp: Tensor, value: Tensor) -> Tensor:
        return value * gate(batch, logp) * (batch.scores[view] - logp)

    return loss


def gated_stream(beta: float, coef: float) -> Stream:
    """lambda < omega g (sg l_T - l_theta) >, with its gate in the logs."""
    return Stream(gated_distillation(beta), coef, gate=sigmoid_gate(beta))


def reverse_kl(view: str = "teacher") -> TokenLoss:
    """-omega sg(l_T - l_theta) l_theta, the policy-gradient form of the reverse KL (5.6); value
    omega.
    """

    def loss(batch: TokenBatch, logp: Tensor, value: Tensor) -> Tensor:
        return -value * (batch.scores[view] - logp.detach()) * logp

    return loss


def importance_weighted_k3(view: str = "teacher") -> TokenLoss:
    """omega rho k3 with r = l_theta - sg l_T, k3 = exp(min(-r, 20)) - 1 + r and rho =
    exp(min(l_theta - l_old, 10)) (5.7); value omega. The gradient flows through rho too.
    """

    def loss(batch: TokenBatch, logp: Tensor, value: Tensor) -> Tensor:
        assert batch.old_logprobs is not None
        r = logp - batch.scores[view]
        k3 = (-r).clamp(max=20).exp() - 1 + r
        rho = (logp - batch.old_logprobs).clamp(max=10).exp()
        return value * rho * k3

    return loss


def reward_weighted_nll(batch: TokenBatch, logp: Tensor, value: Tensor) -> Tensor:
    """-r_x log pi(s_xj), the skill-writing loss (6.1); value r_x. With value 1: imitation."""
    return -value * logp
