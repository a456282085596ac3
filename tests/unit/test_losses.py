"""Gradients of the token losses against their closed forms (methods.md 13 a)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rsipo_lightning.algorithms.base import TokenLoss
from rsipo_lightning.algorithms.credit import group_advantages
from rsipo_lightning.algorithms.losses import (
    gated_distillation,
    importance_weighted_k3,
    k3_to_reference,
    negative_entropy,
    reverse_kl,
    reward_weighted_nll,
    sequence_surrogate,
    surrogate,
)
from rsipo_lightning.tokens import TokenBatch

N = 5
TEACHER = torch.tensor([-0.5, -1.0, -3.0, -0.1, -2.0])


def batch(old: Tensor) -> TokenBatch:
    index = torch.arange(N)
    return TokenBatch(
        ids=index[None],
        mask=index[None] > 0,
        row=index * 0,
        turn=index * 0,
        engine_logprobs=old,
        temperature=torch.ones(N),
        credits={},
        scores={"teacher": TEACHER, "reference": TEACHER},
        entropy=torch.full((N,), 0.7),
        old_logprobs=old,
    )


def gradient(
    loss: TokenLoss, value: Tensor, old: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    logp = torch.tensor([-1.0, -1.2, -0.3, -2.0, -0.9], requires_grad=True)
    old = logp.detach() if old is None else old
    out = loss(batch(old), logp, value)
    out.sum().backward()
    assert logp.grad is not None
    return out.detach(), logp.grad, logp.detach()


OMEGA = torch.tensor([1.0, 0.5, 2.0, 0.0, 1.3])


def test_gated_distillation() -> None:
    """Gradient -omega g: only the gate's value depends on the teacher, and nothing flows through
    it.
    """
    out, grad, logp = gradient(gated_distillation(5.0), OMEGA)
    gate = torch.sigmoid(5 * (TEACHER - logp))
    assert torch.allclose(grad, -OMEGA * gate)
    assert torch.allclose(out, OMEGA * gate * (TEACHER - logp))


def test_reverse_kl() -> None:
    """Gradient -omega (l_T - l): pulls down what the teacher finds unlikely."""
    _, grad, logp = gradient(reverse_kl(), OMEGA)
    assert torch.allclose(grad, -OMEGA * (TEACHER - logp))


def test_gate_of_the_released_code_is_blind() -> None:
    """Beta 0: gradient -omega / 2, whatever the teacher says."""
    _, grad, _ = gradient(gated_distillation(0.0), OMEGA)
    assert torch.equal(grad, -OMEGA / 2)


@pytest.mark.parametrize("moved", [0.0, 0.7])
def test_importance_weighted_k3(moved: float) -> None:
    """Gradient omega rho (k3 + 1 - exp(-r)): through r and through rho."""
    logp = torch.tensor([-1.0, -1.2, -0.3, -2.0, -0.9])
    out, grad, _ = gradient(importance_weighted_k3(), OMEGA, logp - moved)
    r, rho = logp - TEACHER, torch.tensor(moved).exp()
    k3 = (-r).exp() - 1 + r
    assert torch.allclose(out, OMEGA * rho * k3, atol=1e-6)
    assert torch.allclose(grad, OMEGA * rho * (k3 + 1 - (-r).exp()), atol=1e-6)


def test_importance_weighted_k3_is_clamped() -> None:
    """A token 30 nats likelier for the teacher, and a ratio of e^40: finite, no gradient there."""
    b = batch(torch.tensor([-1.0, -41.0, -1.0, -1.0, -1.0]))
    b.scores = {"teacher": torch.tensor([29.0, -1.0, -1.0, -1.0, -1.0])}
    logp = torch.full((N,), -1.0, requires_grad=True)
    importance_weighted_k3()(b, logp, torch.ones(N)).sum().backward()
    assert logp.grad is not None
    # r = -30: rho = 1, k3' = 1, rho' k3 = exp(20) - 1 - 30; r = 0: all is 0
    expected = torch.tensor([20.0]).exp() - 1 - 30 + 1
    assert torch.allclose(logp.grad[:1], expected)
    assert logp.grad[1:].tolist() == [0.0] * 4


def test_one_ratio_for_a_response() -> None:
    """Turns of 2 and 3 tokens, mean gaps log 1.0002 and log 2: gradient -A s / n for each token of
    a response, times its n equal weights; nothing where it is clipped.
    """
    logp = torch.tensor([-1.0, -1.2, -0.3, -2.0, -0.9], requires_grad=True)
    gap = torch.tensor([1.0002, 1.0002, 2.0, 2.0, 2.0]).log()
    gap = gap + torch.tensor([0.3, -0.3, 0.5, -0.1, -0.4])  # only the mean of a response counts
    b = batch((logp - gap).detach())
    b.turn = torch.tensor([0, 0, 1, 1, 1])
    value = torch.tensor([2.0, 2.0, 1.0, 1.0, 1.0])
    out = sequence_surrogate(3e-4, 4e-4, 3.0)(b, logp, value)
    out.sum().backward()
    assert torch.allclose(out, -torch.tensor([2.0004, 2.0004, 1.0004, 1.0004, 1.0004]))
    assert logp.grad is not None
    assert torch.allclose(logp.grad, torch.tensor([-2.0004, -2.0004, 0.0, 0.0, 0.0]))
    b.row = torch.tensor([0, 1, 1, 1, 1])  # the same turn of two rows: two responses
    b.turn = torch.zeros(N, dtype=torch.long)
    split = sequence_surrogate(0.9, 9.0, 0.0)(b, logp.detach(), torch.ones(N))
    assert split[0] == pytest.approx(-float(gap[0].exp()))
    assert torch.allclose(split[1:], -gap[1:].mean().exp().expand(4))


def test_k3() -> None:
    """Gradient 1 - exp(l_ref - l)."""
    out, grad, logp = gradient(k3_to_reference, torch.ones(N))
    x = TEACHER - logp
    assert torch.allclose(out, x.exp() - x - 1)
    assert torch.allclose(grad, 1 - x.exp())


def test_skill_writing() -> None:
    _, grad, _ = gradient(reward_weighted_nll, OMEGA)
    assert torch.equal(grad, -OMEGA)


def test_entropy_is_rewarded() -> None:
    entropy = torch.full((N,), 0.7, requires_grad=True)
    b = batch(TEACHER)
    b.entropy = entropy
    negative_entropy(b, TEACHER, torch.ones(N)).sum().backward()
    assert torch.equal(entropy.grad, -torch.ones(N))  # type: ignore[arg-type]


def test_on_policy_surrogate_is_the_policy_gradient() -> None:
    value = torch.tensor([1.0, -1.0, 0.5, 0.0, -2.0])
    out, grad, _ = gradient(surrogate(0.2, 0.2, 3.0), value)
    assert torch.allclose(grad, -value)
    assert torch.allclose(out, -value)


def test_clipping() -> None:
    """Ratio 1.5: no gradient for A > 0, full for A < 0; ratio 5 with A < 0: the dual clip holds at
    3.
    """
    logp = torch.tensor([-1.0, -1.2, -0.3, -2.0, -0.9])
    old = logp - torch.tensor([1.5, 1.5, 0.5, 5.0, 1.0]).log()
    value = torch.tensor([1.0, -1.0, -1.0, -1.0, 2.0])
    out, grad, _ = gradient(surrogate(0.2, 0.2, 3.0), value, old)
    assert torch.allclose(grad, torch.tensor([0.0, 1.5, 0.0, 0.0, -2.0]))
    assert torch.allclose(out, torch.tensor([-1.2, 1.5, 0.8, 3.0, -2.0]))
    out, grad, _ = gradient(surrogate(0.2, 0.2, 0.0), value, old)
    assert float(out[3]) == pytest.approx(5.0)


def test_advantages_of_lesson_1() -> None:
    """Turn-level bias: statistics over trajectories, not over their steps."""
    steps = [5, 8, 50, 50]
    right = group_advantages([1, 1, 0, 0], steps)
    assert right == pytest.approx([0.866, 0.866, -0.866, -0.866], abs=1e-3)
    assert group_advantages([1, 1, 0, 0], [1, 1, 1, 1]) == right
    parity = group_advantages([1, 1, 0, 0], steps, stats="steps")
    assert parity == pytest.approx([2.76, 2.76, -0.36, -0.36], abs=5e-3)


def test_degenerate_groups() -> None:
    assert group_advantages([1.0] * 4, [1] * 4) == [0.0] * 4
    assert group_advantages([0.7], [3]) == pytest.approx([0.7], abs=1e-5)
    assert group_advantages([], []) == []
    assert group_advantages([2.0, 0.0], [1, 1], norm="mean") == [1.0, -1.0]
