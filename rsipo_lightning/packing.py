"""Rows of different lengths as one flat row: no padding, and common beginnings are run once.

A causal model's states at a token depend on what stands before it alone, so rows that begin alike
(the rollouts of a task, the turns of a history window) share the states of their common beginning,
and their gradients meet there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rsipo_lightning.tokens import shared

NAME = "packed"  # of the attention, in a model's config


@dataclass(frozen=True, slots=True)
class Packed:
    """T tokens of R rows, each behind those of the row before it that are not in that row too.

    Example: rows [1 2 3 4] and [1 2 5], whose last tokens alone are trained, are ids [1 2 3], with
    positions [0 1 2]: nothing is asked of the states of a row's last token.
    """

    ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, in the row
    trained: Tensor  # [N] int64, index in T of the token before each trained one, row after row
    keys: list[int]  # [R] tokens of a row
    queries: list[int]  # [R] how many of them ask, the last ones
    key_places: Tensor  # [sum(keys)] where they are in T
    query_places: Tensor  # [sum(queries)]
    answers: Tensor  # [T] which of the queries stands for a token


def pack(ids: Tensor, mask: Tensor) -> Packed:
    """Of padded rows [B, L] and their trained tokens [B, L] bool (never True at 0).

    Without any trained token it is the first token of the first row.
    """
    table, trained = ids.cpu().numpy(), mask.cpu().numpy()
    ends = [int(row.nonzero()[0][-1]) if row.any() else 0 for row in trained]
    if not any(ends):
        ends[0] = 1
    rows = [tuple(row[:end].tolist()) for row, end in zip(table, ends, strict=True)]
    order = sorted(range(len(rows)), key=rows.__getitem__)
    flat: list[int] = []
    positions, paths, asking, answers = [], [], [], []
    places: list[Any] = [()] * len(rows)
    path, asked = np.arange(0), 0
    for i, common in zip(order, shared([rows[i] for i in order]), strict=True):
        new = len(rows[i]) - common
        path = np.concatenate([path[:common], np.arange(len(flat), len(flat) + new)])
        flat += rows[i][common:]
        places[i] = path[trained[i].nonzero()[0] - 1]
        if not new:
            continue
        positions.append(np.arange(common, len(path)))
        paths.append(path)
        # Causal kernels want as many queries as keys. Where most are new that is less work than a
        # mask, though the others' answers are there already.
        asking.append(path if 2 * new > len(path) else path[common:])
        asked += len(asking[-1])
        answers.append(np.arange(asked - new, asked))

    def tensor(parts: Sequence[Any]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(ids.device)

    return Packed(
        ids=torch.tensor(flat, device=ids.device),
        positions=tensor(positions),
        trained=tensor(places),
        keys=[len(path) for path in paths],
        queries=[len(path) for path in asking],
        key_places=tensor(paths),
        query_places=tensor(asking),
        answers=tensor(answers),
    )


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: Packed | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of a Hugging Face layer, [1, heads, T, dim] -> [1, T, heads, dim].

    Without ``packed`` it is the one that they know as sdpa.
    """
    if packed is None:
        kwargs["sliding_window"] = sliding_window
        plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return plain
    if sliding_window is not None:
        raise NotImplementedError("sliding windows in packed rows")
    rows = zip(
        _rows(query, packed.query_places, packed.queries),
        _rows(key, packed.key_places, packed.keys),
        _rows(value, packed.key_places, packed.keys),
        strict=True,
    )
    done = [_attend(q, k, v, scaling).transpose(1, 2) for q, k, v in rows]
    return torch.cat(done, 1).index_select(1, packed.answers), None


def _rows(x: Tensor, places: Tensor, lengths: list[int]) -> tuple[Tensor, ...]:
    """[1, heads, T, dim] -> [1, heads, length, dim] of each row."""
    return x.transpose(1, 2).index_select(1, places).transpose(1, 2).split_with_sizes(lengths, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, scaling: float | None) -> Tensor:
    """The last tokens of a row ask all of its tokens up to themselves."""
    asking, asked, repeats = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    if asking == asked:
        return scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=repeats > 1
        )
    k, v = repeat_kv(k, repeats), repeat_kv(v, repeats)  # fast kernels want it with a mask
    seen = torch.ones(asking, asked, dtype=torch.bool, device=q.device).tril(asked - asking)
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling)


def can_pack(model: PreTrainedModel) -> bool:
    """Whether all layers see all tokens before theirs, by an attention that ``attend`` replaces.

    If so it does from now on.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if not hasattr(config, "layer_types") and getattr(config, "sliding_window", None):
        return False
    if kinds != {"full_attention"} or config._attn_implementation not in ("sdpa", NAME):
        return False
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    return True
