"""The embedded engine against plain forwards of the same model."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from rsipo_lightning.codec import Codec
from rsipo_lightning.engines.hf import HFEngine, _sample
from rsipo_lightning.freshness import log_probs
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
    return log_probs(engine.policy, prompt, completion)


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


def uneven(count: int) -> list[Prompt]:
    """Every fourth says 64 tokens, the others 8."""
    return [
        replace(p, max_new_tokens=64 if i % 4 == 0 else 8, stop_ids=())
        for i, p in enumerate(prompts(count))
    ]


@pytest.mark.parametrize("going_on", [False, True])
def test_what_is_done_leaves_the_batch(
    engine: HFEngine, monkeypatch: pytest.MonkeyPatch, going_on: bool
) -> None:
    """Same samples as alone, and half-empty batches are not run; a counter says so."""
    asked = [p if going_on else replace(p, session="") for p in uneven(16)]
    alone = [engine.generate([p])[0] for p in asked]
    sizes: list[int] = []
    forward = engine._forward

    def counted(ids: torch.Tensor, positions: torch.Tensor, width: int) -> torch.Tensor:
        sizes.append(len(ids))
        return forward(ids, positions, width)

    monkeypatch.setattr(engine, "_forward", counted)
    engine.counts.clear()
    together = engine.generate(asked)
    assert [c.ids for c in together] == [c.ids for c in alone]
    for one, other in zip(together, alone, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert sizes == [9, *[16] * 7, *[4] * 56]  # distinct prompts, then a step for each token
    assert engine.counts == {"tokens": 4 * 64 + 12 * 8, "idle": 0}


def test_what_left_the_batch_goes_on_from_its_cache(engine: HFEngine) -> None:
    """Rows that were taken out in two steps, and those that stayed, in a second turn."""
    asked = [replace(p, max_new_tokens=4 + 12 * (i % 4)) for i, p in enumerate(uneven(16))]
    done = engine.generate(asked)
    assert engine.counts["idle"] == 4 * 12  # the first quarter, until half were done
    more = [
        replace(p, ids=CODEC.extend(p.ids + c.ids, "seen"), seed=100 + p.seed)
        for p, c in zip(asked, done, strict=True)
    ]
    cached = [row for row, ids in engine._sessions.values() if ids]
    assert cached == list(range(16))
    for p, c in zip(more, engine.generate(more), strict=True):
        assert torch.allclose(rescored(engine, p, c), torch.tensor(c.logprobs), atol=1e-5)


@pytest.mark.parametrize("size", [5, 64, 200])
def test_tokens_are_those_of_the_whole_distribution(size: int) -> None:
    """Drawn by blocks, as by one sum over all tokens."""
    torch.manual_seed(0)
    logits, noise = 4 * torch.randn(3000, size), torch.rand(3000, dtype=torch.float64)
    noise[0], noise[1] = 0.0, 1 - 2**-53
    temperature = torch.tensor([1.0, 0.5, 0.0]).repeat(1000)
    token, logp = _sample(logits, temperature, noise)
    scaled = torch.log_softmax(logits / temperature.where(temperature > 0, 1.0)[:, None], dim=-1)
    cdf = scaled.double().exp().cumsum(-1)
    plain = torch.searchsorted(cdf, (noise * cdf[:, -1])[:, None], right=True)[:, 0]
    plain = logits.argmax(-1).where(temperature == 0, plain)
    assert torch.equal(token, plain)
    assert torch.equal(logp, scaled.gather(-1, token[:, None])[:, 0])


def test_nothing_to_do(engine: HFEngine) -> None:
    assert engine.generate([]) == []


def test_a_copy_takes_over_the_weights() -> None:
    """As where the policy itself is split over ranks."""
    policy, copied = (random_policy(len(TOKENIZER), seed, scale=0.1) for seed in (3, 4))
    engine = HFEngine(copied, TOKENIZER)
    (p,) = prompts(1)
    (before,) = engine.generate([p])
    engine.sync_weights(policy.model.named_parameters(), 7)
    (after,) = engine.generate([p])
    (own,) = HFEngine(policy, TOKENIZER).generate([p])
    assert before.ids != after.ids == own.ids
    assert after.logprobs == own.logprobs
    assert after.policy_version == 7
