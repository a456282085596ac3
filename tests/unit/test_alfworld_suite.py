"""The tasks of ALFWorld: splits, files, what is left out, and what a run records."""

from __future__ import annotations

import json
import lzma
import os
import random
import signal
import threading
from collections import Counter
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from rsipo_lightning.codec import Codec
from rsipo_lightning.environments.alfworld.game import TYPES
from rsipo_lightning.environments.alfworld.games import write_game
from rsipo_lightning.environments.alfworld.generate import GeneratedGames
from rsipo_lightning.environments.alfworld.suite import AlfworldConfig, AlfworldSuite
from rsipo_lightning.errors import ConfigError, DataError
from rsipo_lightning.protocols import StepResult
from rsipo_lightning.rollout import ExpertPlayer, Job, Sampling
from rsipo_lightning.testing import byte_tokenizer
from rsipo_lightning.types import Role, Task

ROOT = Path(__file__).resolve().parents[2]
REAL = Path(os.environ.get("RSIPO_DATA") or ROOT.parent / "shared" / "data") / "alfworld"
GAMES = GeneratedGames(0)
with_package = pytest.mark.skipif(
    find_spec("alfworld") is None, reason="pip install 'rsipo-lightning[alfworld]'"
)


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RSIPO_CACHE", str(tmp_path / "cache"))


def suite(**keys: Any) -> AlfworldSuite:
    return AlfworldSuite(AlfworldConfig(**keys), 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six games of a split each in the layout of the release; none of valid_unseen."""
    for split in ("train", "valid_train", "valid_seen"):
        for game in GAMES.split(split)[:6]:
            write_game(game, tmp_path / "data")
    return tmp_path / "data"


def files(folder: Path, split: str = "train") -> list[Path]:
    return sorted((folder / "json_2.1.1" / split).glob("*/*/game.tw-pddl"))


def spoil(file: Path) -> None:
    """Cut the problem of a game off."""
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pddl_problem": "(define"}))


def opening(made: AlfworldSuite, task: Task) -> str:
    return made.make().reset(task)


def test_splits_of_the_release_and_what_stands_for_them() -> None:
    made = suite()
    for name, official in {"val": "valid_train", "test": "valid_seen"}.items():
        assert [task.id for task in made.tasks(name)] == [g.id for g in GAMES.split(official)]
    assert made.tasks("train")[-1].id == GAMES.split("train")[3599].id
    assert [task.type for task in made.tasks("valid_unseen")[:6]] == list(TYPES)
    says = "no split 'valid' .have: train, val, test, valid_train, valid_seen, valid_unseen, legacy"
    with pytest.raises(DataError, match=says):
        made.tasks("valid")
    assert AlfworldSuite.evaluation_split(AlfworldConfig(), ()) == "valid_seen"


def test_other_seeds_of_the_world_have_other_games() -> None:
    one, two = suite(), suite(world=1)
    assert opening(one, one.tasks("val")[0]) != opening(two, two.tasks("val")[0])


def test_legacy128_draws_with_repeats(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="legacy128 is of the 140 games of the release, not of 144"):
        suite().tasks("legacy128")
    for game in GAMES.split("valid_seen")[:140]:
        write_game(game, tmp_path / "data")
    config = AlfworldConfig(data=str(tmp_path / "data"))
    made, again = AlfworldSuite(config, seed=0), AlfworldSuite(config, seed=7)
    drawn = made.tasks("legacy128")
    assert drawn == again.tasks("legacy128")
    assert len({task.id for task in drawn}) == len(drawn) == 128
    times = Counter(task.payload["game"] for task in drawn)
    assert 60 < len(times) < 128
    assert max(times.values()) > 2
    seen = {task.id: task for task in made.tasks("valid_seen")}
    for task in drawn:  # the first draw of a game is that game's task, so it is played alike
        n = int(task.id.partition("#")[2] or 1)
        assert n <= times[task.payload["game"]]
        assert (task == seen.get(task.id)) == (n == 1)
        assert task.payload == seen[task.payload["game"]].payload
    repeat = next(task for task in drawn if "#" in task.id)
    assert opening(made, repeat) == opening(made, seen[repeat.payload["game"]])


@pytest.mark.parametrize("where", ["data", "ALFWORLD_DATA"])
def test_files_play_as_the_games_they_hold(
    where: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "ALFWORLD_DATA":
        monkeypatch.setenv(where, str(folder))
    made = suite(data=str(folder) if where == "data" else None)
    tasks = {task.id: task for task in made.tasks("test")}
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    for task in suite().tasks("test")[:6]:
        assert tasks[task.id].type == task.type
        assert opening(made, tasks[task.id]) == opening(suite(), task)
    with pytest.raises(DataError, match="0 games in split 'valid_unseen'"):
        made.tasks("valid_unseen")


def test_what_is_recorded(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "mine.yaml"
    template.write_text("invalid: No.")
    described = suite(data=str(folder), template=str(template)).describe()
    assert json.loads(json.dumps(described)) == described
    assert described["games"] == {"train": 6, "valid_seen": 6, "valid_train": 6}
    assert (described["path"], described["engine"]) == (str(folder), "builtin")
    assert (described["left_out"], described["broken"]) == (0, [])
    assert described["template"]["path"] == str(template)
    assert suite(world=3).describe()["world"] == 3
    files(folder)[0].unlink()
    assert suite(data=str(folder)).describe()["sha256"] != described["sha256"]


def test_broken_games_are_left_out_and_counted(folder: Path) -> None:
    for game in GAMES.split("train")[6:12]:
        write_game(game, folder)
    spoil(files(folder)[0])
    made = suite(data=str(folder))
    says = f"^{folder}: 1 of 12 games of train cannot be played; the first: .*ends early; they are"
    with pytest.warns(UserWarning, match=says) as told:
        assert len(made.tasks("train")) == 11
    made.tasks("train")
    assert len(told) == 1
    assert len(made.describe()["broken"]) == 1


def test_the_limit_of_broken_games_is_of_each_split(folder: Path) -> None:
    """Those of other splits count neither way."""
    for split in ("valid_train", "valid_seen"):
        for game in GAMES.split(split)[6:30]:
            write_game(game, folder)
    for file in files(folder)[:2]:
        spoil(file)
    made = suite(data=str(folder))
    with pytest.raises(DataError, match=r"2 of 6 games of train cannot be played; the first: "):
        made.tasks("train")
    assert len(made.tasks("val")) == len(made.tasks("test")) == 30
    for file in files(folder)[2:]:
        spoil(file)
    with pytest.raises(DataError, match=r"6 of 6 games of train cannot be played; the first: "):
        suite(data=str(folder)).tasks("train")


@pytest.mark.parametrize("broken", [2, 3])
def test_lines_that_tell_no_split_are_counted_among_all_games(broken: int, tmp_path: Path) -> None:
    game = GAMES.split("train")[0]
    header = {"pddl_domain": game.domain, "grammar": game.grammar}
    row = {"split": "train", "task": "a", "task_type": game.type, "task_desc": ""}
    rows = [row | {"trial": str(i), "pddl_problem": game.problem} for i in range(18)]
    path = tmp_path / "games.jsonl"
    path.write_text("\n".join([*map(json.dumps, [header, *rows]), *["{"] * broken]))
    says = f"{broken} of {18 + broken} games cannot be played; the first: line 20: not JSON"
    if broken == 2:
        with pytest.warns(UserWarning, match=says):
            assert len(suite(data=str(path)).tasks("train")) == 18
    else:
        with pytest.raises(DataError, match=says):
            suite(data=str(path))


def test_a_game_that_breaks_later_breaks_its_episode(folder: Path) -> None:
    made = suite(data=str(folder))
    task = made.tasks("train")[0]
    other = suite(data=str(folder))
    game = folder / "json_2.1.1" / "train" / task.payload["game"] / "game.tw-pddl"
    spoil(game)
    with pytest.raises(DataError, match="ends early"):
        opening(made, task)
    game.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        opening(other, task)


def test_no_games(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"0 games found in .*, expected .*train/\*/\*/game.tw-pddl"
    ):
        suite(data=str(tmp_path))


def some_real_games(to: Path) -> Path:
    """Every 17th line of the real file, from the header on."""
    with lzma.open(REAL / "games.jsonl.xz") as file, to.open("wb") as out:
        out.writelines(islice(file, 0, None, 17))
    return to


class Recorded:
    """An episode: what a policy, the game and its state showed, from the reset on."""

    def __init__(self, made: AlfworldSuite, task: Task) -> None:
        self.live = made.make()
        self.first = self.live.reset(task)
        assert self.live._game is not None
        self.start = (self.first, self.live._game.view.admissible, self.live._game.state_hash())
        self.shown: list[tuple[StepResult, str]] = []

    def act(self, command: str) -> bool:
        """Whether the episode goes on."""
        game = self.live._game
        assert game is not None
        result = self.live.step(f"<action>{command}</action>")
        self.shown.append((result, game.state_hash()))
        return result.stop is None


@pytest.mark.parametrize("games", ["generated", "real"])
def test_replays_of_200_games_are_the_episodes_of_the_student(games: str, tmp_path: Path) -> None:
    """They come when other games have pushed theirs out of the caches, and take turns."""
    if games == "real" and not REAL.is_dir():
        pytest.skip(f"no real games at {REAL} (RSIPO_DATA)")
    keys: dict[str, Any] = {"prompt": "compact", "max_steps": 31}
    if games == "real":
        keys["data"] = str(some_real_games(tmp_path / "some.jsonl"))
    made = suite(**keys)
    tasks = [*made.tasks("valid_seen")[:7], *made.tasks("train")][:200]
    assert len({task.id for task in tasks}) == 200
    students, commands = [], []
    for task in tasks:
        student, rng, said = Recorded(made, task), random.Random(task.id), []
        for step in range(30):
            assert student.live._game is not None
            listed = student.live._game.view.admissible
            said.append("fly" if step == 7 else rng.choice(listed))
            if not student.act(said[-1]):
                break
        students.append(student)
        commands.append(said)
    assert sum(len(said) == 30 for said in commands) > 150
    for k in range(0, len(tasks), 8):
        places = [*range(k, k + 8)] * 2
        replays = [Recorded(made, tasks[i]) for i in places]
        assert [replay.start for replay in replays] == [students[i].start for i in places]
        for step in range(30):
            for i, replay in zip(places, replays, strict=True):
                if step < len(commands[i]):
                    replay.act(commands[i][step])
        assert [replay.shown for replay in replays] == [students[i].shown for i in places]


def test_an_expert_does_not_stop_others_at_a_broken_game(folder: Path) -> None:
    made = suite(data=str(folder), prompt="compact")
    first, *tasks = made.tasks("train")
    game = folder / "json_2.1.1" / "train" / first.payload["game"] / "game.tw-pddl"
    spoil(game)
    jobs = [Job(task, Role.STUDENT, 0, 0) for task in (first, *tasks)]
    player = ExpertPlayer(
        made, Codec(byte_tokenizer()), lambda job: made.expert(job.task, random.Random(0))
    )
    played = player.play(jobs, Sampling(0, 1.0, 1, 10**9, len(jobs)))
    assert [trajectory.scored for trajectory in played] == [False] + [True] * len(tasks)
    assert "its PDDL problem ends early" in played[0].error
    assert all(trajectory.success for trajectory in played[1:])


@pytest.mark.slow
@with_package
def test_no_game_of_an_expert_stays_open() -> None:
    made = suite(engine="textworld", workers=1, prompt="compact", max_steps=1)
    try:
        player = ExpertPlayer(
            made, Codec(byte_tokenizer()), lambda job: made.expert(job.task, random.Random(0))
        )
        jobs = [Job(task, Role.STUDENT, 0, 0) for task in made.tasks("val")[:2]]
        played = player.play(jobs, Sampling(0, 1.0, 1, 10**9, len(jobs)))
        assert [trajectory.success for trajectory in played] == [False] * 2
        assert made._engine._workers[0].live == 0  # type: ignore[attr-defined]
    finally:
        made.close()


@pytest.mark.parametrize("prompt", ["compact", "full"])
@pytest.mark.parametrize("kind", TYPES)
def test_the_expert_wins(kind: str, prompt: str) -> None:
    made = suite(prompt=prompt)
    task = next(task for task in made.tasks("val") if task.type == kind)
    episode, expert = made.make(), made.expert(task, random.Random(0))
    episode.reset(task)
    while (result := episode.step(expert.act(""))).stop is None:
        assert result.valid
    assert result.success


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("engine", "textword"),
        ("context", "all"),
        ("admissible", "yes"),
        ("prompt", "long"),
        ("template", "none.yaml"),
    ],
)
def test_keys_that_make_no_sense(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"env\.{key}={value}"):
        suite(**{key: value})


@pytest.mark.skipif(find_spec("alfworld") is not None, reason="the extra [alfworld] is installed")
def test_the_other_engine_needs_its_package() -> None:
    with pytest.raises(ConfigError, match=r"env\.engine=textworld needs .*\[alfworld\]"):
        suite(engine="textworld")


@pytest.mark.slow
@with_package
def test_both_engines_play_alike_and_in_order() -> None:
    """Several episodes at once, in worker processes and here."""
    made, other = suite(), suite(engine="textworld", workers=2)
    tasks = made.tasks("valid_seen")[:3]
    responses = [
        "<think>a</think><action>look</action>",
        "",
        "<think>a</think><action>fly</action>",
    ]
    played = []
    for one in (made, other):
        episodes = [one.make() for _ in tasks]
        openings = [e.reset(task) for e, task in zip(episodes, tasks, strict=True)]
        played.append([openings, one.step_many(episodes, responses)])
        for _ in range(2):
            one.close()
    assert played[0] == played[1]


@pytest.mark.slow
@with_package
@pytest.mark.parametrize("dies", [True, False])
def test_a_worker_that_dies_or_hangs_breaks_one_of_the_episodes(dies: bool) -> None:
    made = suite(engine="textworld", workers=1, timeout_s=5, prompt="compact")
    episodes = [made.make() for _ in range(3)]
    for episode, task in zip(episodes, made.tasks("valid_seen"), strict=False):
        episode.reset(task)
    process = made._engine._workers[0]._process  # type: ignore[attr-defined]
    os.kill(process.pid, signal.SIGSTOP)
    if dies:
        threading.Timer(0.3, process.kill).start()
    results = made.step_many(episodes, ["<action>look</action>"] * 3)
    assert sorted(isinstance(result, Exception) for result in results) == [False, False, True]
    (broken,) = (str(result) for result in results if isinstance(result, Exception))
    assert ("its worker died" if dies else "no answer within 5 s") in broken
    for episode in episodes:
        episode.close()
    made.close()
    assert not made._engine._workers[0]._process  # type: ignore[attr-defined]
