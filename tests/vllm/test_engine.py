"""vLLM inside this process against the policy and the engine ``hf``. One start, many checks."""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from rsipo_lightning.codec import Codec
from rsipo_lightning.config import RunConfig
from rsipo_lightning.engines.hf import HFEngine
from rsipo_lightning.engines.vllm import VLLMConfig, VLLMEngine
from rsipo_lightning.errors import ConfigError, EngineError
from rsipo_lightning.freshness import Sender, log_probs
from rsipo_lightning.policy import Policy, load_model, load_tokenizer
from rsipo_lightning.protocols import Host
from rsipo_lightning.rollout import Player
from rsipo_lightning.testing import random_policy
from rsipo_lightning.types import Completion, Prompt

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not find_spec("vllm"), reason="needs vLLM: make test-vllm"),
]
TOKENIZER = load_tokenizer("tiny")
CODEC = Codec(TOKENIZER)
POLICY = Policy(load_model("tiny"))
CONTEXT = 1024


def host(policy: Policy) -> Host:
    return Host(policy, lambda: policy, TOKENIZER, torch.device("cpu"), CONTEXT, 64)


@pytest.fixture(scope="module")
def started() -> Iterator[VLLMEngine]:
    engine = VLLMEngine.of(VLLMConfig(cache_gib=0.25), host(POLICY))
    yield engine
    engine.close()


@pytest.fixture
def policy() -> Iterator[Policy]:
    """The one the engine was made for, as it was shipped."""
    before = copy.deepcopy(POLICY.model.state_dict())
    yield POLICY
    POLICY.model.load_state_dict(before)


@pytest.fixture
def engine(started: VLLMEngine, policy: Policy) -> VLLMEngine:
    started.sync_weights(policy.model.named_parameters(), 0)
    return started


def prompts(temperature: float = 1.0, count: int = 6, tokens: int = 16) -> list[Prompt]:
    rng = random.Random(0)
    texts = [f"Your question: who directed {'abc ' * rng.randint(1, 9)}?" for _ in range(count)]
    return [
        Prompt(CODEC.start(t)[0], tokens + i % 4, temperature, i, CODEC.stop_ids, (), f"s{i}")
        for i, t in enumerate(texts)
    ]


def gap(policy: Policy, asked: Sequence[Prompt], said: Sequence[Completion]) -> float:
    """Largest difference of a log-prob from one fresh forward of the policy."""
    found = 0.0
    for p, c in zip(asked, said, strict=True):
        own = log_probs(policy, p, c)
        found = max(found, float((own - torch.tensor(c.logprobs)).abs().max()))
    return found


def learn(policy: Policy) -> None:
    """A step so large that what is stale shows."""
    ids = torch.tensor([CODEC.start("Your question: what is it?")[0]])
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, 0] = False
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    policy(ids, mask, torch.ones(int(mask.sum())))[0].mean().neg().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_it_is_the_hf_engine_before_and_after_three_updates(
    engine: VLLMEngine, policy: Policy
) -> None:
    """Same greedy tokens; log-probs of the samples within 1e-4 at every temperature."""
    embedded = HFEngine(policy, TOKENIZER)
    for version in range(4):
        for each in (engine, embedded):
            each.sync_weights(policy.model.named_parameters(), version)
        greedy = prompts(0.0)
        said = engine.generate(greedy)
        assert [c.ids for c in said] == [c.ids for c in embedded.generate(greedy)]
        for temperature in (0.0, 1.0, 0.6, 2.0):
            asked = prompts(temperature)
            said = engine.generate(asked)
            assert gap(policy, asked, said) < 1e-4
            assert {c.policy_version for c in said} == {version}
            assert {c.temperature for c in said} == {temperature or 1.0}
        at_one = [replace(c, temperature=1.0) for c in said]
        assert gap(policy, asked, at_one) > 0.1  # log-probs without the temperature would be seen
        learn(policy)


def test_greedy_and_sampled_rows_of_one_call(engine: VLLMEngine, policy: Policy) -> None:
    mixed = [replace(p, temperature=float(i % 3)) for i, p in enumerate(prompts())]
    assert gap(policy, mixed, engine.generate(mixed)) < 1e-4


def test_samples_are_those_of_the_seed_in_any_batch(engine: VLLMEngine) -> None:
    """Settled 9: alone, in a batch and in another order."""
    many = prompts(tokens=24)
    together = engine.generate(many)
    alone = [engine.generate([p])[0] for p in many]
    backwards = engine.generate(many[::-1])[::-1]
    assert [c.ids for c in together] == [c.ids for c in alone] == [c.ids for c in backwards]
    other = engine.generate([replace(p, seed=p.seed + 1000) for p in many])
    assert [c.ids for c in other] != [c.ids for c in together]


def test_stops(engine: VLLMEngine) -> None:
    """The token that completes a stop string is the last one, and nothing else ends a turn."""
    (free,) = prompts(count=1, tokens=40)
    free = replace(free, stop_ids=(), temperature=2.0)
    (c,) = engine.generate([free])
    assert c.truncated
    assert len(c.ids) == 40
    text = TOKENIZER.decode(c.ids[:6])
    assert isinstance(text, str)
    stop = text[2:5]
    (cut,) = engine.generate([replace(free, stop=(stop,))])
    assert not cut.truncated
    assert stop in cut.text
    assert cut.ids == c.ids[: len(cut.ids)]
    assert stop not in TOKENIZER.decode(cut.ids[:-1])
    (short,) = engine.generate([replace(free, max_new_tokens=2)])
    assert short.truncated
    assert short.ids == c.ids[:2]
    (ended,) = engine.generate([replace(free, stop_ids=(c.ids[3],))])
    assert not ended.truncated
    assert ended.ids == c.ids[: c.ids.index(c.ids[3]) + 1]
    last = replace(free, stop_ids=(c.ids[3],), max_new_tokens=len(ended.ids))
    assert not engine.generate([last])[0].truncated  # the stop is the last token that fits


def test_turns_go_on_from_the_cache(
    engine: VLLMEngine, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several turns of growing conversations: right log-probs, and what was said is not run
    again.
    """
    cached: list[int] = []
    generate = engine.llm.generate

    def counted(*args: Any, **kwargs: Any) -> Any:
        done = generate(*args, **kwargs)
        cached.append(min(answer.num_cached_tokens for answer in done))
        return done

    monkeypatch.setattr(engine.llm, "generate", counted)
    live = [replace(p, ids=p.ids * 8) for p in prompts(count=4)]
    for turn in range(4):
        done = engine.generate(live)
        assert gap(policy, live, done) < 1e-4
        live = [
            replace(p, ids=CODEC.extend(p.ids + c.ids, "seen " * 60), seed=100 * turn + i)
            for i, (p, c) in enumerate(zip(live, done, strict=True))
        ]
    assert cached == sorted(cached)
    assert cached[-1] >= 256


def sender(engine: Any, **keys: Any) -> Sender:
    return Sender(Player(None, engine, CODEC), RunConfig(engine=VLLMConfig(**keys)))  # type: ignore[arg-type]


FAULTS = ["a cache that is kept", "a tied head that is not sent", "weights that do not come", "T"]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_probe_sees(
    fault: str, engine: VLLMEngine, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fault by itself; without it the same weights pass."""
    checked = sender(engine)
    assert checked.send(policy, 1) is None
    learn(policy)
    with monkeypatch.context() as broken:
        if fault == FAULTS[0]:
            broken.setattr(engine, "_drop", lambda: None)
        elif fault == FAULTS[1]:
            broken.setattr(engine, "_ties", {})
        elif fault == FAULTS[2]:
            broken.setattr(
                engine.llm, "collective_rpc", lambda name, kwargs: list(*kwargs.values())
            )
        else:
            sampled = engine.generate
            broken.setattr(
                engine,
                "generate",
                lambda asked: [replace(c, temperature=1.0) for c in sampled(asked)],
            )
        with pytest.raises(EngineError, match=r"weights of version 2: .* differ by [0-9.]+,") as e:
            checked.send(policy, 2)
    seen = float(str(e.value).split("differ by ")[1].split(",")[0])
    print(f"{fault}: {seen}")
    assert seen > 0.05  # 50 times the tolerance
    checked.send(policy, 2)


def test_changed_tensors_are_counted(engine: VLLMEngine, policy: Policy) -> None:
    checked = sender(engine)
    assert checked.send(policy, 0) is None
    assert checked.send(policy, 1) == 0
    with torch.no_grad():
        next(iter(policy.parameters())).view(-1)[7] += 1e-4
    assert checked.send(policy, 2) == 1
    learn(policy)
    assert checked.send(policy, 3) == 38


def test_weights_may_go_when_the_next_one_is_asked_for(
    engine: VLLMEngine, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under ZeRO-3. vLLM keeps q, k and v until it has all three, and tied embeddings to the
    end; of copies, no more is in memory than the embeddings and the parts of one layer.
    """
    learn(policy)

    def gone() -> Iterator[tuple[str, Tensor]]:
        for name, weight in policy.model.named_parameters():
            lent = weight.detach() + 0
            yield name, lent
            lent.fill_(torch.nan)

    held = peak = 0
    clone = Tensor.clone

    def counted(self: Tensor, **keys: Any) -> Tensor:
        nonlocal held, peak
        made = clone(self, **keys)
        size = made.numel() * made.element_size()

        def freed() -> None:
            nonlocal held
            held -= size

        weakref.finalize(made, freed)
        held += size
        peak = max(peak, held)
        return made

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "clone", counted)
        engine.sync_weights(gone(), 1)
    asked = prompts()
    assert gap(policy, asked, engine.generate(asked)) < 1e-4
    size = {name: 4 * p.numel() for name, p in policy.model.named_parameters()}
    parts = sum(n for name, n in size.items() if "layers.0.mlp.gate" in name or ".0.mlp.up" in name)
    embeddings = size["model.embed_tokens.weight"]
    assert embeddings + parts <= peak < embeddings + 1.1 * parts
    assert sum(size.values()) > 2 * parts + embeddings


def test_what_vllm_raises_is_one_line(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def dead(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of\n  memory")

    monkeypatch.setattr(engine.llm, "generate", dead)
    with pytest.raises(EngineError, match=r"^vLLM failed: out of memory$"):
        engine.generate(prompts())


def test_weights_of_another_model_are_refused(engine: VLLMEngine) -> None:
    with pytest.raises(EngineError, match="vLLM cannot take the new weights: "):
        engine.sync_weights([("model.what.weight", torch.zeros(3))], 1)


def test_heads_that_kill_the_cpu_build_are_refused(started: VLLMEngine) -> None:
    narrow = random_policy(len(TOKENIZER), dim=64)
    narrow.model.config.num_attention_heads = 4
    with pytest.raises(ConfigError, match=r"heads are 16 wide; on a CPU vLLM takes 32, 64, .*hf$"):
        VLLMEngine.of(VLLMConfig(), host(narrow))
