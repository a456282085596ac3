"""ALFWorld through the commands: evaluations by game, and what is wrong with the games."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rsipo_lightning.cli import eval_main, fit_main, sft_main
from rsipo_lightning.environments.alfworld.games import write_game
from rsipo_lightning.environments.alfworld.generate import GeneratedGames
from rsipo_lightning.environments.alfworld.suite import AlfworldSuite

TINY = Path(__file__).parents[2] / "rsipo_lightning" / "models" / "tiny"
PER_SPLIT = 12  # two of each type


@pytest.fixture
def games(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the layout of the release."""
    monkeypatch.setenv("RSIPO_CACHE", str(tmp_path / "cache"))
    for split in ("train", "valid_train", "valid_seen"):
        for game in GeneratedGames(0).split(split)[:PER_SPLIT]:
            write_game(game, tmp_path / "games")
    return tmp_path / "games"


def spoil(files: list[Path]) -> None:
    """Such games are found to be broken when they are opened, not before."""
    for file in files:
        file.write_text(json.dumps(json.loads(file.read_text()) | {"grammar": "of its own"}))


def evaluate(out: Path, *argv: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The result and its episodes, of short games."""
    flags = ["--env", "alfworld", "--model", "tiny", "env.max_steps=2", "--out", str(out)]
    assert eval_main([str(TINY), *flags, *argv]) == 0
    rows = out.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()
    return json.loads(out.read_text(encoding="utf-8")), [json.loads(row) for row in rows]


def test_every_game_of_a_split_once_whatever_the_batch(games: Path, tmp_path: Path) -> None:
    data = f"env.data={games}"
    argv = ["--split", "valid_seen", "--samples", "3", data]
    record, rows = evaluate(tmp_path / "a.json", *argv, "eval.episodes=5")
    ids = {game.id: game.type for game in GeneratedGames(0).split("valid_seen")[:PER_SPLIT]}
    assert Counter(row["task"] for row in rows) == dict.fromkeys(ids, 3)
    assert all(row["type"] == ids[row["task"]] for row in rows)
    assert {name: tally["tasks"] for name, tally in record["types"].items()} == dict(
        Counter(ids.values())
    )
    assert record["overall"]["tasks"] == PER_SPLIT
    assert record["overall"]["n"] == 3 * PER_SPLIT
    assert record["data"]["games"]["valid_seen"] == PER_SPLIT
    other, again = evaluate(tmp_path / "b.json", *argv, "rollout.live=7")
    assert sorted(rows, key=str) == sorted(again, key=str)
    assert record["types"] == other["types"]
    _, plain = evaluate(tmp_path / "c.json", data, "eval.episodes=5")  # the split of the papers
    assert [row for row in rows if not row["sample"]] == plain


def test_draws_as_the_published_tables_have_them(
    games: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    csv = tmp_path / "published.csv"
    csv.write_text(
        "model,method,pick,look,clean,heat,cool,pick2,alf_avg,alf_avg_kind,source\n"
        "Small,GRPO,91.2,62.5,96.2,61.9,65.0,47.4,75.0,micro128,Table 1\n"
        "Small,RSIPO,,,,,,,95.7,134/140?,seeds\n"
    )
    argv = [f"env.data={games}", "--published", str(csv), "--published-model", "Small"]
    once = ["env.max_steps=1", *argv]
    flags = [str(TINY), "--env", "alfworld", "--model", "tiny", *once, "--split", "legacy128"]
    assert eval_main(flags) == 2
    assert "legacy128 is of the 140 games of the release, not of 12" in capsys.readouterr().err
    for game in GeneratedGames(0).split("valid_seen")[PER_SPLIT:140]:
        write_game(game, games)
    record, rows = evaluate(tmp_path / "a.json", *once, "--split", "legacy128")
    assert len(rows) == len({row["task"] for row in rows}) == 128
    times = Counter(row["task"].partition("#")[0] for row in rows)
    assert len(times) < 100
    assert record["overall"]["tasks"] == 128
    assert record["overall"]["repeats"] == sum(n * (n - 1) for n in times.values())
    averages = {row["set"]: row["published"] for row in record["published"]["rows"][-2:]}
    assert averages == {"sample average": {"GRPO": 75.0}, "macro average": {}}
    assert "91.2" in capsys.readouterr().out
    record, _ = evaluate(tmp_path / "b.json", *once)  # 140 games, but not so many of each type
    assert not any(row["published"] for row in record["published"]["rows"])


def test_a_game_that_cannot_be_played_is_counted(
    games: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first one, for instance."""
    spoil([min((games / "json_2.1.1" / "valid_seen").glob("*/*/game.tw-pddl"))])
    argv = [f"env.data={games}", "env.max_steps=1"]
    record, rows = evaluate(tmp_path / "a.json", *argv)
    assert (record["overall"]["n"], record["overall"]["broken"]) == (PER_SPLIT - 1, 1)
    assert [row["stop"] for row in rows if row["error"]] == ["error"]
    assert "1 episodes broke and do not count" in capsys.readouterr().out
    strict = [*argv, "rollout.max_error_frac=0.01"]
    assert eval_main([str(TINY), "--env", "alfworld", "--model", "tiny", *strict]) == 75
    assert "1 of 12 episodes broke" in capsys.readouterr().err


def test_games_that_break_in_training(
    games: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are counted and the run goes on; too many stop it with a checkpoint."""
    files = sorted((games / "json_2.1.1" / "train").glob("*/*/game.tw-pddl"))
    whole = [file.read_text() for file in files]

    argv = [
        *("--algo", "grpo", "--env", "alfworld", "--model", "tiny", f"env.data={games}"),
        *("env.max_steps=2", "eval.episodes=0", "eval.every=0", "trainer.updates=1"),
        *(f"rollout.tasks={PER_SPLIT}", "rollout.group=2", "log.progress=false"),
    ]
    spoil(files[:2])
    assert fit_main([*argv, f"run.dir={tmp_path / 'one'}"]) == 0
    (row,) = csv.DictReader((tmp_path / "one" / "metrics.csv").open())
    assert float(row["rollout/error_frac"]) == pytest.approx(2 / PER_SPLIT)
    capsys.readouterr()
    spoil(files[:3])
    assert fit_main([*argv, f"run.dir={tmp_path / 'two'}"]) == 75
    error = capsys.readouterr().err
    assert f"6 of {2 * PER_SPLIT} episodes broke" in error
    assert f"checkpoint: {tmp_path}/two/checkpoints/update-00000" in error
    for file, text in zip(files, whole, strict=True):
        file.write_text(text)
    assert fit_main(["--resume", str(tmp_path / "two")]) == 0
    spoil(files)
    capsys.readouterr()
    assert fit_main([*argv, f"run.dir={tmp_path / 'none'}"]) == 2
    assert "it has a text grammar of its own" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


FIT = ["--algo", "grpo", "--model", "tiny", "eval.every=0", "eval.episodes=0"]
SFT = ["sft.epochs=1", "rollout.tasks=4", "rollout.group=1", "env.max_steps=2"]


def test_a_run_does_not_go_on_with_another_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    argv = ["--env", "alfworld", "env.max_steps=1", "rollout.tasks=1", "trainer.updates=1", *FIT]
    assert fit_main([*argv, f"run.dir={run}"]) == 0
    before = (run / "config.yaml").read_text()
    again = ["--resume", str(run), "trainer.updates=2"]
    capsys.readouterr()
    assert fit_main([*again, "model.path=tiny_alfworld"]) == 2
    assert "update-000001.ckpt is of another model than" in capsys.readouterr().err
    assert (run / "config.yaml").read_text() == before
    assert fit_main(again) == 0


def test_stage_1_goes_on_where_the_first_game_is_broken(games: Path, tmp_path: Path) -> None:
    spoil(sorted((games / "json_2.1.1" / "train").glob("*/*/game.tw-pddl"))[:1])
    argv = ["--env", "alfworld", f"env.data={games}", f"run.dir={tmp_path / 'run'}", *SFT]
    assert sft_main([*argv, "rollout.max_error_frac=0.5"]) == 0


@pytest.mark.parametrize("command", ["fit", "sft", "eval"])
def test_cpu_seconds_of_workers_count(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that end when the environment is closed, too."""
    close = AlfworldSuite.close
    work = "import time\nwhile time.process_time() < 0.5: pass"

    def ends(suite: AlfworldSuite) -> None:
        close(suite)
        subprocess.run([sys.executable, "-c", work], check=True)

    monkeypatch.setattr(AlfworldSuite, "close", ends)
    argv = ["--env", "alfworld", "log.progress=false", "env.max_steps=1"]
    run = [*argv, f"run.dir={tmp_path / 'run'}"]
    began = time.process_time()
    if command == "fit":
        small = ["trainer.updates=1", "rollout.tasks=1", "rollout.group=2"]
        assert fit_main([*FIT, *run, *small]) == 0
    elif command == "sft":
        assert sft_main([*SFT, *run]) == 0
    else:
        evaluate(tmp_path / "run.json", "--episodes", "1")
    here = time.process_time() - began
    file = tmp_path / "run.json" if command == "eval" else tmp_path / "run" / "run.json"
    assert json.loads(file.read_text())["cpu_s"] > here + 0.3


@pytest.mark.parametrize(
    ("main", "argv", "says"),
    [
        (fit_main, [*FIT, "rollout.tasks=4000"], "there are only 3600 training tasks"),
        (fit_main, [*FIT, "rollout.context=999999999"], "rollout.context=999999999"),
        (fit_main, [*FIT[2:], "--algo", "skill_prompt", "algo.bank=no.json"], "no.json"),
        (sft_main, [*SFT, "rollout.tasks=1"], "with sft.val_frac=0.1 none is left"),
        (eval_main, [str(TINY), "--split", "legacy128"], "legacy128 is of the 140 games"),
    ],
)
def test_what_cannot_start_closes_the_games(
    main: Any,
    argv: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Worker processes would live on."""
    live: list[AlfworldSuite] = []
    made = AlfworldSuite.__init__
    monkeypatch.setattr(
        AlfworldSuite, "__init__", lambda suite, *args: live.append(suite) or made(suite, *args)
    )
    monkeypatch.setattr(AlfworldSuite, "close", lambda suite: live.remove(suite))
    monkeypatch.chdir(tmp_path)
    assert main([*argv, "--env", "alfworld"]) == 2
    assert says in capsys.readouterr().err
    assert not live


@pytest.mark.parametrize("split", ["", "train", "valid_train", "valid_seen"])
def test_games_that_are_missing_are_said_before_work_starts(
    split: str, games: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of them, or those of a split that a run plays."""
    (games / "json_2.1.1" / split).rename(tmp_path / "away")
    run = tmp_path / "run"
    argv = ["--algo", "grpo", "--env", "alfworld", f"env.data={games}", f"run.dir={run}"]
    assert fit_main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(games) in line
    assert (f"'{split}'" if split else "0 games found in") in line
    assert not run.exists()
