"""The folder of a policy is replaced as a whole."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rsipo_lightning.errors import CheckpointError
from rsipo_lightning.policy import TINY, load_model, load_tokenizer, save_policy


@pytest.fixture(scope="module")
def parts() -> Any:
    return load_model("tiny"), load_tokenizer("tiny")


def test_nothing_of_a_killed_run_is_in_it(parts: Any, tmp_path: Path) -> None:
    part = tmp_path / "policy.part"
    part.mkdir()
    (part / "pytorch_model.bin").write_text("of another model")
    save_policy(*parts, tmp_path / "policy")
    names = {path.name for path in (tmp_path / "policy").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert "pytorch_model.bin" not in names
    save_policy(*parts, tmp_path / "policy")
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_a_kill_loses_neither_the_old_nor_the_new_one(
    parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, rename = tmp_path / "policy", Path.rename
    save_policy(*parts, folder)
    (folder / "mine").touch()

    def killed(self: Path, target: Path) -> Any:
        if target == folder:
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            save_policy(*parts, folder)
    assert (tmp_path / "policy.old" / "mine").exists()
    AutoTokenizer.from_pretrained(tmp_path / "policy.part")
    save_policy(*parts, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


class Nothing:
    """In the place of weights, which are larger than a tokenizer."""

    def save_pretrained(self, folder: Path, state_dict: None) -> None:
        folder.mkdir()


def test_only_a_full_disk_is_told_to_make_room(parts: Any, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (TINY / "tokenizer.json").stat().st_size // 2
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"policy: File too large.*; make room"):
            save_policy(Nothing(), parts[1], tmp_path / "policy")  # type: ignore[arg-type]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(AttributeError):
        save_policy(Nothing(), None, tmp_path / "policy")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
