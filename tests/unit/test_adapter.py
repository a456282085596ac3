"""LoRA on one device: what is trained, acts, scores and is written. Shares: tests/ranks."""

from __future__ import annotations

import copy
from importlib import util
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from rsipo_lightning import adapter
from rsipo_lightning.adapter import adapter_layers, attach, factors, plain_name, switched_off
from rsipo_lightning.config import LoraSection
from rsipo_lightning.engines.hf import HFEngine
from rsipo_lightning.errors import ConfigError
from rsipo_lightning.frozen import AdapterOff, follow, frozen, restore, state_of
from rsipo_lightning.policy import Policy, save_policy
from rsipo_lightning.sharding import acting_weights, adapter_state, full_state, plain_copy
from rsipo_lightning.testing import adapted_policy, byte_tokenizer, random_policy

pytest.importorskip("peft")
IDS = torch.arange(24).reshape(2, 12)
MASK = torch.zeros_like(IDS, dtype=torch.bool).index_fill(1, torch.arange(5, 12), True)
CPU = torch.device("cpu")


def plain() -> Policy:
    return random_policy(64, 3)


def logp(policy: torch.nn.Module) -> Tensor:
    out: Tensor = policy(IDS, MASK, torch.ones(14))[0]
    return out


def step(policy: Policy, lr: float = 0.1) -> None:
    """One of plain gradient descent."""
    (-logp(policy).sum() / 14).backward()
    with torch.no_grad():
        for parameter in policy.trained():
            assert parameter.grad is not None
            parameter -= lr * parameter.grad
            parameter.grad = None


def weights(policy: Policy) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in acting_weights(policy.model)}


def test_a_new_adapter_changes_nothing_and_alone_is_trained() -> None:
    before, policy = plain(), plain()
    attach(policy.model, LoraSection(rank=4), 0)
    assert torch.equal(logp(policy), logp(before))
    names = {name for name, p in policy.model.named_parameters() if p.requires_grad}
    assert names == {name for name, _ in policy.model.named_parameters() if not plain_name(name)}
    assert len(names) == len(policy.trained()) == 2 * 2 * 7  # A and B, layers, q k v o gate up down
    assert policy.adapted
    assert not before.adapted


def test_a_seed_gives_the_same_adapter_and_takes_no_other_number() -> None:
    made = []
    for seed in (0, 0, 1):
        policy = plain()
        state = torch.get_rng_state()
        attach(policy.model, LoraSection(rank=4), seed)
        assert torch.equal(torch.get_rng_state(), state)
        made.append(torch.cat([p.flatten() for p in policy.trained()]))
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


def test_after_an_update_exactly_the_adapted_weights_act_otherwise() -> None:
    policy = adapted_policy(plain(), targets=["q_proj", "down_proj"])
    one, base = weights(policy), dict(policy.model.named_parameters())
    held = {name: p.detach().clone() for name, p in base.items() if plain_name(name)}
    step(policy)
    two = weights(policy)
    changed = {name for name in one if not torch.equal(one[name], two[name])}
    assert changed == set(adapter_layers(policy.model))
    assert len(changed) == 4
    assert list(two) == [name for name, _ in plain().model.named_parameters()]  # the head is tied
    assert all(torch.equal(base[name], before) for name, before in held.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_weights_act_as_the_adapter_does(dtype: torch.dtype) -> None:
    policy = plain()
    policy.model.to(dtype)
    policy = adapted_policy(policy)
    assert {p.dtype for p in policy.trained()} == {torch.float32}
    made = plain_copy(policy.model, CPU)
    own = dict(made.named_parameters())
    for name, weight in acting_weights(policy.model):
        assert weight.dtype == dtype
        own.pop(name).data.copy_(weight)
    assert not own
    with torch.no_grad():
        without = (logp(policy) - logp(AdapterOff(policy))).abs().mean()
        gap = (logp(policy) - logp(Policy(made))).abs().mean()
    assert gap < (1e-5 if dtype is torch.float32 else 0.1 * without)


def test_weights_without_an_adapter_are_sent_as_they_are() -> None:
    """The model's own tensors, so that they take no memory."""
    policy = adapted_policy(plain(), targets=["q_proj"])
    own = {plain_name(name): p for name, p in policy.model.named_parameters()}
    for name, weight in acting_weights(policy.model):
        assert (weight is own[name]) == (name not in adapter_layers(policy.model))


def test_the_reference_is_the_model_without_its_adapter() -> None:
    """Bit for bit, after updates too, without a copy; and the policy is as it was."""
    policy = adapted_policy(plain())
    reference = AdapterOff(policy)
    assert not list(reference.parameters())
    step(policy)
    own = logp(policy)
    with torch.no_grad():
        assert torch.equal(logp(reference), logp(plain()))
    assert not torch.equal(own, logp(plain()))
    assert torch.equal(logp(policy), own)
    step(policy)  # the adapter still learns


def test_a_teacher_keeps_the_adapter_alone() -> None:
    policy = adapted_policy(plain())
    before = logp(policy).detach()
    teacher = frozen(policy)
    kept = sum(p.numel() for p in teacher.parameters())
    assert kept == sum(p.numel() for p in policy.trained())
    assert len(policy.trained()) == 28  # the copy is no part of the policy
    step(policy)
    own = logp(policy).detach()
    with torch.no_grad():
        assert torch.equal(logp(teacher), before)
        assert torch.equal(logp(policy), own)
        state = copy.deepcopy(state_of(teacher))
        follow(teacher, policy, 0.75)
        expected = {
            name: 0.75 * old + 0.25 * new
            for (name, old), new in zip(state.items(), policy.trained(), strict=True)
        }
        for name, held in state_of(teacher).items():
            assert torch.allclose(held, expected[name], atol=1e-7)
        restore(teacher, state)
        assert torch.equal(logp(teacher), before)
        follow(teacher, policy, 0.0)
        assert torch.equal(logp(teacher), own)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_change_no_gradient(
    reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With shares the older kind is used, which asks for inputs that need a gradient."""
    found = []
    for recompute in (False, True):
        policy = adapted_policy(plain())
        monkeypatch.setattr("rsipo_lightning.policy.sharded", lambda _: reentrant)
        policy = Policy(policy.model, recompute)
        monkeypatch.undo()
        logp(policy).sum().backward()
        found.append([p.grad for p in policy.trained()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_folder_is_the_plain_model_with_the_adapter_beside_it(tmp_path: Path) -> None:
    from peft import PeftModel

    policy = adapted_policy(plain())
    state, own = full_state(policy.model), adapter_state(policy.model)
    save_policy(policy.model, byte_tokenizer(), tmp_path / "policy", state, own)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    written, acting = dict(loaded.named_parameters()), weights(policy)
    assert written.keys() == acting.keys()
    assert all(torch.equal(written[name], acting[name]) for name in acting)
    again = PeftModel.from_pretrained(plain().model, tmp_path / "policy" / "adapter")
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, policy.model(IDS).logits)


def test_the_embedded_engine_acts_with_the_adapter() -> None:
    """It has the policy itself: what it is sent is for engines with weights of their own."""
    policy = adapted_policy(plain())
    engine = HFEngine(policy, byte_tokenizer())
    held = [p.detach().clone() for p in policy.parameters()]
    engine.sync_weights(acting_weights(policy.model), 7)
    assert engine.policy_version == 7
    assert all(torch.equal(a, b) for a, b in zip(held, policy.parameters(), strict=True))


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        (["q_prj"], r"no linear layer 'q_prj' \(have: down_proj, gate_proj, k_proj, o_proj, q_pr"),
        (["lm_head"], "no linear layer 'lm_head'"),
        (["embed_tokens"], "no linear layer 'embed_tokens'"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused(targets: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=f"model.lora.targets: {says}"):
        attach(plain().model, LoraSection(rank=4, targets=targets), 0)


def test_a_model_without_linear_layers_is_refused() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1))
    with pytest.raises(ConfigError, match="GPT2LMHeadModel has no linear layers"):
        attach(model, LoraSection(rank=4), 0)


def test_without_peft_an_adapter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "find_spec", lambda name: util.find_spec("no_such_package"))
    adapter.check_package(LoraSection())
    with pytest.raises(ConfigError, match=r"peft is missing; pip install 'rsipo-lightning\[lora\]"):
        adapter.check_package(LoraSection(rank=4))


def test_the_scale_is_alpha_over_rank() -> None:
    for lora, scale in ((LoraSection(rank=8), 2.0), (LoraSection(rank=8, alpha=2.0), 0.25)):
        policy = plain()
        attach(policy.model, lora, 0)
        layer = next(iter(adapter_layers(policy.model).values()))
        a, b = factors(layer)
        b.data.fill_(0.5)
        x = torch.ones(1, a.shape[1])
        assert torch.allclose(layer(x) - layer.base_layer(x), scale * x @ a.T @ b.T, atol=1e-5)
    with pytest.raises(ConfigError, match="alpha and targets need"):
        LoraSection(alpha=2.0)


def test_it_is_switched_on_again_after_an_error() -> None:
    policy = adapted_policy(plain())
    own = logp(policy)
    with pytest.raises(ZeroDivisionError), switched_off(policy.model):
        1 / 0  # noqa: B018
    assert torch.equal(logp(policy), own)
    assert len(policy.trained()) == 28
