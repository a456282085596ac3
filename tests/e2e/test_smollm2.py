"""A real language model: fetched, converted and played, as ``make smollm2`` and a user do it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rsipo_lightning.cli import eval_main, fit_main
from rsipo_lightning.codec import Codec
from rsipo_lightning.errors import DataError
from rsipo_lightning.policy import load_tokenizer
from rsipo_lightning.smollm2 import convert, main


@pytest.mark.slow
def test_smollm2_is_converted_and_plays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    try:
        convert(folder)
    except DataError as error:
        pytest.skip(str(error))
    assert os.listdir(tmp_path) == ["model"]
    codec = Codec(load_tokenizer(str(folder)))
    text = "naïve <search>2024</search> 日本"
    assert codec.decode(codec.encode(text)) == text
    assert codec.prefix_stable
    small = ["env.max_steps=1", "rollout.max_new_tokens=8"]
    argv = ["--env", "search", "--model", "smollm2", f"model.path={folder}", *small]
    assert eval_main([str(folder), *argv, "--episodes", "2"]) == 0
    assert "2 episodes in" in capsys.readouterr().out
    assert main(["--out", str(folder)]) == 0  # not made again
    assert "is there already" in capsys.readouterr().out


def test_a_missing_model_folder_says_how_to_make_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert fit_main(["--algo", "grpo", "--env", "search", "--model", "smollm2"]) == 2
    assert "make smollm2" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []
