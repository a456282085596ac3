"""The alfworld package's own engine in worker processes, on generated games."""

import io
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from importlib.util import find_spec

import pytest

from rsipo_lightning.environments.alfworld import textworld
from rsipo_lightning.environments.alfworld.generate import GeneratedGames
from rsipo_lightning.environments.alfworld.textworld import GameError, TextWorldEngine
from rsipo_lightning.errors import ConfigError, DataError, EnvironmentFault

with_package = pytest.mark.skipif(
    find_spec("alfworld") is None, reason="pip install 'rsipo-lightning[alfworld]'"
)


@pytest.fixture(scope="module")
def games():
    """Four that are translated fast."""
    generated = GeneratedGames(0).split("train")
    return sorted((generated[i] for i in range(12)), key=lambda game: len(game.problem))[:4]


@pytest.fixture(scope="module")
def engine():
    engine = TextWorldEngine(workers=2, timeout_s=20)
    yield engine
    engine.close()
    engine.close()


def process(played):
    return played._worker._process


def commands(played, rng, count):
    """Play random commands; what they showed."""
    shown = []
    for _ in range(count):
        command = rng.choice([*played.view.admissible, "xyzzy"])
        shown.append((command, played.step(command), played.state_hash()))
    return shown


@with_package
def test_a_game_is_played_and_replayed(engine, games):
    played = engine.open(games[0])
    first, start = played.view, played.state_hash()
    assert first.text.startswith("-= Welcome to TextWorld, ALFRED! =-")
    assert "look" in first.admissible
    assert list(first.admissible) == sorted(first.admissible)
    nothing = played.step("xyzzy")
    assert nothing.text == "Nothing happens."
    assert nothing.admissible == first.admissible
    assert played.state_hash() == start
    shown = [played.step(command) for command in games[0].walkthrough]
    assert [view.won for view in shown] == [False] * (len(shown) - 1) + [True]
    assert played.state_hash() != start
    assert played.reset() == first == played.view
    assert played.state_hash() == start
    assert [played.step(command) for command in games[0].walkthrough] == shown
    played.close()
    played.close()
    with pytest.raises(GameError, match="has been closed"):
        played.step("look")


@pytest.mark.slow
@with_package
def test_games_that_take_turns_are_played_as_alone(engine, games):
    alone = []
    for number, game in enumerate([*games, *games]):
        played = engine.open(game)
        alone.append([(None, played.view, played.state_hash())])
        alone[-1] += commands(played, random.Random(number), 10)
        played.close()
    live = [engine.open(game) for game in [*games, *games]]
    assert len({process(played).pid for played in live}) == 2
    together = [[(None, played.view, played.state_hash())] for played in live]
    rngs = [random.Random(number) for number in range(len(live))]
    for turn in range(10):
        for played, rng, shown in zip(live, rngs, together, strict=True):
            shown += commands(played, rng, 1)
        if turn == 4:  # a copy goes on in the place of the game, which goes elsewhere
            for i in range(0, len(live), 2):
                other, live[i] = live[i], live[i].clone()
                other.step("inventory")
                commands(other, random.Random(turn), 2)
                other.close()
    for played in live:
        played.close()
    assert together == alone


STOCK = """
import sys, tempfile, os
os.environ.setdefault("ALFWORLD_DATA", tempfile.gettempdir())
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos
from textworld import EnvInfos
from textworld.envs.pddl import PddlEnv
infos = EnvInfos(won=True, admissible_commands=True)
environment = AlfredInfos(AlfredDemangler(PddlEnv(infos), shuffle=False))
for domain, grammar, problem, commands in GAMES:
    environment.load(dict(pddl_domain=domain, grammar=grammar, pddl_problem=problem))
    state = environment.reset()
    print((state.feedback, tuple(state.admissible_commands), state.won))
    for command in commands:
        state, _, _ = environment.step(command)
        print((state.feedback, tuple(state.admissible_commands), state.won))
"""


@pytest.mark.slow
@with_package
def test_the_short_cuts_of_a_worker_change_nothing(engine, games, tmp_path):
    scripts, shown = [], []
    for game in games[:2]:
        played = engine.open(game)
        script = [*played.view.admissible[:3], "xyzzy", *game.walkthrough, "look", "inventory"]
        scripts.append((game.domain, game.grammar, game.problem, script))
        for view in (played.view, *map(played.step, script)):
            shown.append(repr((view.text, view.admissible, view.won)))
        played.close()
    file = tmp_path / "stock.py"
    file.write_text(f"GAMES = {scripts!r}\n{STOCK}")
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == shown


@with_package
def test_nothing_of_the_package_reaches_this_process(engine, games, monkeypatch):
    arguments, stdout = ["rsipo-fit", "--algo", "rsipo"], io.StringIO()
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(sys, "stdout", stdout)
    played = engine.open(games[0])
    played.step("look")
    played.close()
    assert sys.argv is arguments == ["rsipo-fit", "--algo", "rsipo"]
    assert sys.stdout is stdout
    assert not stdout.getvalue()
    assert not {"textworld", "alfworld", "fast_downward"} & set(sys.modules)


@with_package
def test_a_worker_that_dies_between_two_commands_is_replaced_unnoticed(engine, games):
    played, other = engine.open(games[0]), engine.open(games[0])
    expected = commands(played, random.Random(0), 6)
    assert commands(other, random.Random(0), 3) == expected[:3]
    os.kill(process(other).pid, signal.SIGKILL)
    process(other).join()
    assert [(c, other.step(c), other.state_hash()) for c, _, _ in expected[3:]] == expected[3:]
    for each in (played, other):
        each.close()


@pytest.mark.slow
@with_package
@pytest.mark.parametrize("hangs", [True, False])
def test_a_worker_that_hangs_or_dies_costs_one_episode(games, hangs):
    engine = TextWorldEngine(workers=1, timeout_s=5)
    broken, other = engine.open(games[0]), engine.open(games[1])
    expected = commands(other, random.Random(0), 3)
    before = process(broken)
    os.kill(before.pid, signal.SIGSTOP)
    if hangs:
        message = "no answer within 5 s at 'look'"
    else:
        message = "its worker died at 'look'"
        threading.Timer(0.3, before.kill).start()
    started = time.monotonic()
    with pytest.raises(GameError, match=f"{games[0].id}: .*{message}"):
        broken.step("look")
    assert time.monotonic() - started < 8
    assert not before.is_alive()
    assert other.state_hash() == expected[-1][2]  # the other one goes on where it was
    assert process(other) is not before
    other.reset()
    assert commands(other, random.Random(0), 3) == expected
    engine.close()


@with_package
def test_a_game_that_cannot_be_translated(engine, games):
    good = engine.open(games[0])
    view = good.step("look")
    for problem in ("", games[1].problem[:2000], games[1].problem.replace("(atLocation", "(at")):
        with pytest.raises(DataError, match=f"^{games[1].id}: cannot be loaded") as caught:
            engine.open(replace(games[1], problem=problem))
        assert "\n" not in str(caught.value)
    assert good.step("look") == view  # in the same process
    engine.open(games[1]).close()
    good.close()


@with_package
def test_a_command_at_which_the_package_raises_changes_nothing(engine, games):
    played = engine.open(games[0])
    view, state = played.step(games[0].walkthrough[0]), played.state_hash()
    with pytest.raises(GameError, match=f"^{games[0].id}: AttributeError: .* at None$"):
        played.step(None)
    assert (played.view, played.state_hash()) == (view, state)
    played.close()


@pytest.fixture
def broken_package(tmp_path, monkeypatch):
    """Call it, and from then on workers find a package that cannot be imported."""
    (tmp_path / "textworld").mkdir()
    (tmp_path / "textworld" / "__init__.py").write_text("raise ImportError('libfoo.so is missing')")
    return lambda: monkeypatch.syspath_prepend(tmp_path)


@with_package
def test_a_package_that_cannot_be_imported(broken_package):
    broken_package()
    with pytest.raises(ConfigError, match=r"cannot be started.*libfoo.so is missing.*builtin"):
        TextWorldEngine()


@with_package
def test_workers_that_cannot_be_started_again_stop_the_run(games, broken_package):
    engine = TextWorldEngine()
    played = engine.open(games[0])
    broken_package()
    process(played).kill()
    process(played).join()
    with pytest.raises(EnvironmentFault, match=r"libfoo\.so is missing"):
        played.step("look")
    engine.close()
    with pytest.raises(GameError, match="has been closed"):
        played.reset()  # and no worker is started


def test_without_the_extra_the_message_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(textworld, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'rsipo-lightning\[alfworld\]'"):
        TextWorldEngine()


@pytest.mark.parametrize("values", [{"workers": 0}, {"timeout_s": 0}, {"timeout_s": float("nan")}])
def test_bad_values(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        TextWorldEngine(**values)
