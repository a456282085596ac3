"""Generation in this process with the policy itself: batched, KV cache kept across turns, ids in
and ids out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedTokenizerBase

from rsipo_lightning.errors import EngineError
from rsipo_lightning.policy import Policy
from rsipo_lightning.protocols import Host
from rsipo_lightning.types import Completion, Prompt


@dataclass
class HFConfig:
    """The embedded engine has no keys."""


class RaggedCache(Cache):
    """Keys and values as [rows, heads, capacity, dim] per layer; slot j of a row holds position j.

    Rows have different lengths and nothing is ever moved: a token is written at its own position,
    and a query at position p sees the slots up to p. What lies behind a row's end is stale and
    never visible.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.kv: list[list[Tensor]] = []  # per layer [keys, values]
        self.positions = torch.empty(0, 0, dtype=torch.long)  # [B, Q] of the forward in progress
        self.width = 0  # slots that this forward may see

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [B, heads, Q, dim] at ``positions`` and return all visible slots."""
        if layer_idx == len(self.kv):
            shape = (key_states.shape[0], key_states.shape[1], 0)
            self.kv.append(
                [key_states.new_empty(*shape, t.shape[-1]) for t in (key_states, value_states)]
            )
        rows = torch.arange(key_states.shape[0], device=key_states.device)[:, None]
        for i, new in enumerate((key_states, value_states)):
            old = self.kv[layer_idx][i]
            if old.shape[2] < self.width:  # grow by half, so that decoding copies seldom
                grown = old.new_zeros(
                    *old.shape[:2], max(self.width, old.shape[2] * 3 // 2), old.shape[3]
                )
                grown[:, :, : old.shape[2]] = old
                self.kv[layer_idx][i] = old = grown
            old[rows, :, self.positions] = new.transpose(1, 2)
        keys, values = self.kv[layer_idx]
        return keys[:, :, : self.width], values[:, :, : self.width]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are always given explicitly; nothing may be inferred from here."""
        return 0

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order (repeats allowed)."""
        self.kv = [[t.index_select(0, rows) for t in layer] for layer in self.kv]


class HFEngine:
    """``Engine`` over a Hugging Face model in this process.

    The model is the trained policy itself, so syncing means raising the version and dropping the
    cache; or a whole copy of a policy that is split over ranks, which then takes over the weights.
    So generating needs no other rank.
    """

    Config = HFConfig

    def __init__(
        self, policy: Policy, tokenizer: PreTrainedTokenizerBase, own: bool = True
    ) -> None:
        """``own``: ``policy`` is the one that is trained, not a copy of it."""
        self.policy = policy
        self.tokenizer = tokenizer
        self.own = own
        self.policy_version = 0
        self._pieces: dict[int, str] = {}
        self._drop()

    @classmethod
    def of(cls, config: HFConfig, host: Host) -> HFEngine:
        """On this rank's device."""
        policy = host.whole()
        return cls(policy, host.tokenizer, policy is host.policy)

    def _drop(self) -> None:
        self._cache = RaggedCache()
        self._sessions: dict[
            str, tuple[int, tuple[int, ...]]
        ] = {}  # session -> (row, ids whose KV is stored)

    def sync_weights(
        self, weights: Iterable[tuple[str, Tensor]] | Iterator[tuple[str, Tensor]], version: int
    ) -> None:
        """Weights that are the engine's own already are left as they are."""
        if self.policy.adapted:  # only the trained policy is; copies have merged weights
            weights = ()
        own = dict(self.policy.model.named_parameters())
        with torch.no_grad():
            for name, value in weights:
                if own[name] is not value:
                    own[name].copy_(value)
        self.policy_version = version
        self._drop()

    def rest(self) -> None:
        """The cache is kept; it is dropped with the weights."""

    def close(self) -> None:
        """Free the cache."""
        self._drop()

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt]) -> list[Completion]:
        """Continue each prompt; same order. Sessions that are not in the call lose their cache."""
        if not prompts:
            return []
        try:
            return self._decode(prompts, self._prefill(prompts))
        except torch.OutOfMemoryError as error:
            raise EngineError(
                f"hf engine: out of memory with {len(prompts)} prompts; lower rollout.live"
            ) from error

    def _prefill(self, prompts: Sequence[Prompt]) -> Tensor:
        """Run what is not cached of each prompt; hidden states [B, D] at the last token of each."""
        known = [self._sessions.get(p.session, (0, ())) for p in prompts]  # (row, ids)
        start = [
            min(len(ids), len(p.ids) - 1) if p.ids[: len(ids)] == ids else 0
            for (_, ids), p in zip(known, prompts, strict=True)
        ]
        device = self.policy.device
        if any(start):
            self._cache.select(torch.tensor([row for row, _ in known], device=device))
            return self._run([p.ids[s:] for p, s in zip(prompts, start, strict=True)], start)
        # nothing to reuse: run each distinct prompt once, the G rollouts of a task share it
        self._drop()
        first: dict[tuple[int, ...], int] = {}
        index = torch.tensor([first.setdefault(p.ids, len(first)) for p in prompts], device=device)
        hidden = self._run(list(first), [0] * len(first))
        self._cache.select(index)
        return hidden[index]

    def _run(self, chunks: Sequence[tuple[int, ...]], start: Sequence[int]) -> Tensor:
        """Forward of ragged chunks that begin at ``start``; hidden states [B, D] at the last token
        of each chunk.
        """
        device = self.policy.device
        lengths = torch.tensor([len(c) for c in chunks], device=device)
        longest = int(lengths.max())
        ids = torch.tensor([c + (0,) * (longest - len(c)) for c in chunks], device=device)
        # padding writes behind the row's end, where later tokens overwrite it before anything looks
        # there
        positions = torch.tensor(start, device=device)[:, None] + torch.arange(
            longest, device=device
        )
        hidden = self._forward(ids, positions, int(positions.max()) + 1)
        return hidden[torch.arange(len(chunks), device=device), lengths - 1]

    def _forward(self, ids: Tensor, positions: Tensor, width: int) -> Tensor:
        self._cache.positions, self._cache.width = positions, width
        visible = torch.arange(width, device=ids.device) <= positions[:, None, :, None]
        if (
            self.policy.model.config._attn_implementation == "eager"
        ):  # eager attention adds its mask
            visible = torch.zeros_like(visible, dtype=self.policy.model.dtype).masked_fill(
                ~visible, float("-inf")
            )
        return self.policy.hidden(
            ids,
            attention_mask=visible,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
        )

    def _decode(self, prompts: Sequence[Prompt], hidden: Tensor) -> list[Completion]:
        device, count = self.policy.device, len(prompts)
        budget = max(p.max_new_tokens for p in prompts)
        noise = torch.stack([_uniforms(p, budget) for p in prompts]).to(device)
        temperature = torch.tensor([p.temperature for p in prompts], device=device)
        position = torch.tensor([len(p.ids) - 1 for p in prompts], device=device)
        ids: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        tails = [""] * count
        live = [True] * count
        stopped = [False] * count
        width = int(position.max()) + 1
        rows = list(range(count))  # those that are run
        ends = not any(p.session for p in prompts)  # nobody goes on from the cache
        for step in range(budget):
            token, logp = _sample(self.policy.logits(hidden), temperature[rows], noise[rows, step])
            for row, t, lp in zip(rows, token.tolist(), logp.tolist(), strict=True):
                if not live[row]:
                    continue
                prompt = prompts[row]
                ids[row].append(t)
                logprobs[row].append(lp)
                tails[row] = tails[row][-64:] + self._piece(t)
                stopped[row] = t in prompt.stop_ids or any(s in tails[row] for s in prompt.stop)
                live[row] = not stopped[row] and len(ids[row]) < prompt.max_new_tokens
            if not any(live):
                break
            if ends and 2 * sum(live) <= len(rows):
                kept = [i for i, row in enumerate(rows) if live[row]]
                self._cache.select(torch.tensor(kept, device=device))
                rows = [rows[i] for i in kept]
            # a row that is done feeds its last token again at the same place, which changes nothing
            position = torch.tensor(
                [len(prompts[row].ids) + len(ids[row]) - 1 for row in rows], device=device
            )
            last = torch.tensor([ids[row][-1] for row in rows], device=device)
            width = max(width, int(position.max()) + 1)
            hidden = self._forward(last[:, None], position[:, None], width)[:, 0]
        self._sessions = {
            p.session: (row, p.ids + tuple(ids[row][:-1]))
            for row, p in enumerate(prompts)
            if p.session
        }
        return [
            Completion(
                ids=tuple(ids[row]),
                logprobs=tuple(logprobs[row]),
                text=self._text(ids[row]),
                truncated=not stopped[row],
                policy_version=self.policy_version,
                temperature=prompts[row].temperature or 1.0,
            )
            for row in range(count)
        ]

    def _piece(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = self._text([token], special=True)
        return self._pieces[token]

    def _text(self, ids: list[int], special: bool = False) -> str:
        text = self.tokenizer.decode(ids, skip_special_tokens=not special)
        assert isinstance(text, str)  # a list only for a list of lists
        return text


def _uniforms(prompt: Prompt, count: int) -> Tensor:
    """The turn's own noise: a function of ``prompt.seed`` alone."""
    return torch.rand(
        count, generator=torch.Generator().manual_seed(prompt.seed), dtype=torch.float64
    )


def _sample(logits: Tensor, temperature: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse-CDF sampling of [B, V] logits with one uniform [B] each; tokens and log-probs [B].

    The log-prob is that of softmax(logits / T), the distribution that was sampled; greedy rows (T =
    0) report T = 1.
    """
    greedy = temperature == 0
    logp = torch.log_softmax(logits / torch.where(greedy, 1.0, temperature)[:, None], dim=-1)
    cdf = logp.double().exp().cumsum(-1)
    drawn = torch.searchsorted(cdf, (noise * cdf[:, -1])[:, None], right=True).squeeze(-1)
    token = torch.where(greedy, logits.argmax(-1), drawn.clamp(max=logits.shape[-1] - 1))
    return token, logp.gather(-1, token[:, None]).squeeze(-1)
