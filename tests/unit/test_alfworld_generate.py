"""Generated games: what they are a function of, and that each can be won."""

import json
import lzma
import os
import re
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from rsipo_lightning.environments.alfworld.builtin import BuiltinEngine
from rsipo_lightning.environments.alfworld.game import TYPES
from rsipo_lightning.environments.alfworld.generate import SIZES, GeneratedGames
from rsipo_lightning.environments.alfworld.house import OBJECTS
from rsipo_lightning.errors import DataError

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("RSIPO_DATA") or ROOT.parent / "shared" / "data")
REAL = DATA / "alfworld" / "games.jsonl.xz"
ENGINE = BuiltinEngine()
FIRST = {
    "train": 120,
    "valid_train": 24,
    "valid_seen": 60,
    "valid_unseen": 144,
}  # games of the fast tests


@pytest.fixture(scope="module")
def games():
    made = GeneratedGames(0)
    return {split: made.split(split)[:n] for split, n in FIRST.items()}


def _scene(game):
    return int(game.id.partition("/")[0].rpartition("-")[2])


def _facts(game, predicate):
    return sorted(re.findall(rf"\({predicate} (\S+) (\S+)\)", game.problem.partition("(:goal")[0]))


def _play(game, engine=ENGINE):
    """Play the walkthrough; it must win with its last command and not before."""
    live = engine.open(game)
    for command in game.walkthrough:
        assert not live.view.won, game.id
        assert command in live.view.admissible, (game.id, command)
        live.step(command)
    assert live.view.won, game.id


_DIGEST = """
import hashlib
from rsipo_lightning.environments.alfworld.generate import GeneratedGames
text = repr([GeneratedGames(0).split(split)[:12] for split in ("train", "valid_unseen")])
print(hashlib.sha256(text.encode()).hexdigest()[:16])
"""


def test_games_are_the_same_in_every_process_and_version():
    digests = [
        subprocess.run(
            [sys.executable, "-c", _DIGEST],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    ]
    assert digests == ["3b2ae2e6296f5e85"] * 2  # runs are compared on the same games


def test_a_game_does_not_depend_on_the_order_in_which_games_are_made(games):
    assert GeneratedGames(0).split("train")[77] == games["train"][77]
    assert GeneratedGames(1).split("train")[77].problem != games["train"][77].problem


def test_splits_are_lazy_sequences():
    train = GeneratedGames(0).split("train")
    assert len(train) == SIZES["train"]
    assert train[-1].id == train[SIZES["train"] - 1].id
    with pytest.raises(IndexError):
        train[len(train)]
    with pytest.raises(DataError, match="no split 'test'"):
        GeneratedGames(0).split("test")


def test_ids_and_problems_are_unique(games):
    made = [game for split in games.values() for game in split]
    assert len({game.id for game in made}) == len(made)
    assert len({game.problem.partition("\n")[2] for game in made}) == len(made)


def test_types_take_turns(games):
    for split in games.values():
        assert set(Counter(game.type for game in split).values()) == {len(split) // len(TYPES)}
        assert all(game.id.startswith(game.type) for game in split)


def test_splits_are_by_scene_as_in_the_release(games):
    scenes = {split: {_scene(game) for game in made} for split, made in games.items()}
    assert len(scenes["valid_unseen"]) == 12
    for split in ("train", "valid_train", "valid_seen"):
        assert scenes[split].isdisjoint(scenes["valid_unseen"])
    assert len(scenes["train"] & scenes["valid_seen"]) > 30


def test_a_scene_keeps_its_receptacles_but_not_its_objects(games):
    by_scene = {}
    for game in games["valid_unseen"]:
        by_scene.setdefault(_scene(game), []).append(game)
    for made in by_scene.values():
        assert len({tuple(_facts(game, "receptacleAtLocation")) for game in made}) == 1
        assert len({tuple(_facts(game, "inReceptacle")) for game in made}) == len(made)


def test_rooms_are_realistic(games):
    for game in games["train"]:
        assert 10 <= len(_facts(game, "receptacleType")) <= 21
        assert 10 <= len(_facts(game, "inReceptacle")) <= 25
        kinds = dict(_facts(game, "receptacleType"))
        for thing, place in _facts(game, "inReceptacle"):
            assert kinds[place].removesuffix("Type") in OBJECTS[thing.partition("_bar_")[0]].places


def test_some_receptacles_share_a_location_and_some_cannot_be_closed(games):
    located = [[place for _, place in _facts(g, "receptacleAtLocation")] for g in games["train"]]
    assert 0.3 < sum(len(set(row)) < len(row) for row in located) / len(located) < 0.95
    drawers = closable = 0
    for game in games["train"]:
        drawers += len(re.findall(r"receptacleType Drawer", game.problem))
        closable += len(re.findall(r"\(openable Drawer", game.problem))
    assert 0.7 < closable / drawers < 0.95


def test_the_walkthrough_wins_and_the_goal_does_not_hold_at_the_start(games):
    for split in games.values():
        for game in split:
            _play(game)


@pytest.mark.slow
def test_every_walkthrough_wins():
    for split in SIZES:
        for game in GeneratedGames(0).split(split):
            _play(game)


@pytest.mark.slow
def test_the_engine_of_the_package_plays_them_too(games):
    if find_spec("alfworld") is None:
        pytest.skip("pip install 'rsipo-lightning[alfworld]'")
    from rsipo_lightning.environments.alfworld.textworld import TextWorldEngine

    engine = TextWorldEngine()
    try:
        for game in games["train"][:12]:
            _play(game, engine)
    finally:
        engine.close()


def test_domain_and_grammar_are_those_of_the_release(games):
    if not REAL.is_file():
        pytest.skip(f"no real games at {REAL} (RSIPO_DATA)")
    with lzma.open(REAL, "rt", encoding="utf-8") as file:
        header = json.loads(next(file))
    for game in games["train"][:6]:
        assert game.domain == header["pddl_domain"]
        before, after = header["grammar"].split("UNKNOWN GOAL.")
        task = game.grammar.removeprefix(before).removesuffix(after)
        assert re.fullmatch(r"[a-z ]+\.", task)
