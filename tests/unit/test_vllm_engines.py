"""What the engines vllm and vllm_server do where there is no vLLM. With it: tests/vllm."""

from __future__ import annotations

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rsipo_lightning.cli import fit_main
from rsipo_lightning.codec import Codec
from rsipo_lightning.composing import compose
from rsipo_lightning.engines.vllm import VLLMConfig, VLLMEngine, completion, describe, ties
from rsipo_lightning.engines.vllm_server import PROBE, VLLMServerConfig, VLLMServerEngine, parts
from rsipo_lightning.errors import ConfigError, DataError, EngineError
from rsipo_lightning.memory import GIB, architecture, estimate
from rsipo_lightning.policy import Policy
from rsipo_lightning.protocols import Host
from rsipo_lightning.testing import byte_tokenizer, random_policy
from rsipo_lightning.types import Prompt

TOKENIZER = byte_tokenizer(["who directed the film? search it"] * 9)
IDS = TOKENIZER.encode(PROBE, add_special_tokens=False)
RUN = ["--algo", "grpo", "--env", "search"]


def host(policy: Policy, rank: int = 0) -> Host:
    return Host(policy, lambda: policy, TOKENIZER, torch.device("cpu"), 512, 8, rank)


@pytest.mark.skipif(bool(find_spec("vllm")), reason="vLLM is installed")
def test_a_missing_package_is_said_before_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit_main([*RUN, "--engine", "vllm", f"run.dir={tmp_path / 'run'}"]) == 2
    said = capsys.readouterr().err
    assert "the package vllm is missing; pip install 'rsipo-lightning[vllm]'" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(
            (f"engine.{key}", x)
            for key in ("memory_share", "cache_gib", "tolerance")
            for x in (-1, 1e30)
        ),
        ("engine.memory_share", 0),
        ("engine.memory_share", "nan"),
    ],
)
def test_numbers_that_make_no_sense(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        compose(algo="grpo", env="search", engine="vllm", overrides=[f"{key}={value}"])


@pytest.mark.parametrize("key", ["timeout_s", "retries", "concurrency", "tolerance"])
@pytest.mark.parametrize("value", [-1, 10**30])
def test_numbers_of_the_server_that_make_no_sense(key: str, value: Any) -> None:
    over = [f"engine.{key}={value}"]
    with pytest.raises(ConfigError, match=f"engine.{key}"):
        compose(algo="grpo", env="search", engine="vllm_server", overrides=over)


def test_vllm_gets_no_defaults_of_the_model(tmp_path: Path) -> None:
    policy = random_policy(len(TOKENIZER))
    policy.model.generation_config.top_k = 3
    describe(host(policy), str(tmp_path))
    names = {path.name for path in tmp_path.iterdir()}
    assert {"config.json", "tokenizer.json"} <= names
    assert not {"generation_config.json", "model.safetensors"} & names
    made = json.loads((tmp_path / "config.json").read_text())
    assert made["architectures"] == ["Qwen2ForCausalLM"]
    assert policy.model.config.architectures is None  # another config is written


def test_ties_are_found() -> None:
    assert ties(random_policy(64).model) == {"model.embed_tokens.weight": ["lm_head.weight"]}


def test_parts_hold_no_more_than_their_limit() -> None:
    """But for a weight that is larger alone."""
    named = [(str(n), nn.Parameter(torch.zeros(n))) for n in (3, 4, 9, 2, 2, 8)]
    assert [list(part) for part in parts(named, 32)] == [["3", "4"], ["9"], ["2"], ["8"]]
    (part,) = parts(named[:1], 32)
    assert not part["3"].requires_grad


def test_a_turn_that_ends_for_another_reason_is_refused() -> None:
    prompt = Prompt((1,), 4, 1.0, 0, stop_ids=(7,))
    assert not completion(prompt, [5, 7], [0.0, 0.0], "stop", TOKENIZER, 1).truncated
    assert completion(prompt, [5, 6], [0.0, 0.0], "length", TOKENIZER, 1).truncated
    for ids, reason in (([5, 9], "stop"), ([5], "abort"), ([], "abort")):
        with pytest.raises(EngineError, match="for a reason of its own"):
            completion(prompt, ids, [0.0] * len(ids), reason, TOKENIZER, 1)


def test_an_engine_sleeps_from_its_start_to_the_first_weights() -> None:
    """On a GPU. The cache comes after the weights, which may need its place while they are sent."""
    done: list[str] = []

    class Sleeper:
        def sleep(self, level: int) -> None:
            done.append(f"sleep {level}")

        def wake_up(self, tags: list[str]) -> None:
            done.append(f"wake {tags}")

        def collective_rpc(self, name: str, kwargs: dict[str, Any]) -> None:
            done.append(f"{name} {len(list(kwargs['weights_iterator']))}")

        def reset_prefix_cache(self) -> bool:
            done.append("drop")
            return True

    policy = random_policy(len(TOKENIZER))
    engine = VLLMEngine(Sleeper(), host(policy), sleeps=True)
    engine.rest()
    with pytest.raises(EngineError, match="sleeps until it gets weights"):
        engine.generate([Prompt((1,), 4, 1.0, 0)])
    named = list(policy.model.named_parameters())
    reload = f"reload_weights {len(named) + 1}"  # the tied head too
    woken = ["wake ['weights']", reload, "wake ['kv_cache']", "drop"]
    for version in (1, 2):
        engine.sync_weights(named, version)
    assert done == ["sleep 2", *woken, reload, "drop"]


# ---- a server


class Vllm:
    """Answers as ``vllm serve`` does; what a test changes is broken."""

    def __init__(self, server: Any) -> None:
        self.tokens, self.longest, self.dev, self.raw = IDS, 4096, True, False
        self.success = True
        self.reloads: list[list[str]] = []
        self.url, self.send = server.url, server.send
        server.answer = self.answer

    def answer(self, handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> Any:
        if handler.path == "/tokenize":
            said: Any = {"tokens": self.tokens, "max_model_len": self.longest}
        elif handler.path == "/v1/completions":
            cold = request["temperature"] == 0.05 and not self.raw
            choice = {"token_ids": [9], "finish_reason": "length"}
            said = {
                "choices": [{**choice, "logprobs": {"token_logprobs": [-0.01 if cold else -2.5]}}]
            }
        elif not self.dev:
            return self.send(handler, {"detail": "Not Found"}, 404)
        elif handler.path == "/collective_rpc":
            folder = Path(request["kwargs"]["weights_path"])
            self.reloads.append(sorted(path.name for path in folder.iterdir()))
            said = {"results": [None]}
        else:
            assert handler.path == "/reset_prefix_cache"
            said = {"success": self.success}
        self.send(handler, said)


@pytest.fixture
def vllm(chat_server: Any) -> Vllm:
    return Vllm(chat_server)


def made(url: str, rank: int = 0, **keys: Any) -> VLLMServerEngine:
    config = VLLMServerConfig(url=url, timeout_s=5, retries=0, **keys)
    return VLLMServerEngine.of(config, host(random_policy(len(TOKENIZER)), rank))


BROKEN: dict[str, tuple[Callable[[Vllm], None], str]] = {
    "tokenizer": (lambda v: setattr(v, "tokens", [1]), "tokenizer is not that of the policy"),
    "length": (lambda v: setattr(v, "longest", 100), "start it with --max-model-len 512"),
    "no weights": (lambda v: setattr(v, "dev", False), "takes no weights; start it as VLLM_SER"),
    "temperature": (lambda v: setattr(v, "raw", True), "leave the temperature out; start it as"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_what_a_server_lacks_is_said_at_once(vllm: Vllm, fault: str) -> None:
    made(vllm.url)
    change, says = BROKEN[fault]
    change(vllm)
    with pytest.raises((ConfigError, DataError), match=says) as caught:
        made(vllm.url)
    assert str(caught.value).startswith("engine.url=http://127.0.0.1:")
    assert "\n" not in str(caught.value)


def test_a_server_that_is_not_there_or_is_another(chat_server: Any) -> None:
    with pytest.raises(DataError, match=r"^engine.url=http://127.0.0.1:9/v1: .*refused; is a ser"):
        made("http://127.0.0.1:9/v1")
    chat_server.answer = lambda handler, request: chat_server.send(handler, b"<html>")
    with pytest.raises(DataError, match="no JSON came from /tokenize"):
        made(chat_server.url)
    config = VLLMServerConfig()
    with pytest.raises(ConfigError, match=r"engine\.url is missing"):
        VLLMServerEngine.of(config, host(random_policy(64)))
    with pytest.raises(ConfigError, match=r"engine\.folder=/no/where: there is no such folder"):
        made(chat_server.url, folder="/no/where")


def test_the_first_rank_alone_sends(vllm: Vllm, tmp_path: Path) -> None:
    """The others read the weights to the end: each is gathered by all."""
    named = list(random_policy(64).model.named_parameters())
    read = 0

    def weights() -> Any:
        nonlocal read
        for pair in named:
            read += 1
            yield pair

    made(vllm.url, rank=1, folder=str(tmp_path)).sync_weights(weights(), 3)
    assert (read, vllm.reloads) == (len(named), [])
    first = made(vllm.url, folder=str(tmp_path))
    first.sync_weights(weights(), 3)
    assert (read, vllm.reloads) == (2 * len(named), [["part-00000.safetensors"]])
    assert first.policy_version == 3
    assert not list(tmp_path.iterdir())
    vllm.success = False
    with pytest.raises(EngineError, match="the prefix cache was not dropped"):
        first.sync_weights(weights(), 4)
    assert first.policy_version == 3
    assert not list(tmp_path.iterdir())


def test_memory_of_a_gpu() -> None:
    """vLLM takes its share while it generates; a server takes none."""
    shape = architecture("tiny")

    def engine(name: str, *keys: str) -> dict[str, int]:
        config = compose(algo="grpo", env="search", engine=name, overrides=keys)
        terms = estimate(config, shape, 80 * GIB).terms
        (term,) = [t for t in terms if t.name == "engine"]
        assert not {"KV cache", "sampling"} & {t.name for t in terms}
        return {"rollout": term.rollout, "training": term.training}

    assert engine("vllm") == {"rollout": 40 * GIB, "training": 0}
    assert engine("vllm", "engine.sleep=false") == {"rollout": 40 * GIB, "training": 40 * GIB}
    assert engine("vllm_server") == {"rollout": 0, "training": 0}
    least = VLLMConfig(memory_share=0.1).memory(weights=9 * GIB, row=GIB, gpu=80 * GIB)
    assert least == (10 * GIB, 0)


def test_stop_strings_and_codec_are_those_of_the_package() -> None:
    """PROBE is text of an episode, so a server with another tokenizer is seen."""
    assert Codec(TOKENIZER).decode(IDS) == PROBE
