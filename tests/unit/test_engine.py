"""The embedded engine against plain forwards of the same model."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from rsipo_lightning.codec import Codec
from rsipo_lightning.engines.hf import HFEngine
from rsipo_lightning.testing import byte_tokenizer, random_policy
from rsipo_lightning.types import Completion, Prompt

TOKENIZER = byte_tokenizer(["where was the director of the film born? search it"] * 9)
CODEC = Codec(TOKENIZER)


@pytest.fixture
def engine() -> HFEngine:
    return HFEngine(random_policy(len(TOKENIZER), 3, scale=0.1), TOKENIZER)


def prompts(count: int, temperature: float = 1.0, tokens: int = 12) -> list[Prompt]:
    rng = random.Random(0)
    texts = [f"Your question: {'abc ' * rng.randint(1, 9)}?" for _ in range(count)]
    return [
        Prompt(CODEC.start(t)[0], tokens + i % 4, temperature, i, CODEC.stop_ids, (), f"s{i}")
        for i, t in enumerate(texts)
    ]


def rescored(engine: HFEngine, prompt: Prompt, completion: Completion) -> torch.Tensor:
    """Log-probs of the same ids in one fresh forward."""
    ids = torch.tensor([prompt.ids + completion.ids])
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[0, len(prompt.ids) :] = True
    with torch.no_grad():
        return engine.policy(ids, mask, torch.full((len(completion.ids),), completion.temperature))[
            0
        ]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_ragged_turns_with_kept_cache_agree_with_fresh_forwards(
    engine: HFEngine, temperature: float
) -> None:
    """Lessons cases 2 and 6: eight turns, ids bit for bit, log-probs within 1e-5 at every
    temperature.
    """
    rng = random.Random(1)
    live = prompts(12, temperature)
    for turn in range(8):
        done = engine.generate(live)
        for p, c in zip(live, done, strict=True):
            assert len(c.ids) == len(c.logprobs) > 0
            assert c.temperature == (temperature or 1.0)
            assert torch.allclose(rescored(engine, p, c), torch.tensor(c.logprobs), atol=1e-5)
        live = [
            replace(
                p, ids=CODEC.extend(p.ids + c.ids, "seen " * rng.randint(1, 6)), seed=100 * turn + i
            )
            for i, (p, c) in enumerate(zip(live, done, strict=True))
        ]
        del live[::5]  # episodes end, others close up


def test_greedy_takes_the_likeliest_token(engine: HFEngine) -> None:
    (p,) = prompts(1, temperature=0.0)
    (c,) = engine.generate([p])
    ids = list(p.ids)
    for token in c.ids:
        with torch.no_grad():
            assert int(engine.policy.model(torch.tensor([ids])).logits[0, -1].argmax()) == token
        ids.append(token)


def test_noise_does_not_depend_on_the_batch(engine: HFEngine) -> None:
    """Settled 9: alone, in a batch and in another order the same seed gives the same tokens."""
    many = prompts(9)
    together = engine.generate(many)
    alone = [engine.generate([replace(p, session="")])[0] for p in many]
    backwards = engine.generate([replace(p, session="") for p in reversed(many)])[::-1]
    assert [c.ids for c in together] == [c.ids for c in alone] == [c.ids for c in backwards]
    other = engine.generate([replace(p, seed=p.seed + 1000, session="") for p in many])
    assert [c.ids for c in other] != [c.ids for c in together]


def test_samples_follow_the_distribution(engine: HFEngine) -> None:
    """5,000 first tokens: the observed mean log-prob is minus the entropy within four standard
    errors.
    """
    (p,) = prompts(1)
    done = engine.generate([replace(p, seed=i, max_new_tokens=1, session="") for i in range(5000)])
    with torch.no_grad():
        logp = torch.log_softmax(engine.policy.model(torch.tensor([p.ids])).logits[0, -1], -1)
    entropy = float(-(logp.exp() * logp).sum())
    spread = float((logp.exp() * (logp + entropy) ** 2).sum()) ** 0.5
    mean = sum(c.logprobs[0] for c in done) / len(done)
    assert mean == pytest.approx(-entropy, abs=4 * spread / 5000**0.5)


def test_stops(engine: HFEngine) -> None:
    (p,) = prompts(1, tokens=40)
    (c,) = engine.generate([p])
    text = TOKENIZER.decode(c.ids[:6])
    (cut,) = engine.generate([replace(p, stop=(text[2:5],))])
    assert not cut.truncated
    assert text[2:5] in cut.text
    assert cut.ids == c.ids[: len(cut.ids)]
    assert text[2:5] not in TOKENIZER.decode(
        cut.ids[:-1]
    )  # the token that completed it is the last
    (short,) = engine.generate([replace(p, max_new_tokens=2)])
    assert short.truncated
    assert short.ids == c.ids[:2]
    (ended,) = engine.generate([replace(p, stop_ids=(c.ids[3],))])
    assert ended.ids == c.ids[: c.ids.index(c.ids[3]) + 1]


def test_new_weights_after_sync_and_version(engine: HFEngine) -> None:
    """Lessons case 7: a kept cache of old weights is never used after a sync."""
    (p,) = prompts(1)
    (c,) = engine.generate([p])
    assert c.policy_version == 0
    with torch.no_grad():
        for w in engine.policy.parameters():
            w.add_(0.1 * torch.randn_like(w))
    engine.sync_weights(engine.policy.model.named_parameters(), 1)
    longer = replace(p, ids=CODEC.extend(p.ids + c.ids, "seen"))
    (c,) = engine.generate([longer])
    assert c.policy_version == 1
    assert torch.allclose(rescored(engine, longer, c), torch.tensor(c.logprobs), atol=1e-5)


def test_stale_cache_would_be_seen(engine: HFEngine) -> None:
    """The check above can fail: without the sync the old cache gives other log-probs."""
    (p,) = prompts(1)
    (c,) = engine.generate([p])
    with torch.no_grad():
        for w in engine.policy.parameters():
            w.add_(0.1 * torch.randn_like(w))
    longer = replace(p, ids=CODEC.extend(p.ids + c.ids, "seen"))
    (c,) = engine.generate([longer])
    assert not torch.allclose(rescored(engine, longer, c), torch.tensor(c.logprobs), atol=1e-3)


def test_grouped_prompts_are_run_once(engine: HFEngine) -> None:
    """The G rollouts of a task share their first prefill."""
    seen: list[int] = []
    run = engine._forward

    def counted(ids: torch.Tensor, positions: torch.Tensor, width: int) -> torch.Tensor:
        seen.append(ids.shape[0])
        return run(ids, positions, width)

    engine._forward = counted  # type: ignore[method-assign]
    (p,) = prompts(1)
    done = engine.generate([replace(p, seed=i, session=f"x{i}") for i in range(8)])
    assert seen[0] == 1
    for i, c in enumerate(done):
        assert torch.allclose(
            rescored(engine, replace(p, seed=i), c), torch.tensor(c.logprobs), atol=1e-5
        )


def test_what_is_done_leaves_the_batch_where_nobody_goes_on(
    engine: HFEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Skills: same samples as with kept caches, and half-empty batches are not run."""
    asked = [
        replace(p, max_new_tokens=64 if i % 4 == 0 else 8, stop_ids=())
        for i, p in enumerate(prompts(16))
    ]
    kept = engine.generate(asked)
    sizes: list[int] = []
    forward = engine._forward

    def counted(ids: torch.Tensor, positions: torch.Tensor, width: int) -> torch.Tensor:
        sizes.append(len(ids))
        return forward(ids, positions, width)

    monkeypatch.setattr(engine, "_forward", counted)
    alone = engine.generate([replace(p, session="") for p in asked])
    assert [c.ids for c in alone] == [c.ids for c in kept]
    for one, other in zip(alone, kept, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert sizes == [9, *[16] * 7, *[4] * 56]  # distinct prompts, then a step for each token


def test_nothing_to_do(engine: HFEngine) -> None:
    assert engine.generate([]) == []
