"""The probe and the count of changed tensors, on copies of a policy. With vLLM: tests/vllm."""

from __future__ import annotations

import copy

import pytest
import torch

from rsipo_lightning.codec import Codec
from rsipo_lightning.config import ModelSection, RolloutSection, RunConfig
from rsipo_lightning.engines.hf import HFEngine
from rsipo_lightning.errors import EngineError
from rsipo_lightning.freshness import Sender
from rsipo_lightning.policy import Policy
from rsipo_lightning.rollout import Player
from rsipo_lightning.testing import byte_tokenizer, random_policy

TOKENIZER = byte_tokenizer(["who directed the film? search it"] * 9)
POLICY = random_policy(len(TOKENIZER), 3)


def sender(engine: HFEngine, config: RunConfig | None = None) -> Sender:
    return Sender(Player(None, engine, Codec(TOKENIZER)), config or RunConfig())  # type: ignore[arg-type]


def copied(policy: Policy) -> HFEngine:
    return HFEngine(copy.deepcopy(policy), TOKENIZER, own=False)


@torch.no_grad()
def learned() -> Policy:
    """The policy, a little later."""
    policy = copy.deepcopy(POLICY)
    for weight in policy.parameters():
        weight.mul_(1.02).add_(1e-3)
    return policy


def test_changed_tensors_are_counted_and_the_probe_passes() -> None:
    checked, policy = sender(copied(POLICY)), copy.deepcopy(POLICY)
    count = len(list(policy.parameters()))
    assert checked.send(policy, 0) is None  # nothing was sent before
    assert checked.send(policy, 1) == 0
    with torch.no_grad():
        next(iter(policy.parameters()))[3, 5] += 1e-6
    assert checked.send(policy, 2) == 1
    assert checked.send(learned(), 3) == count
    assert checked.engine.policy_version == 3


def test_an_engine_that_keeps_old_weights_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = copied(POLICY)
    checked = sender(engine)
    checked.send(POLICY, 0)
    monkeypatch.setattr(engine, "sync_weights", lambda weights, version: list(weights))
    with pytest.raises(EngineError, match=r"weights of version 1: log-probs .* is 0\.001\. Seen"):
        checked.send(learned(), 1)


def test_so_is_one_whose_numbers_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = copied(POLICY)
    monkeypatch.setattr(engine, "sync_weights", lambda weights, version: list(weights))
    broken = copy.deepcopy(POLICY)
    with torch.no_grad():
        next(iter(broken.parameters())).fill_(torch.nan)
    with pytest.raises(EngineError, match="differ by nan"):
        sender(engine).send(broken, 0)


def test_an_engine_that_is_the_policy_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = HFEngine(POLICY, TOKENIZER)
    monkeypatch.setattr(engine, "generate", lambda prompts: pytest.fail("asked"))
    assert sender(engine).send(POLICY, 5) is None
    assert engine.policy_version == 5


def test_a_short_context_and_bfloat16() -> None:
    """The prompt fits; three digits are enough."""
    config = RunConfig(
        rollout=RolloutSection(context=40, max_new_tokens=8), model=ModelSection(dtype="bfloat16")
    )
    policy = copy.deepcopy(POLICY)
    policy.to(torch.bfloat16)
    checked = sender(copied(policy), config)
    assert len(checked._prompt.ids) == 32
    checked.send(policy, 0)
