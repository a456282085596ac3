"""Folders that are no model, or not one model: one line, exit code 2, nothing written."""

import json
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from rsipo_lightning import policy
from rsipo_lightning.cli import eval_main, fit_main
from rsipo_lightning.policy import TINY

VOCABULARY = 2131  # of the tiny policy


def lacks(*names: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return change


def holds(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def config(**keys: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))

    return change


def other(make: Callable[[], PreTrainedModel]) -> Callable[[Path], None]:
    return lambda folder: make().save_pretrained(folder)


def bert() -> PreTrainedModel:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=4096, **small))


def t5() -> PreTrainedModel:
    return T5ForConditionalGeneration(T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1))


def resized(rows: int) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(TINY)
    model.resize_token_embeddings(rows)
    model.config.update({"bos_token_id": None, "eos_token_id": None, "pad_token_id": None})
    return model


def broken() -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(TINY)
    torch.nn.init.constant_(model.model.norm.weight, torch.nan)
    return model


HALF = (TINY / "model.safetensors").read_bytes()[:1_000_000]
NO_TOKENIZER = lacks("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
CASES = {
    "no tokenizer": (NO_TOKENIZER, "the tokenizer of 'model' has no vocabulary"),
    "no tokenizer.json": (lacks("tokenizer.json"), "no vocabulary; is tokenizer.json missing?"),
    "half a tokenizer": (holds("tokenizer.json", b"{"), "no tokenizer could be loaded from 'mod"),
    "no chat template": (lacks("chat_template.jinja"), "has no chat template; use an instruct mod"),
    "broken template": (holds("chat_template.jinja", b"{% for %}"), "the chat template of the tok"),
    "constant template": (holds("chat_template.jinja", b"hello"), "drops, moves or repeats conten"),
    "no config": (lacks("config.json"), "model is not the folder of a model: no config.json"),
    "half a config": (holds("config.json", b"{"), "is not a valid JSON file"),
    "no weights": (lacks("model.safetensors"), "no model could be loaded from 'model': Error no f"),
    "half the weights": (holds("model.safetensors", HALF), "no model could be loaded from 'model'"),
    "empty weights": (holds("model.safetensors", b""), "no model could be loaded from 'model'"),
    "weights of a smaller model": (
        config(num_hidden_layers=4, layer_types=None),
        "12 tensors that",
    ),
    "weights of another shape": (
        config(intermediate_size=512),
        "or have another shape, e.g. model",
    ),
    "weights that are NaN": (other(broken), "are no numbers; broken weights"),
    "vocabulary of another model": (
        other(lambda: resized(2000)),
        "the tokenizer of 'model' has ids up to 2130, its model only 2000 embeddings",
    ),
    "shorter than the context": (
        config(max_position_embeddings=128),
        "rollout.context=4096: the model of 'model' reads at most 128 tokens",
    ),
    "code of its own": (
        config(model_type="mine", auto_map={"AutoConfig": "x.C", "AutoModelForCausalLM": "x.M"}),
        "model.path: 'model' needs Python code of its own, which is never run",
    ),
    "a value of another type": (
        config(max_position_embeddings="many"),
        "no config could be loaded from 'model': Validation error for field 'max_position_embedd"
        "ings': TypeError: Field 'max_position_embeddings' expected int, got str",
    ),
    "no decoder": (other(bert), "BertLMHeadModel changes its logits after the output embedd"),
    "encoder and decoder": (other(t5), "no model could be loaded from 'model': Unrecognized"),
}


@pytest.fixture
def says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """What is said of a ``model.path``, in one line and with nothing written."""
    monkeypatch.chdir(tmp_path)

    def call(path: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        capsys.readouterr()
        argv = ["--algo", "grpo", "--env", "search", "--model", "tiny", f"model.path={path}"]
        assert fit_main(argv) == 2
        out, err = capsys.readouterr()
        (line,) = err.splitlines()
        assert line.startswith("rsipo-fit: error: ")
        assert out == ""
        assert sorted(tmp_path.rglob("*")) == before
        return line

    return call


@pytest.mark.parametrize("case", CASES)
def test_a_folder(case: str, tmp_path: Path, says: Callable[..., str]) -> None:
    change, expected = CASES[case]
    shutil.copytree(TINY, tmp_path / "model")
    change(tmp_path / "model")
    assert expected in says("model")


def test_eval_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(TINY, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    assert eval_main([str(tmp_path / "model"), "--env", "search"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is tokenizer.json missing?" in line


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("./nowhere", "model.path: there is no folder ./nowhere"),
        ("/no/where", "model.path: there is no folder /no/where"),
        ("a/b/c", "model.path: there is no folder a/b/c"),
        ("./" + 300 * "x", "model.path: there is no folder ./xxx"),
        (300 * "x", "there is no folder 'xxx"),
        ("file", "model.path: file is a file; give the folder that it is in"),
        ("some/llm", "there is no folder 'some/llm', no such model in the cache of the hub, and "),
    ],
)
def test_a_path_that_is_no_folder(
    path: str, expected: str, tmp_path: Path, says: Callable[..., str]
) -> None:
    (tmp_path / "file").touch()
    assert expected in says(path)


def test_a_hub_that_cannot_be_reached_is_given_up_soon(
    says: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without HF_HUB_OFFLINE: transformers alone takes a minute, and 20 lines."""
    from huggingface_hub import constants

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    policy._hub_answers.cache_clear()
    start = time.monotonic()
    try:
        assert f"http://127.0.0.1:{port} does not answer" in says("some/llm")
    finally:
        policy._hub_answers.cache_clear()
    assert time.monotonic() - start < 10
