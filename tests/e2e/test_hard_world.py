"""What the start policy of search_hard knows: little by itself, a lot with a good skill."""

from __future__ import annotations

from typing import Any

import pytest

from rsipo_lightning.build import actors
from rsipo_lightning.cli import fit_main, sft_main
from rsipo_lightning.composing import compose
from rsipo_lightning.sft import report


@pytest.fixture(scope="module")
def measured() -> Any:
    config = compose(algo="grpo", env="search_hard", model="tiny_hard")
    return report.figures(config, actors(config, ("val",)), per_type=60)


@pytest.mark.slow
def test_a_good_skill_lets_the_start_policy_succeed_and_no_other_kind_does(measured: Any) -> None:
    """Wide bounds: half of the intervals' width is about 3 points of 240 tasks."""
    assert 1 <= measured["none"]["all"] <= 10
    assert measured["procedural"]["all"] >= 50
    assert measured["misleading"]["all"] < 15
    assert measured["format"]["all"] < 15
    assert min(row["valid actions"] for row in measured.values()) > 95
    for kind in ("bridge2", "bridge3", "bridge4", "compare_bridge"):
        assert measured["procedural"][kind] > measured["none"][kind] + 15


@pytest.mark.slow
def test_the_skills_of_the_start_policy_are_valid_and_of_all_kinds(measured: Any) -> None:
    own = measured["its own"]
    assert own["valid skills"] > 90
    assert 15 <= own["procedural"] <= 50
    assert measured["none"]["all"] < own["all"] < measured["procedural"]["all"]


def test_the_path_of_a_shipped_policy_brings_its_preset() -> None:
    by_path = compose(algo="rsipo", env="search_hard", overrides=["model.path=tiny_hard"])
    by_name = compose(algo="rsipo", env="search_hard", model="tiny_hard")
    assert by_path.groups["model"] == "tiny_hard"
    assert by_path == by_name
    tiny = compose(algo="rsipo", env="search_hard", model="tiny")
    assert (by_name.optim.betas, by_name.env) == (tiny.optim.betas, tiny.env)
    assert by_name.rollout.max_new_tokens == tiny.rollout.max_new_tokens


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("env.types=[bridge5]", "env.types=bridge5: must be one of single, bridge2,"),
        ("env.types=[]", "env.types=[]: at least one type"),
        ("env.types=[bridge2,bridge2]", "at least one type, each once"),
        ("env.questions=q.jsonl", "env.types are of the built-in world"),
    ],
)
def test_types_that_make_no_sense_end_the_command(
    key: str, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert fit_main(["--algo", "grpo", "--env", "search_hard", key]) == 2
    assert says in capfd.readouterr().err


def test_an_unknown_mixture_ends_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert sft_main(["--env", "search", "--sft", "tiny", "sft.mixture=tin"]) == 2
    assert "sft.mixture=tin: must be one of tiny, tiny_hard" in capfd.readouterr().err
