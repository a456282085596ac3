"""Games on disk: packed files, the folders of the release, what is wrong with them, the index."""

import json
import lzma
import os

import pytest

from rsipo_lightning.environments.alfworld import games as module
from rsipo_lightning.environments.alfworld.builtin import BuiltinEngine
from rsipo_lightning.environments.alfworld.game import TYPES
from rsipo_lightning.environments.alfworld.games import (
    default_path,
    open_games,
    read_games,
    write_game,
)
from rsipo_lightning.environments.alfworld.generate import GeneratedGames
from rsipo_lightning.errors import DataError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RSIPO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def made():
    """Two games of train and four of valid_seen, which have all types."""
    world = GeneratedGames(0)
    return [*world.split("train")[:2], *world.split("valid_seen")[2:6]]


def row(game):
    task, trial = game.id.split("/")
    said = game.grammar.partition("Your task is to: ")[2].partition('"')[0]
    return {
        "split": game.split,
        "task": task,
        "trial": trial,
        "task_type": game.type,
        "task_desc": said,
        "walkthrough": list(game.walkthrough),
        "pddl_problem": game.problem,
    }


def lines(made):
    """The lines of a packed file."""
    grammar = made[0].grammar.replace(row(made[0])["task_desc"], "UNKNOWN GOAL.")
    header = {"kind": "header", "pddl_domain": made[0].domain, "grammar": grammar}
    return [json.dumps(one) for one in (header, *map(row, made))]


def packed(tmp_path, lines, name="games.jsonl"):
    path = tmp_path / name
    text = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(lzma.compress(text) if path.suffix == ".xz" else text)
    return path


@pytest.mark.parametrize("name", ["games.jsonl", "games.jsonl.xz"])
def test_a_packed_file_gives_its_games(tmp_path, made, name):
    path = packed(tmp_path, lines(made), name)
    games = open_games(path)
    assert [games.read(entry) for entry in games.entries] == made
    assert [(e.id, e.split, e.type) for e in games.entries] == [
        (game.id, game.split, game.type) for game in made
    ]
    assert not games.left_out
    first, second = map(games.read, games.entries[:2])
    assert first.domain is second.domain
    assert read_games(path, "train") == made[:2]
    assert read_games(str(path)) == made


@pytest.mark.parametrize("below", ["", "json_2.1.1"])
def test_folders_of_the_release_give_their_games(tmp_path, made, below):
    for game in made:
        write_game(game, tmp_path / "data")
    games = open_games(tmp_path / "data" / below)
    assert sorted(made, key=lambda game: (game.split, game.id)) == [
        games.read(entry) for entry in games.entries
    ]
    assert {entry.type for entry in games.entries} == set(TYPES)
    first, second = map(games.read, games.entries[:2])
    assert first.domain is second.domain


def test_a_split_without_games_is_an_error(tmp_path, made):
    games = open_games(packed(tmp_path, lines(made)))
    with pytest.raises(
        DataError, match=r"0 games in split 'valid_unseen' \(have: train 2, valid_seen 4\)$"
    ):
        games.split("valid_unseen")


def test_what_is_wrong_with_a_line_is_told_and_the_others_stay(tmp_path, made):
    good = row(made[0])
    wrong = {
        "line 4: not JSON (": '{"split": "train"',
        "line 5: a JSON object is expected": "[]",
        "line 6: field 'pddl_problem' is missing": json.dumps(
            {k: v for k, v in good.items() if k != "pddl_problem"}
        ),
        "line 7: field 'trial' must be text": json.dumps(good | {"trial": 7}),
        "line 8: field 'walkthrough' must be": json.dumps(good | {"walkthrough": [7]}),
        "line 9: unknown task type 'pick_and_eat'": json.dumps(
            good | {"task_type": "pick_and_eat"}
        ),
        f"{made[0].id}: two games have this id": json.dumps(good),
        "line 11: its PDDL problem ends early": json.dumps(
            good | {"trial": "x", "pddl_problem": good["pddl_problem"][:-9]}
        ),
    }
    skipped = {
        "line 13: not solvable": json.dumps(good | {"trial": "x", "solvable": False}),
        "line 14: a movable receptacle or a slice": json.dumps(
            good
            | {
                "task": "pick_and_place_with_movable_recep-Cup-Pan-Desk-1",
                "task_type": "pick_and_place_with_movable_recep",
            }
        ),
        "line 15: a movable receptacle or a slice": json.dumps(
            good | {"task": "pick_and_place_simple-AppleSliced-None-Desk-1"}
        ),
    }
    few = lines(made[:2])
    games = open_games(packed(tmp_path, [*few, *wrong.values(), "", *skipped.values()]))
    assert [entry.id for entry in games.entries] == [game.id for game in made[:2]]
    for left_out, what in zip(games.left_out, [*wrong, *skipped], strict=True):
        assert left_out.what.startswith(what)
        assert left_out.broken == (what in wrong)
        assert left_out.split == ("" if what[:6] in ("line 4", "line 5") else "train")


def test_what_is_wrong_with_a_folder_is_told_and_the_others_stay(tmp_path, made):
    for game in made:
        write_game(game, tmp_path)
    base = tmp_path / "json_2.1.1" / "train"

    def change(task, **fields):
        text = json.loads((base / made[0].id / "game.tw-pddl").read_text()) | fields
        to = base / task / "trial" / "game.tw-pddl"
        to.parent.mkdir(parents=True)
        to.write_text(json.dumps({k: v for k, v in text.items() if v is not None}))
        return to

    change("a", pddl_problem=None)
    change("b").write_text("{")
    change("b2", pddl_problem="(define)").with_name("traj_data.json").write_text(
        json.dumps({"task_type": TYPES[3]})
    )
    change("c", solvable=None)
    change("d-Cup-None-Desk-1")
    change("e", solvable=False)
    change("pick_and_place_simple-AppleSliced-None-Desk-1")
    change("pick_and_place_simple-Cup-None-Desk-1").with_name("traj_data.json").write_text("{")
    change("f").with_name("traj_data.json").write_text(json.dumps({"task_type": TYPES[3]}))
    unset = change("g", grammar='"rhs": "UNKNOWN GOAL."')
    unset.with_name("traj_data.json").write_text(json.dumps({"task_type": TYPES[3]}))
    games = open_games(tmp_path)
    assert len(games.entries) == len(made) + 2
    assert [(one.what.removeprefix("train/"), one.broken) for one in games.left_out] == [
        ("a/trial/game.tw-pddl: field 'pddl_problem' is missing", True),
        (
            "b/trial/game.tw-pddl: not JSON (Expecting property name enclosed in double quotes: "
            "line 1 column 2 (char 1))",
            True,
        ),
        ("b2/trial/game.tw-pddl: its PDDL problem cannot be read (KeyError: ':objects')", True),
        ("c/trial/game.tw-pddl: field 'solvable' is missing", True),
        ("d-Cup-None-Desk-1/trial/game.tw-pddl: unknown task type 'd'", True),
        ("e/trial/game.tw-pddl: not solvable", False),
        ("g/trial/game.tw-pddl: neither grammar nor folder states the task", True),
        (
            "pick_and_place_simple-AppleSliced-None-Desk-1/trial/game.tw-pddl: "
            "a movable receptacle or a slice",
            False,
        ),
    ]
    (other,) = [entry for entry in games.entries if entry.id == "f/trial"]
    assert other.type == TYPES[3]


def test_a_problem_that_only_the_other_engine_may_play_is_no_broken_game(tmp_path, made):
    """Games are those of both engines."""
    game = made[0]
    path = write_game(game, tmp_path)
    changed = json.loads(path.read_text()) | {
        "pddl_problem": game.problem.replace("(and", "(or", 1),
        "pddl_domain": "of its own",
    }
    path.write_text(json.dumps(changed))
    (entry,) = open_games(tmp_path).entries
    assert entry.id == game.id


def test_a_long_look_says_how_far_it_is(tmp_path, made, monkeypatch, capsys):
    monkeypatch.setattr(module, "_TELL_S", 0.0)
    path = packed(tmp_path, lines(made))
    open_games(path)
    told = capsys.readouterr().err.splitlines()
    assert told[-1] == f"{path}: 5 games looked at so far (once, the index is kept)"
    open_games(path)
    assert not capsys.readouterr().err


def test_a_task_that_was_left_unset_is_told_by_the_folder(tmp_path, made):
    for game in made:
        said = row(game)["task_desc"]
        path = write_game(game, tmp_path)
        path.write_text(path.read_text().replace(said, "UNKNOWN GOAL."))
    engine = BuiltinEngine()
    told = {}
    for game in read_games(tmp_path):
        _, thing, _, place, _ = game.id.split("/")[0].lower().split("-")
        told[game.type] = engine.open(game).view.text.rpartition("Your task is to: ")[2]
        assert thing in told[game.type]
        assert place in told[game.type]
    assert told["look_at_obj_in_light"].endswith("lamp.")
    assert told["pick_two_obj_and_place"].startswith("put two ")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "field 'pddl_domain' is missing"),
        (b"{}\n", "field 'pddl_domain' is missing"),
        (b'{"pddl_domain": ""}', "field 'grammar' is missing"),
        (b"{", "games.jsonl:1: not JSON"),
        (b'{"pddl_domain": "", "grammar": ""}\n', "0 games found in .*, expected a JSONL"),
        (b'{"pddl_domain": "", "grammar": ""}\n{}', r"\(1 left out: line 2: field 'split' is"),
    ],
)
def test_what_is_no_packed_file(tmp_path, text, why):
    path = tmp_path / "games.jsonl"
    path.write_bytes(text)
    with pytest.raises(DataError, match=why):
        open_games(path)


def test_a_packed_file_that_cannot_be_read(tmp_path, made):
    with pytest.raises(DataError, match=r"none\.jsonl: cannot be read \(No such file"):
        open_games(tmp_path / "none.jsonl")
    path = packed(tmp_path, lines(made), "games.jsonl.xz")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"games\.jsonl\.xz: cannot be read \(Compressed file end"):
        open_games(path)
    path.write_text("{}")
    with pytest.raises(DataError, match=r"games\.jsonl\.xz: cannot be read \(Input format"):
        open_games(path)


def test_a_folder_without_games(tmp_path):
    with pytest.raises(DataError) as error:
        open_games(tmp_path)
    assert str(error.value) == (
        f"0 games found in {tmp_path}, expected {tmp_path}/json_2.1.1/train/*/*/game.tw-pddl"
    )


def test_the_index_is_kept_until_something_changes(tmp_path, made, monkeypatch, cache):
    looked = []
    parse = module.parse_object
    monkeypatch.setattr(module, "parse_object", lambda *a: looked.append(a) or parse(*a))

    def count(path):
        looked.clear()
        return len(open_games(path).entries), len(looked)

    file = packed(tmp_path, lines(made))
    assert count(file) == (6, 7)  # the header too
    assert count(file) == (6, 0)
    packed(tmp_path, lines(made)[:-1])
    assert count(file) == (5, 6)
    for game in made[:-1]:
        path = write_game(game, tmp_path / "data")
    assert count(tmp_path / "data") == (5, 5)
    assert count(tmp_path / "data") == (5, 0)
    write_game(made[-1], tmp_path / "data")
    assert count(tmp_path / "data") == (6, 6)
    os.utime(path, ns=(1, 1))
    assert count(tmp_path / "data") == (6, 6)
    for index in cache.glob("*/index.json"):  # what a full disk may leave
        index.write_text("[")
    assert count(tmp_path / "data") == (6, 6)


def test_a_game_that_has_gone_is_an_error_of_that_game(tmp_path, made, cache):
    path = write_game(made[0], tmp_path)
    games = open_games(tmp_path)
    path.write_text("{")
    with pytest.raises(DataError, match=rf"^{path}: not JSON"):
        games.read(games.entries[0])
    path.unlink()
    with pytest.raises(DataError, match=rf"^{path}: cannot be read"):
        games.read(games.entries[0])
    games = open_games(packed(tmp_path, lines(made)))
    (texts,) = cache.glob("*/games.zlib")
    texts.write_bytes(b"x" * texts.stat().st_size)
    with pytest.raises(DataError, match=f"game {made[0].id} cannot be read back"):
        games.read(games.entries[0])


def test_where_the_package_looks(monkeypatch, tmp_path):
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    assert default_path() is None
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    assert default_path() == tmp_path
