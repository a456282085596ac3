"""Both engines of ALFWorld play alike; a difference is found and reported."""

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from rsipo_lightning.environments.alfworld import parity
from rsipo_lightning.environments.alfworld.builtin import BuiltinEngine
from rsipo_lightning.environments.alfworld.game import TYPES
from rsipo_lightning.environments.alfworld.generate import GeneratedGames

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("RSIPO_DATA") or ROOT.parent / "shared" / "data")
GAMES = DATA / "alfworld" / "games.jsonl.xz"

with_games = pytest.mark.skipif(not GAMES.is_file(), reason=f"no games at {GAMES} (RSIPO_DATA)")
with_package = pytest.mark.skipif(
    find_spec("alfworld") is None, reason="pip install 'rsipo-lightning[alfworld]'"
)


@pytest.fixture(scope="module")
def generated():
    games = GeneratedGames(0).split("train")
    return [games[i] for i in range(len(TYPES))]


@pytest.mark.slow
@with_package
@with_games
def test_engines_play_alike(generated):
    games = parity.sample(GAMES, {"valid_seen": 20, "train": 24}, seed=1)
    assert {game.type for game in games} == set(TYPES)
    games += generated
    outcomes = list(parity.compare_all(games, jobs=os.cpu_count() or 1))
    assert [line for _, outcome in outcomes for line in outcome.differences] == []
    assert sum(outcome.won for _, outcome in outcomes) > len(games) // 3
    played = set().union(*(outcome.kinds for _, outcome in outcomes))
    assert played >= {"go", "open", "take", "move", "use", "heat", "cool", "clean", "junk"}


class Lying:
    """The built-in engine, with one view changed: that after the command number ``at``."""

    def __init__(self, at, **changes):
        self._at, self._changes = at, changes

    def open(self, game):
        self._game, self._count = BuiltinEngine().open(game), 0
        return self

    def step(self, command):
        self._game.step(command)
        self._count += 1
        return self.view

    @property
    def view(self):
        view = self._game.view
        if self._count < self._at:
            return view
        return replace(view, **{name: change(view) for name, change in self._changes.items()})

    def close(self):
        pass


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"text": lambda view: view.text + " "}, "says"),
        ({"won": lambda view: not view.won}, "won is True, not False"),
        ({"admissible": lambda view: view.admissible[1:]}, "admits [] too, but not ['"),
        ({"admissible": lambda view: view.admissible[::-1]}, "another order of commands"),
    ],
)
def test_a_difference_is_found(generated, changes, words):
    game = generated[0]
    outcome = parity.compare(game, Lying(3, **changes), BuiltinEngine(), steps=10, seed=0)
    if not changes:
        assert outcome.differences == []
        assert outcome.commands > 10
        return
    assert len(outcome.differences) == 2  # of both sequences
    assert outcome.differences[0].startswith(f"{game.id}, random, command 3 (")
    assert words in outcome.differences[0]


def test_a_game_that_an_engine_refuses_is_a_difference(generated):
    game = generated[0]
    broken = replace(game, problem=game.problem[:-500])
    outcome = parity.compare(broken, BuiltinEngine(), BuiltinEngine(), steps=3, seed=0)
    assert len(outcome.differences) == 2
    assert game.id in outcome.differences[0]


@pytest.mark.slow
@with_package
@with_games
def test_the_command(capsys):
    arguments = ["--data", str(GAMES), "--train", "1", "--valid-seen", "1", "--generated", "1"]
    assert parity.main(arguments) == 0
    out = capsys.readouterr().out
    assert "pick_two_obj_and_place" in out
    assert "commands: " in out
    assert parity.main(["--data", "nowhere.jsonl"]) == 2
