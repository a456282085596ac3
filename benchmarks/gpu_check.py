"""What one GPU shows in minutes: right gradients, engines that agree, and how fast all is.

    python benchmarks/gpu_check.py                          # 0.5B, engines hf and vllm
    python benchmarks/gpu_check.py --size 3b --out gpu.json
    python benchmarks/gpu_check.py --cpu                    # tiny sizes: only that it still runs

Each step is a process of its own, under the real strategy (DeepSpeed ZeRO-3 on one rank):

gradient  updates of grpo, seed, opid and rsipo in float32 against one plain process on the CPU
training  a random Qwen2 in bfloat16 with gradient checkpointing: tokens/s and MFU of an update
rollout   tokens/s of each engine on that model, and how far its log-probs are from the trainer's

MFU: 6 x parameters and 6 x layers x width x length operations per token and second (recomputation
is not counted), over the GPU's dense bfloat16 peak. No model hub and no data are needed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from rsipo_lightning import ranks, registry
from rsipo_lightning.build import quiet
from rsipo_lightning.codec import Codec
from rsipo_lightning.config import ModelSection, OptimSection, RunConfig, TrainerSection
from rsipo_lightning.engines.hf import HFConfig, HFEngine
from rsipo_lightning.engines.vllm import VLLMConfig, VLLMEngine
from rsipo_lightning.freshness import log_probs
from rsipo_lightning.metrics import Metrics
from rsipo_lightning.module import PolicyModule
from rsipo_lightning.policy import Policy, load_tokenizer
from rsipo_lightning.protocols import Engine, Host
from rsipo_lightning.sharding import Shards, acting_weights, plain_copy
from rsipo_lightning.strategy import Zero3Strategy, connect, disconnect
from rsipo_lightning.testing import gradient, make_algorithm, toy_world
from rsipo_lightning.types import Credit, Iteration, Prompt, Sample

ROOT = Path(__file__).resolve().parents[1]
# hidden size, that of the MLP, layers, heads, heads of the keys: Qwen2.5's; vocabulary 151,936
SIZES = {
    "0.5b": (896, 4864, 24, 14, 2),
    "1.5b": (1536, 8960, 28, 12, 2),
    "3b": (2048, 11008, 36, 16, 2),
    "tiny": (64, 128, 2, 2, 2),
}
PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}  # bfloat16, dense
NAMES = ("grpo", "seed", "opid", "rsipo")
STRONG = {"kl": 0.1, "entropy": 0.01, "distill": 0.3, "skill": 0.5, "n_min": 1, "trust_slope": 1.0}
GRADIENT = 1e-4  # of its norm; two CPU ranks stay under 1e-6
MISMATCH = 0.1  # mean difference of log-probs in bfloat16

Spec = dict[str, Any]  # size, cpu, rows, length, prompts, new
Result = dict[str, Any]


def main() -> int:
    """Exit code: 1 if a step failed or differs too much, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=("0.5b", "1.5b", "3b"), default="0.5b")
    parser.add_argument("--engines", default="hf,vllm", help="hf, vllm (default: both)")
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--out", type=Path, help="JSON")
    parser.add_argument("--step", nargs=3, help=argparse.SUPPRESS)  # NAME SPEC OUT
    args = parser.parse_args()
    if args.step:
        step(*args.step)
        return 0
    if unknown := set(args.engines.split(",")) - {"hf", "vllm"}:
        parser.error(f"--engines: no engine {min(unknown)!r} (have: hf, vllm)")
    if not args.cpu and not torch.cuda.is_available():
        print("gpu_check: torch sees no GPU here; nothing measured (--cpu: a dry run)")
        return 2
    spec: Spec = {"size": args.size, "cpu": False}
    spec |= {"rows": 16, "length": 4096, "prompts": 64, "prompt": 1024, "new": 256}
    if args.cpu:
        spec = {"size": "tiny", "cpu": True}
        spec |= {"rows": 4, "length": 64, "prompts": 4, "prompt": 32, "new": 8}
    steps = ["gradient", "training", *(f"rollout:{name}" for name in args.engines.split(","))]
    console, results = Console(), {}
    for name in steps:
        with console.status(name):
            results[name] = launched(name, spec)
    shown(results, spec, console)
    if args.out:
        args.out.write_text(json.dumps({"spec": spec, "results": results}, indent=1))
    return int(any("error" in result or result.get("ok") is False for result in results.values()))


def launched(name: str, spec: Spec) -> Result:
    """What a step measured, in a process of its own; {"error": ...} if it failed."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        if name == "gradient":
            failed, result = gradients(spec, Path(folder) / "updates.pt")
        else:
            command = [sys.executable, __file__, "--step", name, json.dumps(spec), str(out)]
            failed = ranks.launch(command, 1)
            result = json.loads(out.read_text()) if not failed else {}
    if failed:
        result = {"error": failed.text.strip().split("\n")[-1] or f"exit code {failed.code}"}
    return {**result, "seconds": time.perf_counter() - began}


def gradients(spec: Spec, out: Path) -> tuple[ranks.Failure | None, Result]:
    """Distances of the strategy's updates from plain gradients, in units of their norms."""
    cases = {}
    for name in NAMES:
        known = {field.name for field in fields(registry.load("algorithms", name).Config)}
        keys = {key: value for key, value in STRONG.items() if key in known}
        cases[name] = {"algo": name, "keys": keys, "micro": 2}
    worker = ROOT / "tests/ranks/updates.py"
    kind = "cpu" if spec["cpu"] else "cuda"
    failed = ranks.launch(
        [sys.executable, str(worker), "zero3", str(out), json.dumps(cases), kind], 1
    )
    if failed:
        return failed, {}
    world, made, distances = toy_world(), torch.load(out), {}
    for name, case in cases.items():
        algorithm = make_algorithm(name, world.codec, **case["keys"])
        module = world.module(algorithm, world.iteration(algorithm))
        plain = gradient(module, module.samples(module.iteration), 1)
        distances[name] = float((made[name]["update"] - plain).norm() / plain.norm())
    return None, {"distance": distances, "ok": max(distances.values()) < GRADIENT}


# ---- in a rank


def step(name: str, spec: str, out: str) -> None:
    """Measure and write."""
    quiet()
    work, _, engine = name.partition(":")
    known: dict[str, Callable[[Spec], Result]] = {
        "training": training,
        "rollout": lambda spec: rollout(spec, engine),
    }
    result = known[work](json.loads(spec))
    Path(out).write_text(json.dumps(result))
    disconnect()


def begun(spec: Spec, checkpointing: bool) -> tuple[RunConfig, Shards, Policy]:
    """A random model in bfloat16, of which this rank holds the only share."""
    kind = "cpu" if spec["cpu"] else "cuda"
    config = RunConfig(
        model=ModelSection(dtype="bfloat16", gradient_checkpointing=checkpointing),
        optim=OptimSection(lr=1e-6),
        trainer=TrainerSection(strategy="zero3", devices=1, updates=3, micro_batches=spec["rows"]),
    )
    connect(config, kind)
    shards = Shards(config, kind)
    return config, shards, Policy(shards.load(lambda: made(spec, shards.device)), checkpointing)


def made(spec: Spec, device: torch.device) -> PreTrainedModel:
    """Qwen2 of that size, on the device."""
    width, inner, layers, heads, pairs = SIZES[spec["size"]]
    config = Qwen2Config(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=pairs,
        vocab_size=151_936,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with device:
        return Qwen2ForCausalLM(config).to(torch.bfloat16)


class Fixed(PolicyModule):
    """Trains on rows that are there already."""

    rows: Sequence[Sample]

    def samples(self, it: Iteration) -> list[Sample]:
        return list(self.rows)


class Clock(L.Callback):
    """Seconds of each update, and the memory of the largest one."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.iteration = Iteration(len(self.seconds), [], Metrics())
        self.began = now()

    def on_train_batch_end(self, *_: Any) -> None:
        self.ended = now()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seconds.append(self.ended - self.began)


def training(spec: Spec) -> Result:
    """Updates of ``rows`` rows of ``length`` tokens, half of them trained, a row a micro-batch."""
    config, shards, policy = begun(spec, checkpointing=True)
    tokenizer = load_tokenizer("tiny")
    module = Fixed(policy, make_algorithm("grpo", Codec(tokenizer)), config, None)  # type: ignore[arg-type]
    length, trained = spec["length"], spec["length"] // 2
    draw = torch.Generator().manual_seed(0)
    module.rows = [
        Sample(
            ids=torch.randint(151_936, (length,), generator=draw),
            mask=torch.arange(length) >= length - trained,
            turn=torch.zeros(trained, dtype=torch.long),
            engine_logprobs=torch.zeros(trained),
            credits={"actor": Credit(torch.ones(trained), torch.ones(trained))},
        )
        for _ in range(spec["rows"])
    ]
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu" if spec["cpu"] else "gpu",
        devices=1,
        strategy=Zero3Strategy(shards.config),
        max_epochs=config.trainer.updates,
        accumulate_grad_batches=config.trainer.micro_batches,
        gradient_clip_val=config.optim.clip,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module)
    parameters = sum(int(getattr(p, "ds_numel", p.numel())) for p in policy.parameters())
    width, _, layers, *_ = SIZES[spec["size"]]
    speed = spec["rows"] * length / min(clock.seconds[1:])
    work = (6 * parameters + 6 * layers * width * length) * speed
    peak = None if spec["cpu"] else peak_of(torch.cuda.get_device_name())
    return {
        "parameters": parameters,
        "tokens_per_s": speed,
        "seconds_per_update": clock.seconds,
        "mfu": work / peak if peak else None,
        "peak_gib": 0 if spec["cpu"] else torch.cuda.max_memory_allocated() / 2**30,
    }


def rollout(spec: Spec, name: str) -> Result:
    """Random prompts continued at T = 1, and the same tokens scored by the policy."""
    if name == "vllm" and not find_spec("vllm"):
        return {"error": "the package vllm is missing"}
    _, shards, policy = begun(spec, checkpointing=False)
    policy.requires_grad_(False)
    shards.frozen(policy)
    tokenizer, device = load_tokenizer("tiny"), shards.device
    host = Host(
        policy,
        lambda: Policy(plain_copy(policy.model, device)),
        tokenizer,
        device,
        spec["prompt"] + spec["new"],
        spec["prompts"],
    )
    engine: Engine = (
        VLLMEngine.of(VLLMConfig(), host) if name == "vllm" else HFEngine.of(HFConfig(), host)
    )
    engine.sync_weights(acting_weights(policy.model), 1)
    draw = torch.Generator().manual_seed(1)
    seconds = []
    for again in range(2):  # the first call warms up
        ids = torch.randint(len(tokenizer), (spec["prompts"], spec["prompt"]), generator=draw)
        prompts = [
            Prompt(tuple(row), spec["new"], 1.0, seed=2 * i + again)
            for i, row in enumerate(ids.tolist())
        ]
        began = now()
        done = engine.generate(prompts)
        seconds.append(now() - began)
    pairs = zip(prompts[:8], done[:8], strict=True)
    gaps = torch.cat([torch.tensor(c.logprobs) - log_probs(policy, p, c) for p, c in pairs])
    engine.close()
    sampled = sum(len(c.ids) for c in done)
    return {
        "tokens_per_s": sampled / seconds[-1],
        "calls_s": seconds,
        "mismatch_mean": float(gaps.abs().mean()),
        "mismatch_max": float(gaps.abs().max()),
        "ok": float(gaps.abs().mean()) < MISMATCH,
        "peak_gib": 0 if spec["cpu"] else torch.cuda.max_memory_allocated() / 2**30,
    }


def now() -> float:
    """Seconds, once the GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_of(device: str) -> float | None:
    """Operations per second, if the GPU is known."""
    return next((peak for name, peak in PEAK.items() if name in device), None)


def shown(results: dict[str, Result], spec: Spec, console: Console) -> None:
    """A table of all steps."""
    where = "CPU" if spec["cpu"] else torch.cuda.get_device_name()
    table = Table(title=f"Qwen2 {spec['size']}, random weights, {where}", pad_edge=False)
    for column in ("step", "result", "tokens/s", "MFU", "peak GiB", "s"):
        table.add_column(column, justify="left" if column in ("step", "result") else "right")
    for name, r in results.items():
        if "error" in r:
            said = f"failed: {r['error']}"
        elif "distance" in r:
            said = ", ".join(f"{algo} {x:.1e}" for algo, x in r["distance"].items())
        elif "mismatch_mean" in r:
            said = f"log-probs differ by {r['mismatch_mean']:.1e}, at most {r['mismatch_max']:.1e}"
        else:
            said = f"{r['parameters'] / 1e9:.2f} B parameters"
        table.add_row(
            name,
            said,
            f"{r['tokens_per_s']:,.0f}" if "tokens_per_s" in r else "",
            f"{r['mfu']:.0%}" if r.get("mfu") else "",
            f"{r['peak_gib']:.1f}" if r.get("peak_gib") else "",
            f"{r['seconds']:.0f}",
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
