"""Which runs make a comparison, and what is refused before one is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rsipo_lightning import registry
from rsipo_lightning.algorithms.grpo import GRPO
from rsipo_lightning.compare.cli import main
from rsipo_lightning.compare.plan import Arm, Setup, State, parse_arm, parse_seeds, plan
from rsipo_lightning.composing import compose, to_yaml
from rsipo_lightning.errors import ConfigError

SEARCH = {"env": "search"}
GRPO_ARM, RSIPO_ARM = Arm("grpo", "grpo"), Arm("rsipo", "rsipo")


class Still(GRPO[Any]):
    """Trains nothing."""

    @property
    def streams(self) -> dict[str, Any]:
        return {}


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(SEARCH, ("trainer.updates=30",), tmp_path / "out")


def test_arms_and_seeds_as_they_are_typed() -> None:
    arm = parse_arm("k2: rsipo algo.replays=2 env.questions='[a b.jsonl, c.jsonl]'")
    assert arm == Arm("k2", "rsipo", ("algo.replays=2", "env.questions=[a b.jsonl, c.jsonl]"))
    assert [parse_seeds(text) for text in ("2", "3,8", "7,")] == [[0, 1], [3, 8], [7]]


def test_each_arm_runs_with_each_seed(setup: Setup) -> None:
    runs = plan(setup, [GRPO_ARM, RSIPO_ARM], [0, 3], control=None)
    assert [arm.name for arm in runs] == ["grpo", "rsipo"]
    last = runs[RSIPO_ARM][1]
    assert (last.config.seed, last.config.trainer.updates) == (3, 30)
    assert last.folder == setup.out / "rsipo" / "s3"
    assert last.arguments(State.NEW) == [
        *("--env", "search", "--algo", "rsipo"),
        *("trainer.updates=30", "seed=3", f"run.dir={last.folder}"),
    ]
    assert last.arguments(State.STARTED) == ["--resume", str(last.folder)]


def test_a_folder_is_what_its_run_reads(tmp_path: Path) -> None:
    """Values of keys are YAML, in which " #" begins a comment."""
    setup = Setup(SEARCH, (), tmp_path / "a #1: b")
    (run,) = plan(setup, [GRPO_ARM], [0], control=None)[GRPO_ARM]
    overrides = [part for part in run.arguments(State.NEW) if "=" in part]
    assert compose(**SEARCH, algo="grpo", overrides=overrides).run.dir == str(run.folder)


@pytest.mark.parametrize(
    ("arms", "group"),
    [
        ([GRPO_ARM, RSIPO_ARM], 12),  # 8 rollouts and 4 replays
        ([RSIPO_ARM, Arm("more", "rsipo", ("algo.replays=6",))], 14),
        ([GRPO_ARM], None),  # no replays
        ([Arm("off", "rsipo", ("algo.skill=0", "algo.trust=false"))], None),  # none is played
    ],
)
def test_a_control_plays_as_many_episodes(setup: Setup, arms: list[Arm], group: int | None) -> None:
    runs = plan(setup, arms, [0], control="grpo")
    added = [of_arm[0] for arm, of_arm in runs.items() if arm not in arms]
    assert [run.config.rollout.group for run in added] == ([group] if group else [])
    assert [run.arm.name for run in added] == (["grpo-matched"] if group else [])


def test_an_arm_that_trains_nothing_stops_at_its_first_look(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.BUILTIN["algorithms"], "still", f"{__name__}:Still")
    monkeypatch.setattr(registry, "load", _loader(registry.load))
    runs = plan(setup, [GRPO_ARM, Arm("still", "still")], [0], control=None)
    assert [of_arm[0].config.trainer.updates for of_arm in runs.values()] == [30, 10]
    still = list(runs.values())[1][0]
    assert "trainer.updates=10" in still.arguments(State.NEW)


def _loader(load: Any) -> Any:
    """Tests are imported under no name that ``import_module`` would find."""
    return lambda kind, name: Still if name == "still" else load(kind, name)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--algos", "grpo"], "choose an environment: --env NAME"),
        (["--env", "search"], "name arms with --algos or --arm"),
        (["--env", "search", "--algos", "grpo,rsippo"], "did you mean 'rsipo'?"),
        (["--env", "search", "--algos", "grpo,grpo"], "two arms are called 'grpo'"),
        (["--env", "search", "--algos", "grpo", "--seeds", "x"], "--seeds x: give a number"),
        (["--env", "search", "--algos", "grpo", "--seeds", "0"], "at least one seed"),
        (["--env", "search", "--algos", "grpo", "--seeds", "3,3"], "each once"),
        (["--env", "search", "--algos", "grpo", "--jobs", "0"], "--jobs 0: must be at least 1"),
        (["--env", "search", "--algos", "grpo", "--budget", "s"], "must be one of updates, env_"),
        (["--env", "search", "--algos", "grpo", "--reference", "grp"], "did you mean 'grpo'?"),
        (["--env", "search", "--algos", "grpo", "--control-alg", "x"], "did you mean --control-a"),
        (
            ["--env", "search", "--algos", "grpo", "--updates", "2", "trainer.updates=1"],
            "--updates and trainer.updates=N say the same",
        ),
        (["--env", "search", "--arm", "x: sdar algo.bank=no.json"], "no skill bank 'no.json'"),
        (["--env", "search", "--algos", "grpo", "seed=1"], "seed=1: choose it with --seeds"),
        (["--env", "search", "--algos", "grpo", "run.dir=x"], "choose it with --out"),
        (["--env", "search", "--algos", "rsipo", "rollout.group=5"], "even number of at least 4"),
        (["--env", "search", "--algos", "grpo", "eval.episodes=0"], "needs test tasks"),
        (["--env", "search", "--arm", "grpo"], "is not 'NAME: ALGO key=value ...'"),
        (["--env", "search", "--arm", "x: grpo 'a"], "No closing quotation"),
        (["--env", "search", "--arm", "../x: grpo"], "its name becomes a folder"),
        (["--env", "search", "--arm", "compare.json: grpo"], "a folder beside compare.json"),
        (["--env", "search", "--arm", f"{'x' * 300}: grpo"], "at most 60 letters"),
        (["--env", "search", "--algos", "grpo", "--seeds", "9" * 5000], "give a number of seeds"),
        (["--env", "search", "--algos", "grpo", "--seeds", "1000000000"], "at most 1000"),
        (
            ["--env", "search", "--algos", "rsipo", "--control-algo", "rsipo"],
            "--control-algo rsipo: it plays 4 replays of a task itself",
        ),
        (
            ["--env", "search", "--algos", "grpo", "--arm", "x: grpo env.topk=3"],
            "arms must share env.topk: grpo has 1, x has 3",
        ),
        (
            ["--env", "search", "--algos", "grpo", "--arm", "x: grpo eval.temperature=0.5"],
            "arms must share eval.temperature",
        ),
        (
            ["--env", "search", "--algos", "grpo", "--arm", "x: grpo trainer.updates=9"],
            "arms must share trainer.updates: grpo has 60, x has 9",
        ),
    ],
)
def test_what_cannot_be_compared_is_one_line_and_writes_nothing(
    argv: list[str],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert says in err
    assert (out, err.count("\n")) == ("", 1)
    assert list(tmp_path.iterdir()) == []


def test_the_state_of_a_folder(setup: Setup) -> None:
    """Also of one whose run was killed before its first checkpoint, or finished earlier."""
    (run,) = plan(setup, [GRPO_ARM], [0], control=None)[GRPO_ARM]
    assert run.state() is State.NEW
    run.folder.mkdir(parents=True)
    (run.folder / "config.yaml").write_text(to_yaml(run.config))
    (run.folder / "run.json").write_text("{}")
    assert run.state() is State.NEW
    (run.folder / "run.json").write_text(json.dumps({"result": {"updates": 30, "after": {}}}))
    assert run.state() is State.DONE
    more = Setup(SEARCH, ("trainer.updates=30", "log.groups=0"), setup.out)
    (same,) = plan(more, [GRPO_ARM], [0], control=None)[GRPO_ARM]
    assert same.state() is State.DONE  # what is logged changes no result
    other = Setup(SEARCH, ("trainer.updates=30", "optim.lr=1e-3"), setup.out)
    (changed,) = plan(other, [GRPO_ARM], [0], control=None)[GRPO_ARM]
    with pytest.raises(ConfigError, match=r"run with optim.lr=0.0006, now it would be 0.001"):
        changed.state()
