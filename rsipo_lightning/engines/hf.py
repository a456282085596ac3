"""Generation in this process with the policy itself: batched, KV cache kept across turns, ids in
and ids out.
"""

from __future__ import annotations

from collections import Counter
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

BLOCK = 64  # tokens whose probabilities are added up first, see _sample


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
            self._grow(layer_idx, i, self.width)
            self.kv[layer_idx][i][rows, :, self.positions] = new.transpose(1, 2)
        keys, values = self.kv[layer_idx]
        return keys[:, :, : self.width], values[:, :, : self.width]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are always given explicitly; nothing may be inferred from here."""
        return 0

    def _grow(self, layer: int, i: int, width: int) -> None:
        """Room for so many slots; by half at least, so that decoding copies seldom."""
        old = self.kv[layer][i]
        if old.shape[2] < width:
            capacity = max(width, old.shape[2] * 3 // 2)
            grown = old.new_zeros(*old.shape[:2], capacity, old.shape[3])
            grown[:, :, : old.shape[2]] = old
            self.kv[layer][i] = grown

    def taken(self, rows: Sequence[int]) -> RaggedCache:
        """These rows, in this order (repeats allowed); a copy unless nothing changes."""
        if not self.kv or list(rows) == list(range(len(self.kv[0][0]))):
            return self
        index = torch.tensor(rows, device=self.kv[0][0].device)
        part = RaggedCache()
        part.kv = [[t.index_select(0, index) for t in layer] for layer in self.kv]
        return part

    def put_back(self, part: RaggedCache, rows: Sequence[int], first: int) -> None:
        """Take over the slots from ``first`` on of a copy of these rows."""
        index = torch.tensor(rows, device=self.kv[0][0].device)
        for k, layer in enumerate(part.kv):
            for i, new in enumerate(layer):
                self._grow(k, i, part.width)
                self.kv[k][i][index, :, first : part.width] = new[:, :, first : part.width]


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
        # tokens sampled, and rows that were run for a token although their turn had ended
        self.counts = Counter(tokens=0, idle=0)
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
        if any(start):
            self._cache = self._cache.taken([row for row, _ in known])
            return self._run([p.ids[s:] for p, s in zip(prompts, start, strict=True)], start)
        # nothing to reuse: run each distinct prompt once, the G rollouts of a task share it
        self._drop()
        first: dict[tuple[int, ...], int] = {}
        index = [first.setdefault(p.ids, len(first)) for p in prompts]
        hidden = self._run(list(first), [0] * len(first))
        self._cache = self._cache.taken(index)
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
        # what the next turns go on from; where there is none, what is done can be forgotten
        whole = self._cache if any(p.session for p in prompts) else None
        first = min(len(p.ids) for p in prompts)
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
            if 2 * sum(live) <= len(rows):  # copying them costs less than running the others
                going = [i for i, row in enumerate(rows) if live[row]]
                if whole is not None and whole is not self._cache:
                    whole.put_back(self._cache, rows, first)
                self._cache = self._cache.taken(going)
                rows = [rows[i] for i in going]
            self.counts["idle"] += len(rows) - sum(live)
            # a row that is done feeds its last token again at the same place, which changes nothing
            position = torch.tensor(
                [len(prompts[row].ids) + len(ids[row]) - 1 for row in rows], device=device
            )
            last = torch.tensor([ids[row][-1] for row in rows], device=device)
            width = max(width, int(position.max()) + 1)
            hidden = self._forward(last[:, None], position[:, None], width)[:, 0]
        if whole is not None and whole is not self._cache:
            whole.put_back(self._cache, rows, first)
            self._cache = whole
        self.counts["tokens"] += sum(map(len, ids))
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
    0) report T = 1. First the block of the vocabulary is drawn, then the token in it: float64 sums
    over all tokens would take most of a small policy's time.
    """
    count, size = logits.shape
    greedy = temperature == 0
    logp = torch.log_softmax(logits / torch.where(greedy, 1.0, temperature)[:, None], dim=-1)
    mass = torch.nn.functional.pad(logp.exp(), (0, -size % BLOCK)).view(count, -1, BLOCK)
    cdf = mass.sum(-1).double().cumsum(-1)  # [B, blocks]
    aim = (noise * cdf[:, -1])[:, None]
    block = torch.searchsorted(cdf, aim, right=True).clamp(max=cdf.shape[1] - 1)
    before = torch.nn.functional.pad(cdf, (1, 0)).gather(-1, block)
    share = (aim - before) / (cdf.gather(-1, block) - before)  # of the block's mass
    within = mass[torch.arange(count, device=mass.device), block[:, 0]].double().cumsum(-1)
    place = torch.searchsorted(within, share * within[:, -1:], right=True).clamp(max=BLOCK - 1)
    token = (block * BLOCK + place)[:, 0].clamp(max=size - 1)
    if greedy.any():
        token = torch.where(greedy, logits.argmax(-1), token)
    return token, logp.gather(-1, token[:, None]).squeeze(-1)
