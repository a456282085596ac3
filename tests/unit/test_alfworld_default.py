"""The default of --env alfworld: the shipped policy, in the episodes of its lessons."""

from __future__ import annotations

from rsipo_lightning.composing import compose


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
