"""The policy's forward."""

import pytest
import torch
from torch import Tensor

from rsipo_lightning.codec import Codec
from rsipo_lightning.engines.hf import HFEngine
from rsipo_lightning.errors import ConfigError
from rsipo_lightning.policy import Policy
from rsipo_lightning.testing import byte_tokenizer, random_policy
from rsipo_lightning.types import Prompt


def gradient(policy: Policy) -> Tensor:
    ids = torch.arange(24).reshape(2, 12)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, 5:] = True
    policy.zero_grad()
    logp, _ = policy(ids, mask, torch.ones(14))
    logp.sum().backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


def test_recomputed_layers_change_no_gradient_and_no_sample() -> None:
    tokenizer = byte_tokenizer()
    plain, recomputed = (random_policy(len(tokenizer), 3) for _ in range(2))
    recomputed = Policy(recomputed.model, recompute=True)
    calls = []
    recomputed.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    assert torch.equal(gradient(plain), gradient(recomputed))
    assert len(calls) == 2  # forward, and once more in the backward pass
    assert not any(module.training for module in recomputed.modules())
    prompt = Prompt(tuple(range(9)), 12, 1.0, 0, Codec(tokenizer).stop_ids)
    one, other = (HFEngine(p, tokenizer).generate([prompt])[0] for p in (plain, recomputed))
    assert (one.ids, one.logprobs) == (other.ids, other.logprobs)


def test_layers_that_would_drop_out_are_not_recomputed() -> None:
    model = random_policy(64).model
    model.model.layers[0].dropout = 0.1
    with pytest.raises(ConfigError, match="gradient_checkpointing=true: not supported by Qwen2"):
        Policy(model, recompute=True)
