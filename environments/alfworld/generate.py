"""Generated games of all six types, in the released format, for machines without the real ones.

    games = GeneratedGames(world=0).split("train")  # made when they are looked up
    games[0].walkthrough                            # ("go to drawer 2", "open drawer 2", ...)

A scene is a function of (world, scene number): its receptacles, where they stand and which can be
closed. A game is one of (world, split, index): the scene, the task and where the objects lie.
valid_unseen has scenes of its own, the other splits share theirs, as in the release. Types take
turns, so any six games in a row have all of them. Every game can be won: the walkthrough comes from
how it was made, and the goal does not hold at the start.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import overload

from rsipo_lightning.environments.alfworld.game import TYPES, Game
from rsipo_lightning.environments.alfworld.house import OBJECTS, OPENABLE, ROOMS, TREATMENTS
from rsipo_lightning.environments.alfworld.problem import names_of
from rsipo_lightning.errors import DataError
from rsipo_lightning.rng import keyed_random

SIZES = {"train": 3600, "valid_train": 204, "valid_seen": 144, "valid_unseen": 144}  # games
UNSEEN = 3  # the last scenes of each room are those of valid_unseen

_ROOMS = {  # rooms of a type, weighted as in the release
    "pick_and_place_simple": {"bathroom": 33, "bedroom": 30, "living room": 27, "kitchen": 10},
    "look_at_obj_in_light": {"bedroom": 84, "living room": 16},
    "pick_clean_then_place_in_recep": {"kitchen": 77, "bathroom": 23},
    "pick_heat_then_place_in_recep": {"kitchen": 100},
    "pick_cool_then_place_in_recep": {"kitchen": 100},
    "pick_two_obj_and_place": {"bedroom": 29, "bathroom": 29, "living room": 27, "kitchen": 15},
}
WORDINGS = {  # the release's two wordings of each
    "pick_and_place_simple": ("put a {0} in {1}.", "put some {0} on {1}."),
    "look_at_obj_in_light": ("look at {0} under the {1}.", "examine the {0} with the {1}."),
    "pick_clean_then_place_in_recep": (
        "put a clean {0} in {1}.",
        "clean some {0} and put it in {1}.",
    ),
    "pick_heat_then_place_in_recep": ("put a hot {0} in {1}.", "heat some {0} and put it in {1}."),
    "pick_cool_then_place_in_recep": ("put a cool {0} in {1}.", "cool some {0} and put it in {1}."),
    "pick_two_obj_and_place": ("put two {0} in {1}.", "find two {0} and put them in {1}."),
}
_LIGHT = """(and
    (exists (?ot - object ?r - receptacle ?a - agent ?l - location)
        (and (objectType ?ot {1}Type) (toggleable ?ot) (isToggled ?ot)
             (receptacleAtLocation ?r ?l) (atLocation ?a ?l) (inReceptacle ?ot ?r)))
    (exists (?o - object ?a - agent)
        (and (objectType ?o {0}Type) (holds ?a ?o))))"""
_PLACE = """(and
    (exists (?r - receptacle)
        (exists (?o - object)
            (and {2}(inReceptacle ?o ?r) (objectType ?o {0}Type) (receptacleType ?r {1}Type)))))"""
_TWO = """(and
    (exists (?r - receptacle)
        (exists (?o1 - object)
            (and (objectType ?o1 {0}Type) (receptacleType ?r {1}Type) (inReceptacle ?o1 ?r)
                 (exists (?o2 - object)
                     (and (not (= ?o1 ?o2)) (objectType ?o2 {0}Type)
                          (receptacleType ?r {1}Type) (inReceptacle ?o2 ?r)))))))"""
# named by the domain, so every problem must declare them
_NAMED = ("SinkBasin", "Microwave", "Fridge"), ("Sink", "Knife", "ButterKnife")


@dataclass(frozen=True, slots=True)
class _Thing:
    """A receptacle, or an object that lies in one or stands at a location."""

    id: str
    type: str
    location: str
    openable: bool = False
    within: str = ""  # id of the receptacle it lies in


class GeneratedGames:
    """The games of one world; ``world`` is its seed."""

    def __init__(self, world: int) -> None:
        self.world = world

    def split(self, name: str) -> Sequence[Game]:
        """The games of a split of SIZES, made one by one when they are asked for."""
        if name not in SIZES:
            raise DataError(f"generated games have no split '{name}' (have: {', '.join(SIZES)})")
        return _Split(self.world, name)


class _Split(Sequence[Game]):
    def __init__(self, world: int, name: str) -> None:
        self._world, self._name = world, name

    def __len__(self) -> int:
        return SIZES[self._name]

    @overload
    def __getitem__(self, index: int) -> Game: ...
    @overload
    def __getitem__(self, index: slice) -> list[Game]: ...
    def __getitem__(self, index: int | slice) -> Game | list[Game]:
        places = range(len(self))[index]
        if isinstance(places, range):
            return [_game(self._world, self._name, i) for i in places]
        return _game(self._world, self._name, places)


@cache
def _text(name: str) -> str:
    """The domain or the grammar of the release."""
    return (resources.files(__package__) / "data" / name).read_text(encoding="utf-8")


def _game(world: int, split: str, index: int) -> Game:
    rng = keyed_random("alfworld game", world, split, index)
    kind = TYPES[index % len(TYPES)]
    (room,) = rng.choices(list(_ROOMS[kind]), list(_ROOMS[kind].values()))
    scenes = ROOMS[room].scenes
    scene = rng.choice(scenes[-UNSEEN:] if split == "valid_unseen" else scenes[:-UNSEEN])
    receptacles = _scene(world, room, scene)
    wanted, target = rng.choice(_goals(kind, room, {r.type for r in receptacles}))
    objects = _objects(rng, kind, room, wanted, target, receptacles)
    trial = f"trial_{world}_{split}_{index:05}"
    said = rng.choice(WORDINGS[kind]).format(wanted.lower(), target.lower())
    return Game(
        id=f"{kind}-{wanted}-None-{target}-{scene}/{trial}",
        split=split,
        type=kind,
        problem=_problem(rng, trial, receptacles, objects, _goal(kind, wanted, target)),
        domain=_text("alfred.pddl"),
        grammar=_text("alfred.twl2").replace("UNKNOWN GOAL.", said),
        walkthrough=tuple(_walkthrough(kind, wanted, target, receptacles, objects)),
    )


# ---- scenes


@cache
def _scene(world: int, room: str, scene: int) -> tuple[_Thing, ...]:
    """The receptacles of a scene."""
    rng = keyed_random("alfworld scene", world, scene)
    counts = {t: rng.randint(*most) for t, most in ROOMS[room].receptacles.items()}
    spots = _spots(rng)
    receptacles: list[_Thing] = []
    for type_, count in counts.items():
        for i in range(count):
            if type_ in ("SinkBasin", "BathtubBasin"):  # part of a thing that is an object
                id_ = f"{type_.removesuffix('Basin')}{next(spots)}_bar_{type_}"
            else:
                id_ = type_ + next(spots)
            # two of a kind may be reached from one place, and some doors and drawers are fixed
            shares = i > 0 and rng.random() < 0.2
            location = receptacles[-1].location if shares else _location(rng, len(receptacles) + 1)
            fixed = type_ in ("Cabinet", "Drawer") and rng.random() < 0.15
            receptacles.append(_Thing(id_, type_, location, type_ in OPENABLE and not fixed))
    return tuple(receptacles)


def _spots(rng: random.Random) -> Iterator[str]:
    """Different coordinates; the engine numbers things of a type by them, backwards."""
    for place in rng.sample(range(500 * 500), 100):
        x, z = divmod(place, 500)
        yield "".join(f"_bar__plus_{i // 100:02}_dot_{i % 100:02}" for i in (x, 90, z))


def _location(rng: random.Random, number: int) -> str:
    """A place to stand: ``number`` makes it unique in its scene."""
    look = rng.choice((30, 45, 60))
    return f"loc_bar_{number}_bar_{rng.randrange(20)}_bar_{rng.randrange(4)}_bar_{look}"


# ---- tasks and objects


def _goals(kind: str, room: str, types: set[str]) -> list[tuple[str, str]]:
    """All (object type, target type) that make a game of this kind in a scene with these types."""
    goals = []
    for name in ROOMS[room].objects:
        places = [p for p in OBJECTS[name].places if p in types]
        if "pickupable" not in OBJECTS[name].properties or not places:
            continue
        if kind == "look_at_obj_in_light":
            goals.append((name, "DeskLamp"))
        elif treatment := TREATMENTS.get(kind):
            if f"{treatment.verb}able" in OBJECTS[name].properties:
                goals += [(name, place) for place in places if place != treatment.where]
        elif len(places) > 1:  # it must lie somewhere else at the start
            goals += [(name, place) for place in places]
    return goals


def _objects(
    rng: random.Random,
    kind: str,
    room: str,
    wanted: str,
    target: str,
    receptacles: Sequence[_Thing],
) -> list[_Thing]:
    """10 to 25 objects in receptacles, those of the task among them, and some fixtures."""
    count = {wanted: rng.randint(2, 3) if kind == "pick_two_obj_and_place" else rng.randint(1, 2)}
    if target == "DeskLamp":
        count[target] = 1
    types = {r.type for r in receptacles}
    others = [n for n in ROOMS[room].objects if n not in count and types & OBJECTS[n].places.keys()]
    for name in rng.sample(others, min(len(others), rng.randint(8, 11))):
        count[name] = 1 if name == "DeskLamp" else rng.randint(1, 2)
    spots = _spots(rng)
    things = []
    for name, n in count.items():
        for _ in range(n):
            places = OBJECTS[name].places
            banned = target if name == wanted and kind not in TREATMENTS else ""
            free = [r for r in receptacles if r.type in places and r.type != banned]
            kinds = Counter(r.type for r in free)
            (place,) = rng.choices(free, [places[r.type] / kinds[r.type] for r in free])
            things.append(_Thing(name + next(spots), name, place.location, within=place.id))
    for basin in receptacles:
        if basin.type.endswith("Basin"):
            whole = basin.type.removesuffix("Basin")
            things.append(
                _Thing(basin.id.removesuffix(f"_bar_{basin.type}"), whole, basin.location)
            )
    for name in ROOMS[room].fixtures:
        things.append(_Thing(name + next(spots), name, rng.choice(receptacles).location))
    return things


def _goal(kind: str, wanted: str, target: str) -> str:
    if kind == "look_at_obj_in_light":
        return _LIGHT.format(wanted, target)
    if kind == "pick_two_obj_and_place":
        return _TWO.format(wanted, target)
    if kind not in TREATMENTS:
        return _PLACE.format(wanted, target, "")
    verb, done, _, _ = TREATMENTS[kind]
    return _PLACE.format(wanted, target, f"({verb}able ?o) ({done} ?o) ")


# ---- what is written


def _problem(
    rng: random.Random,
    trial: str,
    receptacles: Sequence[_Thing],
    objects: Sequence[_Thing],
    goal: str,
) -> str:
    """The PDDL problem. Facts are in a random order, as in the release."""
    start = _location(rng, 0)  # no receptacle is there, else the opening does not list the room
    rtypes = sorted({r.type for r in receptacles}.union(_NAMED[0]))
    otypes = sorted({o.type for o in objects}.union(_NAMED[1]))
    locations = sorted({start, *(thing.location for thing in (*receptacles, *objects))})
    declared = [
        *(f"{t}Type - otype" for t in otypes),
        *(f"{t}Type - rtype" for t in rtypes),
        *(f"{o.id} - object" for o in sorted(objects, key=lambda o: o.id)),
        *(f"{r.id} - receptacle" for r in sorted(receptacles, key=lambda r: r.id)),
        *(f"{location} - location" for location in locations),
    ]
    here = {r.type for r in receptacles}
    facts = [f"atLocation agent1 {start}"]
    for r in receptacles:
        facts.append(f"receptacleType {r.id} {r.type}Type")
        facts.append(f"receptacleAtLocation {r.id} {r.location}")
        if r.openable:
            facts.append(f"openable {r.id}")
    for o in objects:
        facts.append(f"objectType {o.id} {o.type}Type")
        facts.append(f"objectAtLocation {o.id} {o.location}")
        if o.within:
            facts.append(f"inReceptacle {o.id} {o.within}")
            facts += [f"{name} {o.id}" for name in OBJECTS[o.type].properties]
    for o_type in (t for t in otypes if t in OBJECTS):
        places = OBJECTS[o_type].places
        facts += [f"canContain {p}Type {o_type}Type" for p in places if p in here]
    rng.shuffle(facts)
    return (
        f"(define (problem plan_{trial})\n(:domain alfred)\n(:objects\nagent1 - agent\n"
        f"{_lines(declared)})\n\n(:init\n{_lines(f'({fact})' for fact in facts)})\n\n"
        f"(:goal\n{goal}\n)\n)\n"
    )


def _lines(rows: Iterable[str]) -> str:
    return "".join(f"    {row}\n" for row in rows)


# ---- how it is won


def _walkthrough(
    kind: str,
    wanted: str,
    target: str,
    receptacles: Sequence[_Thing],
    objects: Sequence[_Thing],
) -> Iterator[str]:
    """Commands that win, in the names that the engine gives to things."""
    names = names_of(thing.id for thing in (*receptacles, *objects))
    place = {r.id: r for r in receptacles}
    here, opened = "", set()

    def visit(r: _Thing, reach_in: bool = True) -> Iterator[str]:
        nonlocal here
        if r.location != here:
            here = r.location
            yield f"go to {names[r.id]}"
        if reach_in and r.openable and r.id not in opened:
            opened.add(r.id)
            yield f"open {names[r.id]}"

    found = [o for o in objects if o.type == wanted and o.within]
    goal = next((r for r in receptacles if r.type == target), None)
    for o in found[: 2 if kind == "pick_two_obj_and_place" else 1]:
        yield from visit(place[o.within])
        yield f"take {names[o.id]} from {names[o.within]}"
        if treatment := TREATMENTS.get(kind):
            appliance = next(r for r in receptacles if r.type == treatment.where)
            yield from visit(appliance, reach_in=False)
            yield f"{treatment.verb} {names[o.id]} with {names[appliance.id]}"
        if goal:
            yield from visit(goal)
            yield f"move {names[o.id]} to {names[goal.id]}"
        else:
            lamp = next(o for o in objects if o.type == target)
            yield from visit(place[lamp.within], reach_in=False)
            yield f"use {names[lamp.id]}"
