"""Log-probs and entropies of chosen tokens, in blocks of the vocabulary.

The [N, V] matrix of all logits never exists, nor does its gradient. A block's logits are kept for
the backward pass while there is room for them, and computed once more where there is none.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

KEPT = 1 << 28  # bytes of logits that may wait for the backward pass
BLOCK = 1 << 23  # logits of a block, which are copied to float32 two times
NARROWEST = 1 << 10  # columns of a block at least, however many tokens there are


def log_probs(
    head: nn.Linear, hidden: Tensor, target: Tensor, temperature: Tensor, train_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Of softmax(head(hidden) / temperature): log-probs of the targets, and entropies.

    hidden [N, D], target [N] int64, temperature [N] -> two float32 tensors [N], nats. The entropies
    have gradients only with ``train_entropy``. The head is called as a module, so that what hangs
    on its forward (ZeRO-3 fetches weights there) happens.
    """
    kept = KEPT if torch.is_grad_enabled() else 0

    def forward(hidden: Tensor) -> Any:
        return _LogProbs.apply(  # type: ignore[no-untyped-call]
            hidden, head.weight, head.bias, target, temperature, train_entropy, kept
        )

    head.forward = forward  # type: ignore[method-assign, assignment]
    try:
        found: tuple[Tensor, Tensor] = head(hidden)
    finally:
        del head.forward
    return found


def parts(tokens: int, vocab: int) -> int:
    """How many blocks there are."""
    return -(-vocab // max(BLOCK // max(tokens, 1), NARROWEST))


def columns(tokens: int, vocab: int) -> list[slice]:
    """Blocks of the vocabulary, of the same width up to one column."""
    count = parts(tokens, vocab)
    edges = [vocab * i // count for i in range(count + 1)]
    return [slice(begin, end) for begin, end in pairwise(edges)]


class _LogProbs(torch.autograd.Function):
    """With q = log softmax(z), z = logits / T: dq_y/dz = 1_y - p and dH/dz = -p (q + H)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        temperature: Tensor,
        train_entropy: bool,
        room: int,
    ) -> tuple[Tensor, Tensor]:
        blocks = columns(len(hidden), len(weight))
        chosen = hidden.new_zeros(len(hidden), dtype=torch.float32)
        stats, ctx.kept = [], []
        for at in blocks:
            logits = _logits(hidden, weight, bias, at)
            if room >= logits.nbytes:
                room -= logits.nbytes
                ctx.kept.append(logits)
            z = logits.float() / temperature[:, None]
            inside, place = _inside(target, at)
            chosen = torch.where(inside, z.gather(1, place).squeeze(1), chosen)
            top = z.amax(1)
            share = z.sub_(top[:, None]).exp()
            stats.append((top, share.sum(1), share.mul_(z).sum(1)))
        tops, sums, dots = (torch.stack(x) for x in zip(*stats, strict=True))
        top = tops.amax(0)
        scale = (tops - top).exp()
        log_sum = (scale * sums).sum(0).log()
        mean = (scale * (dots + sums * (tops - top))).sum(0) / log_sum.exp()  # of z - top
        entropy = log_sum - mean
        ctx.train_entropy = train_entropy
        if not train_entropy:
            ctx.mark_non_differentiable(entropy)
        ctx.save_for_backward(hidden, weight, bias, target, temperature, top, log_sum, entropy)
        return chosen - top - log_sum, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_chosen: Tensor, of_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, temperature, top, log_sum, entropy = ctx.saved_tensors
        needs = ctx.needs_input_grad
        of_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs[0] else None
        of_weight = torch.empty_like(weight) if needs[1] else None
        of_bias = torch.empty_like(bias) if needs[2] else None
        of_chosen = of_chosen / temperature
        of_entropy = of_entropy / temperature
        kept = ctx.kept[::-1]
        ctx.kept = []
        for at in columns(len(hidden), len(weight)):
            logits = kept.pop() if kept else _logits(hidden, weight, bias, at)
            q = (logits.float() / temperature[:, None]).sub_(top[:, None]).sub_(log_sum[:, None])
            del logits
            if ctx.train_entropy:
                grad = q.exp()
                factor = q.add_(entropy[:, None]).mul_(of_entropy[:, None])
                grad.mul_(factor.add_(of_chosen[:, None]).neg_())
                del factor
            else:
                grad = q.exp_().mul_(-of_chosen[:, None])
            del q
            inside, place = _inside(target, at)
            grad.scatter_add_(1, place, torch.where(inside, of_chosen, 0.0)[:, None])
            grad = grad.to(weight.dtype)
            if of_hidden is not None:
                of_hidden += grad @ weight[at]
            if of_weight is not None:
                torch.mm(grad.T, hidden, out=of_weight[at])
            if of_bias is not None:
                torch.sum(grad, 0, out=of_bias[at])
        if of_hidden is not None:
            of_hidden = of_hidden.to(hidden.dtype)
        return of_hidden, of_weight, of_bias, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, at: slice) -> Tensor:
    """[N, W] of one block, as the head computes them."""
    return linear(hidden, weight[at], bias if bias is None else bias[at])


def _inside(target: Tensor, at: slice) -> tuple[Tensor, Tensor]:
    """[N] whether a target is in this block, and [N, 1] its column there (0 if not)."""
    inside = (target >= at.start) & (target < at.stop)
    return inside, torch.where(inside, target - at.start, 0)[:, None]
