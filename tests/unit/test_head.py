"""Blocks of the vocabulary against the whole matrix."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rsipo_lightning import head
from rsipo_lightning.head import columns, log_probs

V, D, N = 1000, 16, 40


def whole(
    layer: nn.Linear, hidden: Tensor, target: Tensor, temperature: Tensor, train_entropy: bool
) -> tuple[Tensor, Tensor]:
    """The definition, with all logits at once."""
    logp = torch.log_softmax(layer(hidden).float() / temperature[:, None], dim=-1)
    entropy = -(logp.exp() * logp).sum(-1)
    chosen = logp.gather(-1, target[:, None]).squeeze(-1)
    return chosen, entropy if train_entropy else entropy.detach()


def made(compute: Any, dtype: torch.dtype, bias: bool, train_entropy: bool) -> list[Tensor]:
    """Log-probs, entropies and the gradients of states, weight and bias."""
    torch.manual_seed(0)
    layer = nn.Linear(D, V, bias=bias, dtype=dtype)
    layer.weight.data *= 8  # some tokens are nearly sure
    hidden = torch.randn(N, D, dtype=dtype, requires_grad=True)
    target, temperature = torch.randint(V, (N,)), torch.rand(N) + 0.5
    chosen, entropy = compute(layer, hidden, target, temperature, train_entropy)
    loss = (chosen * torch.randn(N)).sum()
    if train_entropy:
        loss = loss + (entropy * torch.randn(N)).sum()
    loss.backward()
    assert hidden.grad is not None
    return [chosen, entropy, hidden.grad, *(p.grad for p in layer.parameters())]  # type: ignore[list-item]


@pytest.fixture(params=["one block", "kept", "some kept", "computed again"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "one block":
        return
    monkeypatch.setattr(head, "NARROWEST", 1)
    monkeypatch.setattr(head, "BLOCK", 300 * N)
    assert [x.stop - x.start for x in columns(N, V)] == [250] * 4
    rooms = {"kept": 4, "some kept": 2, "computed again": 0}
    monkeypatch.setattr(head, "KEPT", rooms[request.param] * 250 * N * 4)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("train_entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_the_whole_matrix(dtype: torch.dtype, train_entropy: bool, bias: bool) -> None:
    one, other = (made(f, dtype, bias, train_entropy) for f in (log_probs, whole))
    assert [x.dtype for x in one] == [torch.float32] * 2 + [dtype] * (3 if bias else 2)
    gradient = 1e-5 if dtype is torch.float32 else 2e-2  # bfloat16 has three digits
    for i, (x, y) in enumerate((x.detach(), y.detach()) for x, y in zip(one, other, strict=True)):
        scale = float(y.abs().max()) if i > 1 else 1.0
        assert float((x - y).abs().max()) < scale * (gradient if i > 1 else 1e-5), i
    assert one[1].requires_grad == train_entropy


@pytest.mark.usefixtures("blocks")
def test_what_is_nearly_sure_has_no_negative_entropy() -> None:
    layer = nn.Linear(D, V, bias=False)
    layer.weight.data[3] = 5.0
    hidden, ones = torch.ones(N, D), torch.ones(N)
    chosen, entropy = log_probs(layer, hidden, torch.full((N,), 3), ones, False)
    assert -1e-6 < float(chosen.max()) <= 0
    assert 0 <= float(entropy.min()) < 1e-6


def test_the_head_is_called_and_left_as_it_was() -> None:
    """ZeRO-3 fetches a module's weights when it is called."""
    layer, calls = nn.Linear(D, V), []
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    args = (torch.randn(2, D), torch.tensor([0, 1]), torch.ones(2), False)
    log_probs(layer, *args)
    assert calls == [1]
    assert layer(args[0]).shape == (2, V)
    with pytest.raises(IndexError):
        log_probs(layer, *args[:2], torch.tensor(1.0), False)
    assert layer(args[0]).shape == (2, V)


def test_memory_of_a_large_vocabulary_is_bounded() -> None:
    """1,024 tokens of a vocabulary of 152k: under 400 MiB, where one matrix takes 594."""
    tokens, vocab = 1024, 151_936
    widest = max(x.stop - x.start for x in columns(tokens, vocab))
    assert head.KEPT + 13 * tokens * widest < 400 * 2**20 < 4 * tokens * vocab
