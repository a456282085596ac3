"""The scripted expert on real and generated games, and the skills that name its plans."""

import json
import os
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from rsipo_lightning import models
from rsipo_lightning.bank import BankConfig, SkillBank
from rsipo_lightning.environments.alfworld.builtin import BuiltinEngine, BuiltinGame
from rsipo_lightning.environments.alfworld.expert import (
    PLANS,
    Goal,
    Housekeeper,
    Player,
    hindsight,
    read_goal,
    skills,
)
from rsipo_lightning.environments.alfworld.game import TYPES
from rsipo_lightning.environments.alfworld.games import open_games
from rsipo_lightning.environments.alfworld.generate import GeneratedGames
from rsipo_lightning.environments.alfworld.house import OBJECTS, ROOMS
from rsipo_lightning.environments.experts import KINDS
from rsipo_lightning.errors import DataError
from rsipo_lightning.skills import MAX_CHARS, MIN_WORDS, category

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("RSIPO_DATA") or ROOT.parent / "shared" / "data")
REAL = DATA / "alfworld" / "games.jsonl.xz"
TINY = Path(models.__path__[0]) / "tiny"
ENGINE = BuiltinEngine()
APPLIANCES = {"sinkbasin", "microwave", "fridge", "desklamp"}


def _turns(game, plan="workflow", noise=0.0, limit=50):
    """Commands that it took to win; more than the limit if it was not won."""
    live = ENGINE.open(game)
    keeper = Housekeeper(random.Random(game.id), plan, noise)
    for turn in range(1, limit + 1):
        if live.step(keeper.decide(live.view.text, live.view.admissible)).won:
            return turn
    return limit + 1


def _share(games, limit=50, **how):
    return sum(_turns(game, limit=limit, **how) <= limit for game in games) / len(games)


@pytest.fixture(scope="module")
def games():
    return GeneratedGames(0).split("train")[:60]


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    if not REAL.is_file():
        pytest.skip(f"no real games at {REAL} (RSIPO_DATA)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RSIPO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield open_games(REAL)


@pytest.mark.parametrize(
    ("task", "kind"),
    [
        ("put a mug in shelf.", "pick_and_place_simple"),
        ("put some mug on shelf.", "pick_and_place_simple"),
        ("look at mug under the desklamp.", "look_at_obj_in_light"),
        ("examine the mug with the desklamp.", "look_at_obj_in_light"),
        ("put a clean mug in shelf.", "pick_clean_then_place_in_recep"),
        ("clean some mug and put it in shelf.", "pick_clean_then_place_in_recep"),
        ("put a hot mug in shelf.", "pick_heat_then_place_in_recep"),
        ("heat some mug and put it in shelf.", "pick_heat_then_place_in_recep"),
        ("put a cool mug in shelf.", "pick_cool_then_place_in_recep"),
        ("cool some mug and put it in shelf.", "pick_cool_then_place_in_recep"),
        ("put two mug in shelf.", "pick_two_obj_and_place"),
        ("find two mug and put them in shelf.", "pick_two_obj_and_place"),
    ],
)
def test_both_wordings_of_every_task_are_read(task, kind):
    target = "desklamp" if "desklamp" in task else "shelf"
    assert read_goal(f"A room.\n\nYour task is to: {task}\n") == Goal(kind, "mug", target)


def test_another_task_is_refused():
    with pytest.raises(DataError, match="cannot read the task 'wash the dog'"):
        read_goal("Your task is to: wash the dog")


def test_it_wins_all_generated_games(games):
    assert _share(games, limit=30) == 1


def test_it_wins_real_games(real):
    made = [real.read(entry) for entry in real.split("valid_seen")[::4]]
    assert {game.type for game in made} == set(TYPES)
    assert _share(made, limit=30) == 1


@pytest.mark.slow
def test_it_wins_all_real_games_of_valid_seen_and_300_of_train(real):
    train = real.split("train")
    for entries, within_30 in (
        (real.split("valid_seen"), 1.0),
        (train[:: len(train) // 300], 0.98),
    ):
        turns = [_turns(real.read(entry)) for entry in entries]
        assert max(turns) <= 50
        assert sum(n <= 30 for n in turns) / len(turns) >= within_30


def test_more_noise_wins_less(games):
    shares = [_share(games, noise=noise, limit=30) for noise in (0.0, 0.5, 0.7, 0.9)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 1
    assert 0.5 < shares[1] < 1
    assert shares[3] < 0.3


def test_what_plans_are_worth(games):
    for kind in TYPES:
        made = [game for game in games if game.type == kind]
        assert _share(made, plan="detour") == 1
        assert _share(made, plan="wander", limit=30) == 0
        assert _share(made, plan="repeat", limit=30) == 0
        assert _share(made, plan="unprepared", limit=30) == (kind == "pick_and_place_simple")


def test_it_opens_a_receptacle_at_the_same_place_without_going_there():
    keeper = Housekeeper(random.Random(0))
    start = ["go to drawer 1", "go to drawer 2", "look"]
    first = keeper.decide("Your task is to: put a pen in drawer.", start)
    assert first == "go to drawer 1"
    here = ["close drawer 1", "examine drawer 1", "examine drawer 2", "look", "open drawer 2"]
    text = "You open the drawer 1. The drawer 1 is open. In it, you see nothing."
    assert keeper.decide(text, here) == "open drawer 2"


def test_it_leaves_the_first_of_two_objects_alone_and_fetches_the_second_where_it_was_seen():
    keeper = Housekeeper(random.Random(0))
    talk = [
        ("Your task is to: put two pen in bed.", ["go to bed 1", "go to desk 1"]),
        ("On the desk 1, you see a pen 2, and a pen 1.", ["go to bed 1", "take pen 1 from desk 1"]),
        ("You pick up the pen 1 from the desk 1.", ["go to bed 1", "examine pen 1"]),
        ("On the bed 1, you see nothing.", ["go to desk 1", "move pen 1 to bed 1"]),
        ("You move the pen 1 to the bed 1.", ["go to desk 1", "take pen 1 from bed 1"]),
    ]
    said = [keeper.decide(text, options) for text, options in talk]
    assert said[1:] == [
        "take pen 1 from desk 1",
        "go to bed 1",
        "move pen 1 to bed 1",
        "go to desk 1",
    ]


def test_a_player_needs_no_prompt_and_thinks_of_what_it_can_take_or_holds(games):
    for game in games[:6]:
        live = ENGINE.open(game)
        wanted, held = read_goal(live.view.text).object, ""
        player = Player(ENGINE.open(game), Housekeeper(random.Random(0), noise=0.3))
        for _ in range(50):
            options = live.view.admissible
            match = re.fullmatch(
                "<think> (.+)</think><action>(.+)</action>", player.act("anything")
            )
            thought, command = match.groups()
            if held:
                assert thought == held
            elif thought != wanted:
                assert thought.startswith(f"{wanted} ")
                assert any(option.startswith(f"take {thought} from ") for option in options)
            elif game.type != "pick_two_obj_and_place":
                assert not any(option.startswith(f"take {wanted} ") for option in options)
            if live.step(command).won:
                break
            if taken := re.match(r"You pick up the (\w+ \d+)", live.view.text):
                held = taken[1]
            elif live.view.text.startswith("You move"):
                held = ""
        assert live.view.won


def test_a_player_closes_its_game_won_or_not(games, monkeypatch):
    closed = []
    monkeypatch.setattr(BuiltinGame, "close", lambda self: closed.append(self))
    live = ENGINE.open(games[0])
    player = Player(live, Housekeeper(random.Random(0)))
    player.act("")
    assert not live.view.won
    player.close()
    assert closed == [live]


# ---- skills


def _all_skills():
    return [(t, k, skill) for t in TYPES for k in KINDS for skill in skills(t, k)]


def test_skills_are_valid_and_of_their_category():
    for _, kind, skill in _all_skills():
        assert len(skill.text.split()) >= MIN_WORDS
        assert len(skill.text) <= MAX_CHARS
        assert category(skill.text) == skill.category
        assert skill.kind == kind
        assert skill.plan in PLANS


def test_skills_tell_no_number_object_or_place():
    names = {name.lower() for name in OBJECTS}
    names |= {name.lower() for room in ROOMS.values() for name in room.receptacles}
    for _, _, skill in _all_skills():
        text = re.sub(r"(?:^| )[1-4]\. ", " ", skill.text)  # the numbers of the steps
        assert not re.search(r"\d", text)
        assert set(re.findall(r"\w+", text.lower())) & names <= APPLIANCES


def test_procedural_skills_fit_their_type():
    for kind, word in [("clean", "sinkbasin"), ("heat", "microwave"), ("cool", "fridge")]:
        for skill in skills(f"pick_{kind}_then_place_in_recep", "procedural"):
            assert set(re.findall(r"\w+", skill.text.lower())) & APPLIANCES == {word}
            assert kind in skill.text.lower()
    assert all("desklamp" in s.text for s in skills("look_at_obj_in_light", "procedural"))
    assert all("same target" in s.text for s in skills("pick_two_obj_and_place", "procedural"))


def test_skills_use_words_of_the_tiny_policy():
    tokenizer = json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8"))
    known = {token.removeprefix("Ġ") for token in tokenizer["model"]["vocab"]}
    words = {word for _, _, skill in _all_skills() for word in re.findall(r"\w+", skill.text)}
    assert [w for w in sorted(words) if not {w, w.lower()} & known] == []


def _episode(success, *turns):
    made = [SimpleNamespace(valid=valid, observation=text) for valid, text in turns]
    return SimpleNamespace(success=success, turns=made, task=SimpleNamespace(type=TYPES[3]))


@pytest.mark.parametrize(
    ("episode", "kind"),
    [
        (_episode(True, (False, "You arrive."), (True, "Nothing happens.")), "procedural"),
        (_episode(False, (True, "You arrive."), (True, "You open it.")), "procedural"),
        (_episode(False, (True, "You arrive."), (True, "Nothing happens.")), "recovery"),
        (_episode(False, (False, "Nothing happens."), (True, "Nothing happens.")), "format"),
        (_episode(False), "procedural"),
    ],
)
def test_hindsight_says_what_was_missing(episode, kind):
    drawn = {hindsight(episode, random.Random(i)) for i in range(40)}
    assert drawn == {skill.text for skill in skills(TYPES[3], kind)}


@pytest.mark.parametrize("style", ["full", "compact"])
def test_the_shipped_banks_cover_all_types(style):
    bank = SkillBank.of(BankConfig(), "alfworld", TYPES, style)
    texts = [bank.text(kind) for kind in TYPES]
    assert len(set(texts)) == len(TYPES)
    assert "heat" in bank.text("pick_heat_then_place_in_recep").lower()
