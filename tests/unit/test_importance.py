"""Token-level truncated importance sampling, where the engine's log-probs are not the trainer's."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rsipo_lightning import registry
from rsipo_lightning.algorithms.base import Algorithm
from rsipo_lightning.config import RolloutSection
from rsipo_lightning.errors import ConfigError
from rsipo_lightning.module import PolicyModule
from rsipo_lightning.testing import gradient, make_algorithm, toy_world
from rsipo_lightning.tokens import importance
from rsipo_lightning.types import Sample

WORLD = toy_world()
NAMES = [n for n in registry.names("algorithms") if make_algorithm(n, WORLD.codec).streams]
SHIFT = 0.5


def made(algorithm: Algorithm[Any], cap: float) -> tuple[PolicyModule, list[Sample]]:
    m = WORLD.module(algorithm, WORLD.iteration(algorithm))
    m.run_config.rollout.importance_cap = cap
    return m, m.samples(m.iteration)


def shifted(samples: list[Sample], by: float) -> list[Sample]:
    """As if the engine had found every token so much likelier than the trainer does."""
    return [replace(s, engine_logprobs=s.engine_logprobs + by) for s in samples]


def test_a_weight_by_hand() -> None:
    nan, old = math.nan, torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0])
    engine = torch.tensor([-1.0 - math.log(1.5), -1.0 - math.log(3.0), -0.5, -1.00009, nan])
    found = importance(old, engine, 2.0)
    assert torch.allclose(found, torch.tensor([1.5, 2.0, math.exp(-0.5), 1.0, 1.0]))
    assert (found[3:] == 1).all()  # within 1e-4, and not sampled by an engine
    assert (importance(old, engine, 0.0) == 1).all()


@pytest.mark.parametrize("name", NAMES)
def test_an_exact_engine_changes_no_bit(name: str) -> None:
    """The engine hf in float32 agrees to rounding: every method trains as with the key off."""
    algorithm = make_algorithm(name, WORLD.codec)
    (m, samples), (off, _) = made(algorithm, 2.0), made(algorithm, 0.0)
    assert torch.equal(gradient(m, samples, 2), gradient(off, samples, 2))
    found = m.iteration.metrics.reduce()
    assert found["policy/importance_mean"] == 1
    assert found["policy/importance_truncated_frac"] == 0
    assert "policy/importance_mean" not in off.iteration.metrics.reduce()


@pytest.mark.parametrize("name", NAMES)
def test_each_term_of_sampled_tokens_is_weighted(name: str) -> None:
    """A shift of all tokens scales each term by exp(-shift); entropies stay, whatever was sampled.

    The weight is no part of the denominator: with it, nothing would change.
    """
    keys = {"kl": 0.1, "entropy": 0.01, "distill": 0.3, "skill": 0.5}
    known = vars(make_algorithm(name).config)
    algorithm = make_algorithm(name, WORLD.codec, **{k: x for k, x in keys.items() if k in known})
    m, samples = made(algorithm, 2.0)
    streams = m.streams
    for stream in streams:
        m.streams = {stream: streams[stream]}
        plain, weighted = (gradient(m, rows, 2) for rows in (samples, shifted(samples, SHIFT)))
        factor = 1.0 if stream == "entropy" else math.exp(-SHIFT)
        # the k3 to the reference is 0 here but for the reference's own weights
        assert torch.allclose(weighted, factor * plain, rtol=1e-3, atol=1e-5 * plain.abs().max())


def test_weights_are_truncated_and_said() -> None:
    algorithm = make_algorithm("grpo", WORLD.codec, kl=0, entropy=0)
    m, samples = made(algorithm, 2.0)
    plain = gradient(m, samples, 1)
    m.iteration.metrics = type(m.iteration.metrics)()
    assert torch.allclose(gradient(m, shifted(samples, -3.0), 1), 2 * plain, rtol=1e-4, atol=1e-6)
    found = m.iteration.metrics.reduce()
    assert found["policy/importance_mean"] == 2
    assert found["policy/importance_truncated_frac"] == 1
    assert found["policy/mismatch_max"] == pytest.approx(3.0, abs=1e-3)


def test_tokens_that_no_engine_has_sampled_have_weight_1() -> None:
    algorithm = make_algorithm("grpo", WORLD.codec)
    m, samples = made(algorithm, 2.0)
    unknown = [replace(s, engine_logprobs=torch.full((s.n,), math.nan)) for s in samples]
    expected = gradient(m, samples, 2)
    m.iteration.metrics = type(m.iteration.metrics)()
    assert torch.equal(gradient(m, unknown, 2), expected)
    found = m.iteration.metrics.reduce()
    assert not any("mismatch" in key or "importance" in key for key in found)


def test_the_weight_carries_no_gradient() -> None:
    """With several steps of an update it stays that of the policy before the first one."""
    algorithm = make_algorithm("grpo", WORLD.codec, kl=0, entropy=0)
    m, _ = made(algorithm, 2.0)
    m.run_config.trainer.minibatches = 2
    samples = shifted(m.samples(m.iteration), SHIFT)
    once: Tensor = gradient(m, samples, 1)
    m.run_config.rollout.importance_cap = 0.0
    assert torch.allclose(once, math.exp(-SHIFT) * gradient(m, samples, 1), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("cap", [-1.0, 0.5, math.nan])
def test_a_cap_below_1_is_refused(cap: float) -> None:
    with pytest.raises(ConfigError, match="importance_cap="):
        RolloutSection(importance_cap=cap)
