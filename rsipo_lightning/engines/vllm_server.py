"""A running ``vllm serve``: prompts go by HTTP, weights as files that both sides see.

    VLLM_SERVER_DEV_MODE=1 vllm serve FOLDER --logprobs-mode processed_logprobs

The server starts from a folder of the policy's architecture with its tokenizer; its weights are
replaced before the first prompt. One run to a server: others would generate with its weights.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import urlsplit

from safetensors.torch import save_file
from torch import Tensor

from rsipo_lightning.checks import within
from rsipo_lightning.engines.vllm import completion, sampling, ties, told, with_ties
from rsipo_lightning.errors import ConfigError, DataError, EngineError
from rsipo_lightning.protocols import Host
from rsipo_lightning.types import Completion, Prompt
from rsipo_lightning.web import Client, Reply, check_url, excerpt, refusal

START = "VLLM_SERVER_DEV_MODE=1 vllm serve FOLDER --logprobs-mode processed_logprobs"
PART = 1 << 29  # bytes of weights in memory before they are written; a larger one alone
PROBE = "Who directed the film? I search for it, <search> 42 </search>."
COLD = 0.05  # at this temperature the likeliest token is almost certain


@dataclass
class VLLMServerConfig:
    """Keys of ``--engine vllm_server``."""

    url: str | None = None  # http://host:port of the server
    folder: str = "/dev/shm"  # for the weights of an update; the server sees it by the same path
    timeout_s: float = 600.0  # of a request: one turn of one episode, or taking over the weights
    # after a failed connection, a timeout or a 5xx. Two seconds in all: a server that was started
    # again has its old weights, and must not be found
    retries: int = 3
    concurrency: int = 128  # requests at the same time
    # log-probs may differ from the policy's by this, see freshness.py; 0: by the policy's dtype
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        if self.url is not None:
            check_url("engine.url", self.url)
        within("engine.timeout_s", self.timeout_s, 1, 1e5)
        within("engine.retries", self.retries, 0, 5)
        within("engine.concurrency", self.concurrency, 1, 256)
        within("engine.tolerance", self.tolerance, 0, 100)

    def memory(self, weights: int, row: int, gpu: int) -> tuple[int, int]:
        """Nothing: the server has GPUs of its own."""
        return 0, 0


class VLLMServerEngine:
    """``Engine`` over HTTP. Every rank generates; the first one sends the weights."""

    Config = VLLMServerConfig
    own = False

    def __init__(self, config: VLLMServerConfig, host: Host) -> None:
        """Sends nothing."""
        assert config.url
        self.config, self.tokenizer, self.first = config, host.tokenizer, host.rank == 0
        self.policy_version = 0
        self._ties = ties(host.policy.model)
        self._stopped = Event()

    @classmethod
    def of(cls, config: VLLMServerConfig, host: Host) -> VLLMServerEngine:
        """ConfigError or DataError unless the server is there and can do what is needed."""
        if not config.url:
            raise ConfigError(
                f"engine.url is missing: the address of a server started with {START}"
            )
        if not Path(config.folder).is_dir():
            raise ConfigError(f"engine.folder={config.folder}: there is no such folder")
        engine = cls(config, host)
        try:
            engine._check(host)
        except EngineError as error:
            what = str(error).removeprefix(f"{config.url}: ")
            raise DataError(
                f"engine.url={config.url}: {what}; is a server there? {START}"
            ) from error
        return engine

    def _check(self, host: Host) -> None:
        where = f"engine.url={self.config.url}"
        said = self._json("/tokenize", {"prompt": PROBE, "add_special_tokens": False}, retries=0)
        if said.get("tokens") != self.tokenizer.encode(PROBE, add_special_tokens=False):
            raise DataError(f"{where}: the server's tokenizer is not that of the policy")
        if (longest := said.get("max_model_len", 0)) < host.context:
            raise ConfigError(
                f"{where}: the server reads {longest} tokens, rollout.context={host.context}; "
                f"start it with --max-model-len {host.context}"
            )
        if self._post("/reset_prefix_cache", {}, retries=0).status == 404:
            raise ConfigError(f"{where}: takes no weights; start it as {START}")
        ids = tuple(self.tokenizer.encode(PROBE, add_special_tokens=False))
        warm, cold = (self._ask(Prompt(ids, 1, t, 0), retries=0) for t in (0.0, COLD))
        if warm.ids == cold.ids and abs(warm.logprobs[0] - cold.logprobs[0]) < 1e-6:
            raise ConfigError(
                f"{where}: its log-probs leave the temperature out; start it as {START}"
            )

    def generate(self, prompts: Sequence[Prompt]) -> list[Completion]:
        """Continue each prompt; same order. A request that failed is sent again: it is seeded."""
        if not prompts:
            return []
        self._stopped.clear()
        with ThreadPoolExecutor(min(len(prompts), self.config.concurrency)) as pool:
            try:
                return list(pool.map(self._ask, prompts))
            except BaseException:
                self._stopped.set()
                pool.shutdown(cancel_futures=True)
                raise

    def _ask(self, prompt: Prompt, retries: int | None = None) -> Completion:
        said = self._json(
            "/v1/completions",
            {**sampling(prompt), "prompt": list(prompt.ids), "return_token_ids": True},
            retries,
        )
        try:
            choice = said["choices"][0]
            ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            made = [(int(t), float(lp)) for t, lp in zip(ids, logprobs, strict=True)]
            reason = str(choice["finish_reason"])
        except (LookupError, TypeError, ValueError) as error:
            raise EngineError(
                f"{self.config.url}: no token ids with log-probs came; is it vLLM 0.32 or newer?"
            ) from error
        return completion(
            prompt,
            [t for t, _ in made],
            [lp for _, lp in made],
            reason,
            self.tokenizer,
            self.policy_version,
        )

    def sync_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Write the weights for the server and let it read them; then it drops its caches.

        In memory are ``PART`` bytes or one larger weight, in the folder all of them.
        """
        if not self.first:
            for _ in weights:
                pass
            self.policy_version = version
            return
        with (
            told("cannot get the new weights"),
            tempfile.TemporaryDirectory(prefix="rsipo-", dir=self.config.folder) as folder,
        ):
            for k, part in enumerate(parts(with_ties(weights, self._ties), PART)):
                save_file(part, Path(folder, f"part-{k:05}.safetensors"))
            self._json(
                "/collective_rpc",
                {"method": "reload_weights", "kwargs": {"weights_path": folder}},
            )
            if not self._json("/reset_prefix_cache", {}).get("success"):
                raise EngineError(
                    f"{self.config.url}: the prefix cache was not dropped; another run's requests?"
                )
        self.policy_version = version

    def rest(self) -> None:
        """The server has memory of its own."""

    def close(self) -> None:
        """The server goes on; requests that wait for a retry do not."""
        self._stopped.set()

    def _json(self, path: str, request: dict[str, Any], retries: int | None = None) -> Any:
        reply = self._post(path, request, retries)
        why = refusal(reply)
        if not why:
            try:
                if isinstance(said := json.loads(reply.body), dict):
                    return said
            except ValueError:
                pass
            why = f"no JSON came from {path}: {excerpt(reply.body)}"
        raise EngineError(f"{self.config.url}: {why}")

    def _post(self, path: str, request: dict[str, Any], retries: int | None = None) -> Reply:
        config = self.config
        assert config.url
        root = config.url.rstrip("/").removesuffix("/v1")
        client = Client(config.url, urlsplit(root).path + path, config.timeout_s, EngineError)
        body = json.dumps(request).encode()
        return client.post(body, config.retries if retries is None else retries, self._wait)

    def _wait(self, seconds: float) -> None:
        if self._stopped.wait(seconds):
            raise EngineError(f"{self.config.url}: stopped")


def parts(weights: Iterable[tuple[str, Tensor]], limit: int) -> Iterable[dict[str, Tensor]]:
    """Copies on the CPU, in parts of at most so many bytes or one larger weight."""
    part: dict[str, Tensor] = {}
    filled = 0
    for name, weight in weights:
        size = weight.numel() * weight.element_size()
        if part and filled + size > limit:
            yield part
            part, filled = {}, 0
        part[name] = weight.detach().to("cpu", copy=True).contiguous()
        filled += size
    if part:
        yield part
