"""The default of --env alfworld: the shipped policy, in the episodes of its lessons."""

from __future__ import annotations

from pathlib import Path

from rsipo_lightning.composing import SFT, compose, compose_kind


def test_the_default_plays_as_the_lessons_did() -> None:
    for algo in ("grpo", "rsipo"):
        config = compose(algo=algo, env="alfworld")
        assert config.groups["model"] == config.model.path == "tiny_alfworld"
        env = config.env
        assert (env.max_steps, env.history, env.context) == (30, 2, "window")
        assert (env.prompt, env.admissible) == ("compact", "always")
        assert (config.rollout.tasks, config.rollout.group) == (4, 8)
        assert config.eval.episodes >= 100
    assert compose(algo="grpo", env="alfworld_30").model.path == "tiny_alfworld"
    assert compose(algo="grpo", env="search_hard").model.path == "tiny"


def test_lessons_start_from_random_weights_whatever_else_a_file_says(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("model: {dtype: float32}")
    flags = {"env": "alfworld", "sft": "tiny_alfworld"}
    for given in (None, file):
        config = compose_kind(SFT, flags, given).config
        assert (config.groups["model"], config.model.path) == ("tiny", "untrained_alfworld")
        assert config.optim.schedule == "linear"  # what was tuned for them is theirs


def test_another_model_does_not_get_its_settings(tmp_path: Path) -> None:
    """However it is named; a recipe says nothing of a run that is not of stage 1."""
    for keys in (["model.path=/some/llm"], ["model={path: /some/llm}"]):
        assert compose(algo="grpo", env="alfworld", overrides=keys).groups["model"] == "hf"
    file = tmp_path / "mine.yaml"
    file.write_text("groups: {algo: grpo, env: alfworld, sft: tiny_alfworld}")
    assert compose(config=file).groups["model"] == "tiny_alfworld"
