"""What a run takes of each GPU, reckoned from its config and the model's config.json alone.

No weight is loaded. Every row is taken to be as long as it may be and every episode to take all its
turns, so the estimate is what a full update needs, not the average one. Bytes of activations and
logits were measured on CPU (tests/unit/test_memory.py); ``RESERVE`` is a guess.
"""

from __future__ import annotations

import math
import os.path
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from rsipo_lightning import head, ranks, registry
from rsipo_lightning.adapter import adapter_layers, attach
from rsipo_lightning.algorithms.base import Algorithm, active
from rsipo_lightning.composing import component
from rsipo_lightning.config import UNTRAINED, LoraSection, RunConfig
from rsipo_lightning.errors import ConfigError
from rsipo_lightning.policy import MODELS, load_config

GIB = 2**30
RESERVE = 2 * GIB  # CUDA context, NCCL's buffers, fragmentation
# Of DeepSpeed's defaults, in parameters: gathered at most, reduced at once, stepped at once
LIVE, BUCKET, GROUP = 10**9, 5 * 10**8, 10**9
WINDOW_PROMPT = 2048  # tokens of a prompt that is written anew each turn (methods.md 7.1: ALFWorld)
LOGITS = 13  # bytes per token and entry of a block of the vocabulary, see rsipo_lightning.head
SAMPLING = 36  # the same of a row while decoding: log-probs in float32, their sums in float64
SHARD = "set trainer.strategy=zero3"
SHAPES = MODELS / "shapes"  # config.json of the presets' models, by hub name

PHASES = ("rollout", "scoring", "training", "step")


@dataclass(frozen=True, slots=True)
class Architecture:
    """What counts of a decoder."""

    tensors: tuple[int, ...]  # parameters of each weight; tied ones once
    vocab: int
    layers: int
    hidden: int
    keys: int  # width of all heads of the keys, which is that of the values
    token_bytes: dict[int, int]  # {bytes of a number: of what a layer keeps of a token to go back}
    adapted: tuple[tuple[int, int], ...] = ()  # inputs and outputs of each layer with an adapter

    @classmethod
    def of(cls, config: PretrainedConfig, lora: LoraSection | None = None) -> Architecture:
        """Parameters are counted on a model without storage; activations are those of Qwen."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        text = config.get_text_config()
        heads = int(text.num_attention_heads)
        pairs = int(getattr(text, "num_key_value_heads", None) or heads)
        hidden = int(text.hidden_size)
        dim = int(getattr(text, "head_dim", None) or hidden // heads)
        inner = int(getattr(text, "intermediate_size", None) or 4 * hidden)
        queries, keys = heads * dim, pairs * dim
        normed = any("q_norm" in name for name, _ in model.named_modules())

        def kept(size: int) -> int:
            norms = 2 * (hidden * (4 + 2 * size) + 4)  # input, normalised, output; 1 / rms
            attention = size * (3 * queries + 2 * keys) + 4 * heads
            own = (queries + keys) * (4 + size) + 4 * (heads + pairs) if normed else 0
            return norms + attention + own + 4 * size * inner

        tensors = tuple(p.numel() for p in model.parameters())
        with torch.device("meta"):
            attach(model, lora or LoraSection(), 0)
        return cls(
            adapted=tuple((m.in_features, m.out_features) for m in adapter_layers(model).values()),
            tensors=tensors,
            vocab=text.vocab_size,
            layers=text.num_hidden_layers,
            hidden=hidden,
            keys=keys,
            token_bytes={size: kept(size) for size in (2, 4)},
        )

    @property
    def parameters(self) -> int:
        return sum(self.tensors)

    def factors(self, lora: LoraSection) -> tuple[int, ...]:
        """Parameters of each weight of the adapter."""
        return tuple(lora.rank * width for layer in self.adapted for width in layer)


def shard(tensors: Sequence[int], ranks: int) -> int:
    """Parameters of one rank under ZeRO-3: each weight is padded to a multiple of ``ranks``."""
    return sum(math.ceil(n / ranks) for n in tensors)


@dataclass(frozen=True, slots=True)
class Term:
    """One use of memory in each phase of an update, bytes, and what makes it smaller."""

    name: str
    change: str
    rollout: int = 0
    scoring: int = 0  # log-probs of teachers and reference, without gradients
    training: int = 0  # a forward and its backward
    step: int = 0  # of the optimizer


@dataclass(frozen=True, slots=True)
class Memory:
    """The estimate for one GPU."""

    terms: tuple[Term, ...]

    def total(self, phase: str) -> int:
        """Bytes of all terms."""
        return sum(getattr(term, phase) for term in self.terms)

    @property
    def peak(self) -> str:
        """The phase that takes most."""
        return max(PHASES, key=self.total)

    @property
    def need(self) -> int:
        """Bytes that a GPU must have."""
        return self.total(self.peak)

    def check(self, config: RunConfig, have: int) -> None:
        """ConfigError if a GPU of ``have`` bytes is too small, unless trainer.force_memory."""
        if self.need <= have or config.trainer.force_memory:
            return
        size, largest = max(((getattr(t, self.peak), t) for t in self.terms), key=lambda x: x[0])
        raise ConfigError(
            f"a GPU has {have / GIB:.1f} GiB and needs {self.need / GIB:.1f} for {self.peak}, most "
            f"({size / GIB:.1f}) for {largest.name}: {largest.change} (--print-memory shows all), "
            "or start anyway with trainer.force_memory=true"
        )

    def table(self, title: str) -> Table:
        """GiB of each term in each phase."""
        shown = Table(title=title, pad_edge=False)
        shown.add_column("GiB of one GPU")
        for phase in PHASES:
            shown.add_column(phase, justify="right")
        shown.add_column("to make it smaller")
        for term in self.terms:
            sizes = [getattr(term, phase) for phase in PHASES]
            if any(sizes):
                shown.add_row(
                    term.name, *(f"{n / GIB:.2f}" if n else "" for n in sizes), term.change
                )
        shown.add_section()
        shown.add_row("total", *(f"{self.total(phase) / GIB:.2f}" for phase in PHASES), "")
        return shown


@dataclass(frozen=True, slots=True)
class _Rows:
    """The training rows of one rank, all of them as long as they may be."""

    count: int
    length: int  # tokens
    trained: int  # of them

    @classmethod
    def of(cls, config: RunConfig, episodes: int) -> _Rows:
        r, steps = config.rollout, config.env.max_steps
        if _window(config):
            length = min(r.context, WINDOW_PROMPT + r.max_new_tokens)
            return cls(episodes * steps, length, r.max_new_tokens)
        return cls(episodes, r.context, min(r.context, steps * r.max_new_tokens))

    def forward(self, config: RunConfig) -> tuple[int, int]:
        """(tokens, trained ones) of one micro-batch; a written skill is a row too."""
        r, t = config.rollout, config.trainer
        rows = math.ceil(self.count / (t.minibatches * t.micro_batches))
        return max(rows * self.length, r.context), max(rows * self.trained, r.max_skill_tokens)


def architecture(path: str, lora: LoraSection | None = None) -> Architecture:
    """Of ``model.path``: a folder, a preset's model (without a hub) or a hub name.

    DataError if there is none, ConfigError for an adapter that does not go with it.
    """
    shipped = SHAPES / f"{path}.json"
    if not os.path.exists(path) and os.path.isfile(shipped):  # False where too long
        return Architecture.of(AutoConfig.from_pretrained(shipped), lora)
    shaped = path.replace("untrained", "tiny") if path in UNTRAINED else path
    return Architecture.of(load_config(shaped), lora)


def estimate(config: RunConfig, a: Architecture, gpu: int = 0) -> Memory:
    """Memory of one GPU of ``trainer.nodes`` x ``trainer.devices``, in each phase of an update.

    ``gpu``: bytes that it has, if they are known; an engine may take a share of them.
    """
    t, size, lora = (
        config.trainer,
        {"float32": 4, "bfloat16": 2}[config.model.dtype],
        config.model.lora,
    )
    own = shard(a.tensors, t.ranks) if t.zero3 else a.parameters  # parameters that this GPU keeps
    # What is trained, and what a number of it takes: without ZeRO-3 an adapter is float32.
    trained, number = (a.factors(lora), size if t.zero3 else 4) if lora.rank else (a.tensors, size)
    learned = shard(trained, t.ranks) if t.zero3 else sum(trained)
    here = not t.offload_parameters
    tasks = math.ceil(config.rollout.tasks / t.ranks)
    rows = _Rows.of(config, tasks * config.rollout.group)
    reference, teacher = _objective(config)
    weights, adapter = size * own * here, number * learned * here * bool(lora.rank)
    change = "set trainer.offload_parameters=true" if t.zero3 else SHARD
    return Memory(
        (
            _always("parameters", change, weights + adapter),
            *_training_state(config, a, number, trained, learned),
            # With an adapter the reference is the policy without it.
            _always("reference policy", "set algo.kl=0", weights * (reference and not lora.rank)),
            _always("teacher's copy", change, (adapter if lora.rank else weights) * teacher),
            *_forwards(config, a, size, rows),
            *_generation(config, a, size, rows, tasks, gpu),
            _always("CUDA, NCCL, fragments", "take a larger GPU", RESERVE),
        )
    )


def report(config: RunConfig, console: Console) -> None:
    """Show the estimate and compare it with the GPU. ConfigError if it does not fit.

    The GPU's size is ``trainer.gpu_gib``, else that of the smallest one here, if there is any.
    """
    t, a = config.trainer, architecture(config.model.path, config.model.lora)
    have = int(t.gpu_gib * GIB) or _smallest()
    memory = estimate(config, a, have)
    gpus = f"{t.ranks} GPU{'s' * (t.ranks > 1)}"
    if ranks.rank() == 0:
        size = f"{a.parameters / 1e9:.2f} B parameters"
        if config.model.lora.rank:
            size += f" and {sum(a.factors(config.model.lora)) / 1e6:.1f} M of an adapter"
        shown = f"{config.model.path}, {size}, {t.strategy}, {gpus}"
        console.print(memory.table(shown))
        known = f"of {have / GIB:.1f}" if have else "(trainer.gpu_gib=N compares it with a GPU)"
        console.print(f"needed: {memory.need / GIB:.1f} GiB {known}, {memory.peak} takes most")
    if have:
        memory.check(config, have)


def _smallest() -> int:
    """Bytes of the smallest GPU of this machine; 0 without one."""
    count = torch.cuda.device_count()
    sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(count)]
    return min(sizes, default=0)


def _objective(config: RunConfig) -> tuple[bool, bool]:
    """Whether the algorithm has a reference, and a copy of the policy as teacher."""
    name = component("algo", config.groups["algo"])
    kind = registry.load_class("algorithms", name, Algorithm)
    algorithm: Algorithm[Any] = kind(config.algo, config.seed)
    streams = active(algorithm.streams)
    reference = any(stream.reference for stream in streams.values())
    return reference, not algorithm.teacher.live


def _training_state(
    config: RunConfig, a: Architecture, size: int, trained: Sequence[int], own: int
) -> list[Term]:
    """Gradients and AdamW's moments of what is ``trained``, of which this GPU keeps ``own``; ZeRO-3
    adds masters and a buffer, all in float32 whatever the dtype.

    The step takes the square roots of the second moments, all at once, and under ZeRO-3 a copy of
    the gradients.
    """
    t = config.trainer
    if not t.zero3:
        kept = size * sum(trained)
        buckets = kept if t.strategy == "ddp" else 0  # torch's reducer keeps them
        return [
            Term("gradients", SHARD, buckets, buckets, buckets + kept, buckets + kept),
            _always("optimizer states", SHARD, 2 * kept),
            Term("optimizer's step", SHARD, step=kept),
        ]
    change = "set trainer.offload_optimizer=true"
    here = not t.offload_optimizer  # gradients are offloaded with the states that they meet
    live = size * min(a.parameters, LIVE + max(a.tensors))
    reduced = 4 * min(sum(trained), BUCKET)
    return [
        _always("gradients", change, 4 * own * here),
        _always("optimizer states", change, 12 * own * here),
        Term("optimizer's step", change, step=8 * min(own, GROUP) * here),
        Term("gathered layers", "take a larger GPU", scoring=live, training=live + reduced),
        _always("reduction's buffer", "take a larger GPU", 4 * BUCKET),
    ]


def _forwards(config: RunConfig, a: Architecture, size: int, rows: _Rows) -> list[Term]:
    """Activations and logits of one micro-batch.

    A layer's backward takes as much again as the layer keeps; with checkpointing one layer is run
    again at a time and the others keep their inputs.
    """
    tokens, trained = rows.forward(config)
    once, more = _adapter_bytes(config, a)
    layer, change = a.token_bytes[size] + more, "raise trainer.micro_batches"
    kept, less = a.layers * layer, "set model.gradient_checkpointing=true"
    if config.model.gradient_checkpointing:
        kept, less = a.layers * a.hidden * size + layer, change
    table, scoring = a.vocab * trained, tokens * (a.token_bytes[size] + once)
    block = LOGITS * math.ceil(table / head.parts(trained, a.vocab))
    return [
        Term("activations", less, scoring=scoring, training=tokens * (kept + layer)),
        Term("logits", change, 0, block, block + min(table * size, head.KEPT)),
    ]


def _adapter_bytes(config: RunConfig, a: Architecture) -> tuple[int, int]:
    """What one adapter, and those of a decoder's layer, keep of a token: A's output, and the input
    where that is cast.
    """
    low, rank = config.model.dtype != "float32", config.model.lora.rank
    cast = low and not config.trainer.zero3
    size = 2 if low and not cast else 4
    kept = [rank * size + 4 * inputs * cast for inputs, _ in a.adapted]
    return max(kept, default=0), math.ceil(sum(kept) / a.layers)


def _generation(
    config: RunConfig, a: Architecture, size: int, rows: _Rows, tasks: int, gpu: int
) -> list[Term]:
    """The engine ``hf``: under ZeRO-3 a whole copy of the weights, and the cache of all live
    episodes or of the analyses of one update, which it keeps until the weights change. An engine
    with memory of its own says in its Config what it takes.
    """
    r, e, t = config.rollout, config.eval, config.trainer
    if takes := getattr(config.engine, "memory", None):
        row = 2 * a.layers * a.keys * size * r.context
        rollout, rest = takes(size * a.parameters, row, gpu)
        return [Term("engine", "lower engine.memory_share", rollout, rest, rest, rest)]
    looked = max(e.episodes, e.val_episodes if e.every else 0)
    live = min(r.live, max(tasks * r.group, math.ceil(looked / t.ranks)))
    cached = max(live * rows.length, min(live, tasks) * r.context)
    token = 2 * a.layers * a.keys * size
    new = rows.length - r.max_new_tokens if _window(config) else r.context // config.env.max_steps
    copied = size * a.parameters if t.zero3 else 0
    change = "lower rollout.live"
    return [
        _always("engine's weights", "take a smaller model.path", copied),
        _always("KV cache", change, cached * token * 3 // 2),  # it grows by half
        Term("prompts", change, live * new * a.token_bytes[size]),
        Term("sampling", change, live * a.vocab * SAMPLING),
    ]


def _window(config: RunConfig) -> bool:
    """Whether each turn has a prompt, hence a row, of its own."""
    return getattr(config.env, "context", "append") == "window"


def _always(name: str, change: str, size: int) -> Term:
    return Term(name, change, size, size, size, size)
