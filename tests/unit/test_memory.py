"""The estimate against what small models of the same kind really take."""

import weakref
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config, Qwen3Config

from rsipo_lightning import memory, registry
from rsipo_lightning.adapter import attach
from rsipo_lightning.cli import fit_main
from rsipo_lightning.composing import compose
from rsipo_lightning.config import UNTRAINED, RunConfig
from rsipo_lightning.errors import ConfigError
from rsipo_lightning.memory import GIB, Architecture, Memory, architecture, estimate, shard
from rsipo_lightning.packing import pack
from rsipo_lightning.policy import Policy

HUB_NAMES = {
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
}


def qwen(kind: type[PretrainedConfig] = Qwen2Config, **keys: Any) -> PretrainedConfig:
    own = {"head_dim": 32} if kind is Qwen3Config else {}
    small = {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "max_position_embeddings": 1024,
        "use_cache": False,
    }
    return kind(**{**small, **own, **keys})


def model(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def run_config(*overrides: str, algo: str = "grpo", **flags: str) -> RunConfig:
    return compose(algo=algo, env="search", overrides=overrides, **flags)


def size(found: Memory, name: str, phase: str = "training") -> int:
    return next(int(getattr(term, phase)) for term in found.terms if term.name == name)


@pytest.mark.parametrize(
    "config",
    [
        qwen(tie_word_embeddings=True),
        qwen(tie_word_embeddings=False),
        qwen(hidden_size=96, num_attention_heads=6, num_hidden_layers=3),
        qwen(Qwen3Config),
    ],
)
def test_parameters_gradients_and_optimizer_states_are_exact(config: PretrainedConfig) -> None:
    made = model(config)
    optimizer = torch.optim.AdamW(made.parameters())
    made(input_ids=torch.arange(8)[None]).logits.sum().backward()
    optimizer.step()
    states = [x for state in optimizer.state.values() for x in state.values() if x.dim()]
    found = estimate(run_config(), Architecture.of(config))
    weights = [p.detach() for p in made.parameters()]
    grads = [p.grad for p in made.parameters() if p.grad is not None]
    real = [sum(x.nbytes for x in tensors) for tensors in (weights, grads, states)]
    assert [size(found, x) for x in ("parameters", "gradients", "optimizer states")] == real
    assert size(found, "gradients", "rollout") == 0  # they are dropped with the step


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("targets", ["[]", "[q_proj,down_proj]"])
def test_an_adapter_alone_has_gradients_and_states(dtype: str, targets: str) -> None:
    """Exactly, and float32 whatever the weights are; the reference is no copy."""
    pytest.importorskip("peft")
    keys = ("model.lora.rank=4", f"model.lora.targets={targets}", f"model.dtype={dtype}")
    config = run_config(*keys, "algo.kl=0.1")
    made = model(qwen(), getattr(torch, dtype))
    attach(made, config.model.lora, 0)
    own = [p for p in made.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(own)
    made(input_ids=torch.arange(8)[None]).logits.sum().backward()
    optimizer.step()
    states = [x for state in optimizer.state.values() for x in state.values() if x.dim()]
    weights = [p.detach() for p in made.parameters()]
    grads = [p.grad for p in made.parameters() if p.grad is not None]
    found = estimate(config, Architecture.of(qwen(), config.model.lora))
    real = [sum(x.nbytes for x in tensors) for tensors in (weights, grads, states)]
    assert [size(found, x) for x in ("parameters", "gradients", "optimizer states")] == real
    assert size(found, "reference policy") == 0
    config = run_config(*keys, algo="step_opsd")
    found = estimate(config, Architecture.of(qwen(), config.model.lora))
    assert size(found, "teacher's copy") == sum(p.nbytes for p in own)


def test_a_rank_of_zero3_holds_its_share_of_an_adapter() -> None:
    pytest.importorskip("peft")
    keys = ["trainer.devices=3", "model.dtype=bfloat16", "model.lora.rank=4", "algo.kl=0.1"]
    config = run_config(*keys, trainer="zero3")
    a = Architecture.of(qwen(), config.model.lora)
    own = shard(a.factors(config.model.lora), 3)
    found = estimate(config, a)
    assert size(found, "parameters") == 2 * (shard(a.tensors, 3) + own)
    assert size(found, "gradients") == 4 * own
    assert size(found, "optimizer states") == 12 * own
    assert size(found, "reference policy") == 0
    assert size(found, "engine's weights", "rollout") == 2 * a.parameters  # merged


@pytest.mark.parametrize(("path", "parameters"), HUB_NAMES.items())
def test_the_presets_models_are_known_without_a_hub(path: str, parameters: int) -> None:
    assert architecture(path).parameters == parameters


def test_a_rank_of_zero3_holds_its_share_of_each_weight_padded() -> None:
    a = Architecture.of(qwen())
    assert shard(a.tensors, 1) == a.parameters
    assert shard(a.tensors, 3) == sum(-(-n // 3) for n in a.tensors) > a.parameters / 3
    config = run_config("trainer.devices=3", "model.dtype=bfloat16", trainer="zero3")
    found, n = estimate(config, a), shard(a.tensors, 3)
    # weights in bfloat16; gradients, master and two moments in float32
    assert size(found, "parameters") == 2 * n
    assert size(found, "gradients") == 4 * n
    assert size(found, "optimizer states") == 12 * n
    assert size(found, "reference policy") == 2 * n
    assert size(found, "engine's weights", "rollout") == 2 * a.parameters  # whole, to generate
    more = ["trainer.offload_optimizer=true", "trainer.offload_parameters=true"]
    config = run_config("trainer.devices=3", *more, trainer="zero3")
    for name in ("parameters", "gradients", "optimizer states", "reference policy"):
        assert size(estimate(config, a), name) == 0


def kept_bytes(config: PretrainedConfig, dtype: torch.dtype, tokens: int) -> int:
    """Bytes that a forward keeps for its backward, weights left out."""
    made = Policy(model(config, dtype))
    weights = {p.untyped_storage().data_ptr() for p in made.parameters()}
    kept: dict[int, torch.Tensor] = {}
    ids = torch.arange(tokens + 1)[None]

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.setdefault(x.untyped_storage().data_ptr(), x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = made.packed_hidden(pack(ids, ids == tokens))
    del out
    return sum(x.untyped_storage().nbytes() for at, x in kept.items() if at not in weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Qwen2Config, Qwen3Config])
def test_what_a_layer_keeps_of_a_token_is_exact(
    kind: type[PretrainedConfig], dtype: torch.dtype
) -> None:
    two, four = (kept_bytes(qwen(kind, num_hidden_layers=n), dtype, 100) for n in (2, 4))
    assert (four - two) / 2 / 100 == Architecture.of(qwen(kind)).token_bytes[dtype.itemsize]


class Peak(TorchDispatchMode):
    """The most bytes that new tensors have held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.known:
                storage = x.untyped_storage()
                self.known.add(storage.data_ptr())
                self.held += storage.nbytes()
                self.most = max(self.most, self.held)
                weakref.finalize(storage, self.free, storage.data_ptr(), storage.nbytes())
        return out

    def free(self, at: int, n: int) -> None:
        self.known.discard(at)
        self.held -= n


def peak(config: PretrainedConfig, run: RunConfig, rows: int, training: bool) -> int:
    """Bytes of one real micro-batch."""
    made = model(config, getattr(torch, run.model.dtype))
    attach(made, run.model.lora, 0)
    policy = Policy(made)
    if run.model.gradient_checkpointing:
        made.gradient_checkpointing_enable({"use_reentrant": False})
        made.train()
    ids = torch.randint(config.vocab_size, (rows, run.rollout.context))  # nothing is shared
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, -run.rollout.max_new_tokens :] = True
    for parameter in policy.trained():
        parameter.grad = torch.zeros_like(parameter)
    entropy = run.algo.entropy > 0
    with torch.set_grad_enabled(training), Peak() as found:
        logp, entropies = policy(ids, mask, torch.ones(int(mask.sum())), entropy)
        if training:
            (logp.sum() + entropies.sum() * entropy).backward()
    return found.most


DEEP = {"num_hidden_layers": 6}
WIDE = {"vocab_size": 20000, "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "tokens", "trained", "keys"),
    [
        (DEEP, 600, 4, ("model.gradient_checkpointing=false", "algo.entropy=0.1")),
        (DEEP, 600, 4, ("model.gradient_checkpointing=true", "algo.entropy=0.1")),
        (DEEP, 600, 4, ("model.lora.rank=8", "algo.entropy=0.1")),
        (DEEP, 600, 4, ("model.lora.rank=64", "model.gradient_checkpointing=true")),
        (WIDE, 80, 64, ("algo.entropy=0.1",)),
        (WIDE, 80, 64, ("algo.entropy=0",)),
    ],
    ids=["kept", "checkpointed", "lora", "lora-checkpointed", "entropies", "logits"],
)
def test_activations_and_logits_are_bounds_and_near(
    shape: dict[str, int], tokens: int, trained: int, keys: tuple[str, ...], dtype: str
) -> None:
    config = qwen(**shape)
    run = run_config(
        *keys,
        f"model.dtype={dtype}",
        "trainer.micro_batches=1",
        "env.max_steps=1",
        "rollout.tasks=4",
        "rollout.group=1",
        "rollout.max_skill_tokens=1",
        f"rollout.max_new_tokens={trained}",
        f"rollout.context={tokens}",
    )
    found = estimate(run, Architecture.of(config, run.model.lora))
    for phase, training in (("training", True), ("scoring", False)):
        reckoned = size(found, "activations", phase) + size(found, "logits", phase)
        real = peak(config, run, 4, training)
        assert real <= reckoned <= 1.7 * real, phase


MORE = [  # each makes the same need or a larger one
    ("trainer.micro_batches", (8, 4, 1)),
    ("trainer.minibatches", (4, 1)),
    ("trainer.devices", (16, 8, 2, 1)),
    ("trainer.nodes", (4, 1)),
    ("rollout.live", (1, 32, 128)),
    ("rollout.context", (1024, 4096, 8192)),
    ("rollout.tasks", (16, 64, 128)),
    ("rollout.group", (4, 8, 16)),
    ("env.max_steps", (1, 4, 10)),
    ("model.gradient_checkpointing", ("true", "false")),
    ("trainer.offload_optimizer", ("true", "false")),
    ("trainer.offload_parameters", ("true", "false")),
    ("model.dtype", ("bfloat16", "float32")),
    ("model.lora.rank", (4, 64)),
    ("algo.kl", (0, 0.1)),
]


@pytest.mark.parametrize("env", ["search", "search_verl"])
@pytest.mark.parametrize(("key", "values"), MORE, ids=[key for key, _ in MORE])
def test_more_work_never_needs_less(key: str, values: tuple[Any, ...], env: str) -> None:
    found = []
    for value in values:
        config = compose(
            algo="grpo", env=env, trainer="zero3", model="hf", overrides=[f"{key}={value}"]
        )
        a = Architecture.of(qwen(vocab_size=5000), config.model.lora)
        found.append(estimate(config, a))
    for phase in memory.PHASES:
        # fewer turns leave more of a conversation to each of them
        totals = [m.total(phase) for m in found]
        if (key, phase) != ("env.max_steps", "rollout"):
            assert totals == sorted(totals), phase
    assert found[0] != found[-1] or (key, env) == ("rollout.context", "search_verl")


@pytest.mark.parametrize("algo", registry.names("algorithms"))
def test_every_method_is_reckoned_with_the_copies_that_it_keeps(algo: str) -> None:
    config = run_config(algo=algo)
    found, weights = (
        estimate(config, Architecture.of(qwen())),
        4 * Architecture.of(qwen()).parameters,
    )
    assert size(found, "reference policy") == weights * (getattr(config.algo, "kl", 0) > 0)
    assert size(found, "teacher's copy") == weights * (algo == "step_opsd")


def test_a_run_that_cannot_fit_is_refused_by_its_largest_term() -> None:
    a = Architecture.of(qwen(num_hidden_layers=24))
    found = estimate(run_config("rollout.context=4096"), a)
    assert found.need == max(found.total(phase) for phase in memory.PHASES)
    found.check(run_config(), found.need)
    with pytest.raises(ConfigError) as caught:
        found.check(run_config(), found.need - 1)
    text = str(caught.value)
    assert "for training, most" in text
    assert "for activations: set model.gradient_checkpointing=true" in text
    assert "\n" not in text
    found.check(run_config("trainer.force_memory=true"), 1)


@pytest.fixture
def fit(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.chdir(tmp_path)
    return lambda *args: fit_main(["--algo", "rsipo", "--env", "search", *args])


def test_print_memory_shows_the_estimate_and_writes_nothing(
    fit: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    preset = ("--model", "qwen2_5_7b", "--trainer", "zero3_8gpu", "--print-memory")
    assert fit(*preset) == 0
    shown = capsys.readouterr().out
    assert "7.62 B parameters, zero3, 8 GPUs" in shown
    assert "trainer.gpu_gib=N compares" in shown
    assert fit(*preset, "trainer.gpu_gib=79") == 0
    assert fit(*preset, "trainer.gpu_gib=24") == 2
    assert "rsipo-fit: error: a GPU has 24.0 GiB and needs" in capsys.readouterr().err
    for path in ("tiny", *UNTRAINED):
        assert fit("--print-memory", f"model.path={path}") == 0
        assert f"{path}, 0.00 B parameters, auto, 1 GPU" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_gpu_run_is_refused_before_its_weights_are_loaded(
    fit: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    # a hub name without a hub: loading would fail
    gpu = ("--model", "qwen2_5_3b", "trainer.accelerator=gpu", "trainer.gpu_gib=10")
    assert fit(*gpu) == 2
    assert "a GPU has 10.0 GiB and needs" in capsys.readouterr().err
    assert fit(*gpu, "trainer.force_memory=true") == 2
    assert "this machine has 0 GPUs" in capsys.readouterr().err


def test_a_table_leaves_out_what_takes_nothing() -> None:
    console = Console(width=120, record=True, file=StringIO())
    found = estimate(run_config("algo.kl=0"), Architecture.of(qwen()))
    console.print(found.table("small"))
    shown = console.export_text()
    assert "KV cache" in shown
    assert "reference policy" not in shown
    assert f"{found.total('rollout') / GIB:.2f}" in shown
