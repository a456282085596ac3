"""Packed rows against rows that are run alone."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rsipo_lightning.packing import pack
from rsipo_lightning.policy import Policy
from rsipo_lightning.tokens import pad, shared, split

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
KINDS = {"qwen2": (Qwen2ForCausalLM, Qwen2Config), "qwen3": (Qwen3ForCausalLM, Qwen3Config)}
CPU = torch.device("cpu")


def policy(kind: str = "qwen2", **keys: object) -> Policy:
    torch.manual_seed(0)
    model, config = KINDS[kind]
    own = {"head_dim": 16} if kind == "qwen3" else {}
    return Policy(model(config(**{**SHAPE, **own, **keys})))


def row(text: list[int], trained: list[int]) -> tuple[Tensor, Tensor]:
    mask = torch.zeros(len(text), dtype=torch.bool)
    mask[trained] = True
    return torch.tensor(text), mask


OPENING = list(range(1, 20))
ROWS = [
    row([*OPENING, 30, 31, 32], [20, 21]),
    row([9, 8, 7, 6, 5], [1, 3]),
    row([*OPENING, 30, 31, 33], [19, 20, 21]),  # a long common beginning, then another token
    row([*OPENING, 30], [19]),  # what it asks for is all in the rows above
    row([*OPENING, 30], [19]),
    row([1, 2, *range(40, 49)], [6, 10]),  # a short one
    row([*OPENING, 44, 45, 46], []),  # nothing to train
    row([4, 5], [1]),
]


def results(p: Policy, rows: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Log-probs, entropies and the gradient of rows in one forward."""
    ids, mask = pad([x for x, _ in rows], [m for _, m in rows], CPU)
    n = int(mask.sum())
    p.zero_grad()
    logp, entropy = p(ids, mask, torch.linspace(0.5, 1.5, n), True)
    (logp * torch.linspace(-1, 2, n)).sum().backward()
    return [logp.detach(), entropy.detach(), *(x.grad for x in p.parameters())]  # type: ignore[misc]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recompute", [False, True])
def test_packed_rows_are_rows_alone(kind: str, recompute: bool) -> None:
    p = policy(kind)
    p = Policy(p.model, recompute)
    assert p.packs
    packed = results(p, ROWS)
    p.packs = False
    for one, other in zip(packed, results(p, ROWS), strict=True):
        assert float((one - other).abs().max()) < 1e-5 * max(float(other.abs().max()), 1)


def test_order_of_rows_is_kept() -> None:
    """Whatever the order in which they are run."""
    p = policy()
    counts = [int(m.sum()) for _, m in ROWS]
    ids, mask = pad([x for x, _ in ROWS], [m for _, m in ROWS], CPU)
    with torch.no_grad():
        together = p(ids, mask, torch.ones(sum(counts)))[0].split(counts)
        for (x, m), found in zip(ROWS, together, strict=True):
            if m.any():
                alone = p(x[None], m[None], torch.ones(int(m.sum())))[0]
                assert torch.allclose(found, alone, atol=1e-5)


def test_what_rows_begin_with_is_run_once() -> None:
    ids, mask = pad([x for x, _ in ROWS], [m for _, m in ROWS], CPU)
    packed = pack(ids, mask)
    # 19 and 30, 31; then 40..47 behind 1, 2; 9 8 7; 4
    assert len(packed.ids) == 21 + 8 + 3 + 1
    assert len(packed.trained) == int(mask.sum())
    before = packed.ids[packed.trained]
    assert torch.equal(before, ids[:, :-1][mask[:, 1:]])
    assert packed.keys == [19, 21, 10, 1, 3]  # rows that have nothing of their own ask nothing
    alone = [pack(x[None], m[None]) for x, m in ROWS if m.any()]
    assert [len(p.ids) for p in alone] == [21, 3, 21, 19, 19, 10, 1]


def test_shared_beginnings() -> None:
    rows = sorted([(1, 2, 3), (1, 2), (), (1, 3), (1, 2, 3, 4)])
    assert shared(rows) == [0, 0, 2, 3, 1]
    for (a, b), n in zip(pairwise(rows), shared(rows)[1:], strict=True):
        assert a[:n] == b[:n]
        assert a[n : n + 1] != b[n : n + 1]
    assert shared([]) == []


def test_rows_that_begin_alike_are_split_together() -> None:
    """And parts are balanced by the tokens that are run."""

    def lengths(rows: list[Tensor], parts: int, packed: bool = True) -> list[list[int]]:
        masks = [torch.zeros(len(x), dtype=torch.bool) for x in rows]
        return [[len(x) for x in part] for part in split(rows, rows, masks, parts, packed)]

    alike = [torch.tensor([1, *range(40), 50 + i]) for i in range(9)]
    other = [torch.arange(2, 42), torch.arange(3, 14)]
    assert lengths([*alike[:5], *other, *alike[5:]], 2) == [[42] * 9, [40, 11]]
    assert lengths([torch.arange(n) for n in (9, 1, 5, 3)], 2, packed=False) == [[1, 3, 5], [9]]
    assert lengths([], 3) == [[], [], []]


def test_layers_that_see_a_window_only_are_not_packed() -> None:
    p = policy(use_sliding_window=True, sliding_window=8, max_window_layers=0)
    assert not p.packs
    assert results(p, ROWS)[0].isfinite().all()


def test_layers_that_do_not_hand_on_what_packing_needs_are_not_packed() -> None:
    """Else all tokens would see one another, and nobody would notice."""
    model = policy().model
    body = model.get_decoder()
    forward = body.forward
    body.forward = lambda *args, packed=None, **kwargs: forward(*args, **kwargs)
    assert not Policy(model).packs

    def refuses(*args: Any, **kwargs: Any) -> Any:
        if "packed" in kwargs:
            raise TypeError("unexpected keyword argument 'packed'")
        return forward(*args, **kwargs)

    body.forward = refuses
    assert not Policy(model).packs
    body.forward = forward
    assert Policy(model).packs


def test_rows_without_trained_tokens_are_a_forward() -> None:
    """Of one token: ranks of ZeRO-3 wait for one another."""
    p = policy()
    logp, _ = p(
        torch.ones(2, 3, dtype=torch.long), torch.zeros(2, 3, dtype=torch.bool), torch.ones(0)
    )
    assert logp.shape == (0,)
