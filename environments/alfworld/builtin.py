"""The built-in game engine: plays the PDDL problem of a game without any package.

What commands do (alfred.pddl) and say (alfred.twl2) is code here; a game with other rules or words
is refused. Tests hold it against the package's own engine, oddities included:

- Going to a receptacle at the place where one stands changes nothing, so it is no command.
- ``look`` at the start sees nothing: no receptacle is where the agent starts.
- Objects are examined in the hand only: a comma in the rules' ``exists`` hides all others.
- ``use`` always turns on, and works on a lamp in a closed receptacle.
- What was taken from a receptacle and lies at its place, but not in it, is "next to it".
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from sys import intern
from typing import Any, NamedTuple, Self

from rsipo_lightning.environments.alfworld.game import Game, View
from rsipo_lightning.errors import DataError

Fact = tuple[str, ...]  # predicate and arguments, in lower case

# What actions change, and what they change without a trace. All other facts are constant.
_FLUENT = frozenset(
    {
        *("atlocation", "inreceptacle", "objectatlocation", "opened", "holds", "holdsany"),
        *("isclean", "ishot", "iscool", "issliced", "istoggled"),
    }
)
_TRACELESS = frozenset({"checked", "ison"})
_MOVING = frozenset({"go", "open", "close", "take", "move"})  # verbs that change the commands
_PROPERTIES = (
    *("openable", "pickupable", "toggleable", "sliceable", "cleanable", "heatable", "coolable"),
    "isreceptacleobject",
)
_KNIVES = frozenset({"knifetype", "butterknifetype"})
# Rules that are known, by hash: the types of receptacle that clean. The first are those of the
# released games, the second those of the package (0.4.0 to 0.4.2).
_CLEANERS = {
    "e733dcfa5154f9d5": ("sinktype", "sinkbasintype"),
    "915e118f4f32b4d8": ("sinkbasintype",),
}
# Words that are known, by hash: those of the released games and, the same laid out otherwise, of
# the package (0.4.0 to 0.4.2).
_WORDS = frozenset({"4cff29707b7984f6", "160460f6028632bb"})
_OTHER = "(known are those of ALFWorld 0.4): set env.engine=textworld to play it"
_TASK = re.compile(r'"task"\s*:\s*\[\s*\{\s*"rhs"\s*:\s*("(?:[^"\\]|\\.)*")')
_TOKEN = re.compile(r"[()]|[^\s()]+")
_COMMENT = re.compile(";.*")
_ROOM = "You are in the middle of a room. Looking quickly around you, you see"
_BESIDE = "Next to it, you see"
_HELP = """Available commands:
  look:                             look around your current location
  inventory:                        check your current inventory
  go to (receptacle):               move to a receptacle
  open (receptacle):                open a receptacle
  close (receptacle):               close a receptacle
  take (object) from (receptacle):  take an object from a receptacle
  move (object) to (receptacle):  place an object in or on a receptacle
  examine (something):              examine a receptacle or an object
  use (object):                     use an object
  heat (object) with (receptacle):  heat an object using a receptacle
  clean (object) with (receptacle): clean an object using a receptacle
  cool (object) with (receptacle):  cool an object using a receptacle
  slice (object) with (object):     slice an object using a sharp object
"""


class BuiltinEngine:
    """Opens games; the last parsed ones are kept, so that replays start at once."""

    def __init__(self, keep: int = 64) -> None:
        self._parsed = lru_cache(keep)(_parse)

    def open(self, game: Game) -> BuiltinGame:
        """A live game. One that cannot be read, or has other rules or words: DataError."""
        try:
            return BuiltinGame(self._parsed(game.domain, game.grammar, game.problem))
        except DataError as error:
            raise DataError(f"game {game.id}: {error}") from error

    def close(self) -> None:
        """Forget the parsed games."""
        self._parsed.cache_clear()


class _Action(NamedTuple):
    """What a command means; ids as in the problem."""

    verb: str
    what: str = ""
    where: str = ""


class BuiltinGame:
    """One live game: what has changed, over a parsed game that all its copies share."""

    __slots__ = ("_actions", "_at", "_facts", "_game", "_inside", "view")

    view: View

    def __init__(self, game: _Parsed) -> None:
        self._game = game
        self.reset()

    def reset(self) -> View:
        """Back to the start."""
        self._at = self._game.start
        self._facts = set(self._game.facts)
        self._inside = dict(self._game.inside)
        self._actions = self._possible()
        return self._show(self._game.intro)

    def step(self, command: str) -> View:
        """One command, word for word as it is listed; spaces around it do not count."""
        action = self._actions.get(command.strip())
        if action is None:
            return self._show("Nothing happens.")
        text = self._act(*action)
        if action.verb in _MOVING:
            self._actions = self._possible()
        return self._show(text)

    def clone(self) -> Self:
        """A copy that goes on from the same state."""
        copy = object.__new__(type(self))
        copy._game, copy._at = self._game, self._at
        copy._facts, copy._inside = self._facts.copy(), self._inside.copy()
        copy._actions, copy.view = self._actions, self.view
        return copy

    def state_hash(self) -> str:
        """SHA-256 of the facts that can change."""
        return hashlib.sha256("\n".join(sorted(map(" ".join, self._facts))).encode()).hexdigest()

    def close(self) -> None:
        """Nothing is held."""

    def _show(self, text: str) -> View:
        known = self._facts.issuperset
        won = all(any(map(known, ways)) for ways in self._game.goal)
        self.view = View(text, tuple(sorted(self._actions)), won)
        return self.view

    # ---- which commands there are

    def _possible(self) -> dict[str, _Action]:
        """Every command that changes or tells something, with its meaning."""
        game, names, at, facts = self._game, self._game.names, self._at, self._facts
        actions = game.standing(at)
        held = self._held()
        full = ("holdsany", game.agent) in facts
        for o in held:
            actions[f"examine {names[o]}"] = _Action("examine", o)
            if o in game.knives:
                for co in game.having["sliceable"]:
                    if ("objectatlocation", co, at) in facts:
                        command = f"slice {names[co]} with {names[o]}"
                        actions[command] = _Action("slice", co, o)
        for r in game.places.get(at, ()):
            name = names[r]
            visible = True
            if r in game.having["openable"]:
                visible = ("opened", r) in facts
                verb = "close" if visible else "open"
                actions[f"{verb} {name}"] = _Action(verb, r)
            for o in self._inside.get(r, ()):
                if visible and not full and o in game.having["pickupable"]:
                    actions[f"take {names[o]} from {name}"] = _Action("take", o, r)
                if o in game.having["toggleable"]:
                    actions[f"use {names[o]}"] = _Action("use", o)
            for o in held:
                if visible and game.fits(o, r):
                    actions[f"move {names[o]} to {name}"] = _Action("move", o, r)
                for verb in game.treatments.get(r, ()):
                    if o in game.having[f"{verb}able"]:
                        actions[f"{verb} {names[o]} with {name}"] = _Action(verb, o, r)
        return actions

    def _held(self) -> list[str]:
        return sorted(fact[2] for fact in self._facts if fact[0] == "holds")

    # ---- what they do and say

    def _act(self, verb: str, what: str, where: str) -> str:
        """Change the state; the answer."""
        game, facts, names = self._game, self._facts, self._game.names
        agent, name, place = game.agent, names.get(what, ""), names.get(where, "")
        match verb:
            case "look":
                return self._around()
            case "inventory":
                if ("holdsany", agent) not in facts:
                    return "You are not carrying anything."
                return f"You are carrying: {_some(names[o] for o in self._held())}."
            case "help":
                return _HELP
            case "examine":
                return self._object(what)
            case "inspect":
                return self._receptacle(what)
            case "go":
                facts.remove(("atlocation", agent, self._at))
                facts.add(("atlocation", agent, where))
                self._at = where
                return f"You arrive at {name}. {self._receptacle(what)}"
            case "open":
                facts.add(("opened", what))
                return f"You open the {name}. {self._receptacle(what)}"
            case "close":
                facts.remove(("opened", what))
                return f"You close the {name}."
            case "take":
                facts.remove(("inreceptacle", what, where))
                facts.add(("not_inreceptacle", what, where))
                facts.discard(("objectatlocation", what, self._at))
                facts.update((("holds", agent, what), ("holdsany", agent)))
                self._inside[where] = tuple(o for o in self._inside[where] if o != what)
                return f"You pick up the {name} from the {place}."
            case "move":
                facts.discard(("not_inreceptacle", what, where))
                facts.add(("objectatlocation", what, self._at))
                facts.remove(("holds", agent, what))
                facts.discard(("holdsany", agent))
                if ("inreceptacle", what, where) not in facts:
                    facts.add(("inreceptacle", what, where))
                    self._inside[where] = tuple(sorted((*self._inside.get(where, ()), what)))
                return f"You move the {name} to the {place}."
            case "use":
                facts.add(("istoggled", what))
                return f"You turn on the {name}."
            case "slice":
                facts.add(("issliced", what))
                return f"You sliced the {name} with the {place}."
            case "clean":
                facts.add(("isclean", what))
            case "heat":
                facts.add(("ishot", what))
                facts.discard(("iscool", what))
            case "cool":
                facts.add(("iscool", what))
                facts.discard(("ishot", what))
        return f"You {verb} the {name} using the {place}."

    def _around(self) -> str:
        """What ``look`` says."""
        names, here = self._game.names, self._game.places.get(self._at, ())
        if not here:
            return f"{_ROOM} nothing."
        beside = sorted(
            fact
            for fact in self._facts
            if fact[0] == "not_inreceptacle"
            and fact[2] in here
            and ("objectatlocation", fact[1], self._at) in self._facts
        )
        facing = _listed([names[r] for r in here])
        return f"You are facing the {facing}. {_BESIDE} {_some(names[f[1]] for f in beside)}."

    def _receptacle(self, r: str) -> str:
        names = self._game.names
        inside = _some(names[o] for o in self._inside.get(r, ()))
        if r not in self._game.having["openable"]:
            return f"On the {names[r]}, you see {inside}."
        if ("opened", r) in self._facts:
            return f"The {names[r]} is open. In it, you see {inside}."
        return f"The {names[r]} is closed."

    def _object(self, o: str) -> str:
        names, having, facts = self._game.names, self._game.having, self._facts
        name = names[o]
        if o in having["isreceptacleobject"]:
            inside = _some(names[x] for x in self._game.inner.get(o, ()))
            return f"This is a normal {name}. In it, you see {inside}."
        sliced = ("issliced", o) in facts
        hot, cool = ("ishot", o) in facts, ("iscool", o) in facts
        states = {"hot": hot, "cool": cool and not hot, "clean": ("isclean", o) in facts}
        if words := " and ".join(word for word, holds in states.items() if holds):
            if sliced:
                words += " sliced"
            return f"This is a {'cold' if words == 'cool' else words} {name}."
        if o in having["toggleable"] and ("istoggled", o) in facts:
            return f"This {name} is on."
        if o in having["sliceable"] and sliced:
            return f"This is a sliced {name}."
        return f"There's nothing special about {name}."


def _listed(items: Sequence[str]) -> str:
    if len(items) < 2:
        return items[0] if items else "nothing"
    return f"{', '.join(items[:-1])}, and {items[-1]}"


def _some(names: Iterable[str]) -> str:
    return _listed([f"a {name}" for name in names])


# ---- a game, parsed


@dataclass(frozen=True, slots=True)
class _Parsed:
    """What never changes in a game. Ids of objects (o), receptacles (r) and locations (l)."""

    intro: str
    agent: str
    start: str  # l
    facts: frozenset[Fact]  # that can change, at the start
    goal: tuple[tuple[frozenset[Fact], ...], ...]  # of each part one set of facts must hold
    names: Mapping[str, str]
    places: Mapping[str, tuple[str, ...]]  # l -> sorted r
    inside: Mapping[str, tuple[str, ...]]  # r -> sorted o, at the start
    inner: Mapping[str, tuple[str, ...]]  # o -> sorted o that it holds, for good
    having: Mapping[str, frozenset[str]]  # property -> o or r
    treatments: Mapping[str, tuple[str, ...]]  # r -> clean, heat, cool
    knives: frozenset[str]
    kinds: Mapping[str, frozenset[str]]  # o -> its types
    takes: Mapping[str, frozenset[str]]  # r -> types of o that it may hold
    _standing: dict[str, dict[str, _Action]] = field(default_factory=dict)  # as far as computed

    def fits(self, o: str, r: str) -> bool:
        """Whether the receptacle may hold the object."""
        return not self.kinds.get(o, frozenset()).isdisjoint(self.takes.get(r, ()))

    def standing(self, at: str) -> dict[str, _Action]:
        """A fresh copy of the commands that one has at a location, whatever has happened."""
        if at not in self._standing:
            actions = {verb: _Action(verb) for verb in ("look", "inventory", "help")}
            for place, receptacles in self.places.items():
                for r in receptacles:
                    if place == at:
                        actions[f"examine {self.names[r]}"] = _Action("inspect", r)
                    else:
                        actions[f"go to {self.names[r]}"] = _Action("go", r, place)
            self._standing[at] = actions
        return self._standing[at].copy()


def _parse(domain: str, grammar: str, problem: str) -> _Parsed:
    """DataError for what is no game, or one with other rules or words."""
    cleaners, task = _cleaners(domain), _task(grammar)
    try:
        return _read(_nested(problem), cleaners, task)
    except DataError:
        raise
    except (KeyError, ValueError, TypeError, IndexError) as error:
        what = f"{type(error).__name__}: {error}"
        raise DataError(f"its PDDL problem cannot be read ({what})") from error


def _read(define: list[Any], cleaners: Sequence[str], task: str) -> _Parsed:
    """What a parsed problem says. Raises whatever a malformed one leads to."""
    sections = {part[0]: part[1:] for part in define[1:]}
    kinds = dict(_typed(sections[":objects"]))
    fluents: list[Fact] = []
    constant: dict[str, list[Fact]] = defaultdict(list)  # predicate -> arguments
    for predicate, *arguments in sections[":init"]:
        if predicate in _FLUENT:
            fluents.append((predicate, *arguments))
        elif predicate != "=":  # a cost
            constant[predicate].append(tuple(arguments))
    entities = {x for facts in constant.values() for arguments in facts for x in arguments}
    entities.update(x for fact in fluents for x in fact[1:])
    if unknown := entities - kinds.keys():
        raise DataError(f"{min(unknown)} has facts but is not among the objects")

    ((agent, start),) = (fact[1:] for fact in fluents if fact[0] == "atlocation")
    names = _names(entities)
    located = sorted(set(constant["receptacleatlocation"]))
    if len(located) != len({r for r, _ in located}):
        raise DataError("a receptacle stands at two places")
    places = _grouped((place, r) for r, place in located)
    if start in places:
        around = (
            f"You are facing the {_listed([names[r] for r in places[start]])}. {_BESIDE} nothing."
        )
    else:
        around = f"{_ROOM} {_some(names[r] for r, _ in located)}."

    kinds_of_r = _grouped(constant["receptacletype"])
    contained = _grouped(constant["cancontain"])
    treating = {"clean": cleaners, "heat": ("microwavetype",), "cool": ("fridgetype",)}
    return _Parsed(
        intro=f"-= Welcome to TextWorld, ALFRED! =-\n\n{around}\n\n{task}",
        agent=agent,
        start=start,
        facts=frozenset(fluents),
        goal=_goal(sections[":goal"][0], constant, kinds),
        names=names,
        places=places,
        inside=_grouped((r, o) for _, o, r in _of("inreceptacle", fluents)),
        inner=_grouped((outer, o) for o, outer in constant["inreceptacleobject"]),
        having={name: frozenset(x for (x,) in constant[name]) for name in _PROPERTIES},
        treatments={
            r: tuple(verb for verb in treating if not set(treating[verb]).isdisjoint(kinds))
            for r, kinds in kinds_of_r.items()
        },
        knives=frozenset(o for o, kind in constant["objecttype"] if kind in _KNIVES),
        kinds={o: frozenset(kinds) for o, kinds in _grouped(constant["objecttype"]).items()},
        takes={
            r: frozenset(o for kind in kinds for o in contained.get(kind, ()))
            for r, kinds in kinds_of_r.items()
        },
    )


def _of(predicate: str, facts: Iterable[Fact]) -> Iterator[Fact]:
    return (fact for fact in facts if fact[0] == predicate)


def _grouped(pairs: Iterable[Fact]) -> dict[str, tuple[str, ...]]:
    """The sorted second members for each first one."""
    groups: dict[str, set[str]] = defaultdict(set)
    for key, value in pairs:
        groups[key].add(value)
    return {key: tuple(sorted(values)) for key, values in groups.items()}


def _names(ids: Iterable[str]) -> dict[str, str]:
    """The name that each id is shown by. The ids of a kind count down: the first has the highest
    number.
    """
    kinds: dict[str, list[str]] = defaultdict(list)
    names = {}
    for x in sorted(ids):
        kind, numbered, _ = x.partition("_bar_")
        if numbered:
            kinds[kind + "basin" * ("basin" in x)].append(x)
        else:
            names[x] = f"{x} "
    for kind, members in kinds.items():
        for number, x in zip(range(len(members), 0, -1), members, strict=True):
            names[x] = f"{kind} {number}"
    return names


def _nested(text: str) -> list[Any]:
    """The one parenthesised list that a text holds, in lower case and without comments."""
    stack: list[list[Any]] = [[]]
    for token in _TOKEN.findall(_COMMENT.sub("", text.lower())):
        if token == "(":
            stack.append([])
        elif token == ")":
            done = stack.pop()
            if not stack:
                raise DataError("its PDDL problem has a ) too many")
            stack[-1].append(done)
        else:
            stack[-1].append(intern(token))
    if len(stack) > 1:
        raise DataError("its PDDL problem ends early")
    (whole,) = stack[0]
    return whole  # type: ignore[no-any-return]


def _typed(words: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(name, type) of ``a b - type c - type``."""
    names: list[str] = []
    after = iter(words)
    for word in after:
        if word == "-":
            kind = next(after)
            yield from ((name, kind) for name in names)
            names = []
        else:
            names.append(word)
    yield from ((name, "object") for name in names)


def _goal(
    goal: list[Any], constant: Mapping[str, Sequence[Fact]], kinds: Mapping[str, str]
) -> tuple[tuple[frozenset[Fact], ...], ...]:
    """A goal of ``and``, ``exists``, ``not =`` and facts, with all that is constant worked out."""
    parts = goal[1:] if goal[0] == "and" else [goal]
    found = tuple(tuple(_Ways(part).all(constant, kinds)) for part in parts)
    if not all(found):
        raise DataError("its goal can never hold")
    return found


class _Ways:
    """One part of a goal: conditions on variables that something must exist for."""

    def __init__(self, part: list[Any]) -> None:
        self._kinds: dict[str, str] = {}  # of each variable
        self._conditions: list[Fact] = []
        self._different: list[tuple[str, str]] = []
        self._add(part)

    def _add(self, part: list[Any]) -> None:
        head, *rest = part
        if head == "and":
            for one in rest:
                self._add(one)
        elif head == "exists":
            variables, body = rest
            for name, kind in _typed(variables):
                if name in self._kinds:
                    raise DataError(f"its goal has two {name}")
                self._kinds[name] = kind
            self._add(body)
        elif head == "not" and rest[0][0] == "=":
            self._different.append((rest[0][1], rest[0][2]))
        elif head in _TRACELESS or not all(isinstance(word, str) for word in part):
            raise DataError(f"its goal has a condition '{head}', which the built-in engine lacks")
        else:
            self._conditions.append(tuple(part))

    def all(
        self, constant: Mapping[str, Sequence[Fact]], kinds: Mapping[str, str]
    ) -> set[frozenset[Fact]]:
        """The facts that change, for each choice of the variables that the others allow."""
        choices: list[dict[str, str]] = [{}]
        for predicate, *terms in dict.fromkeys(self._conditions):
            if predicate not in _FLUENT:
                choices = [
                    choice | dict(zip(terms, fact, strict=True))
                    for choice in choices
                    for fact in constant.get(predicate, ())
                    if all(
                        choice.get(term, x if term in self._kinds else term) == x
                        for term, x in zip(terms, fact, strict=True)
                    )
                ]
        for name, kind in self._kinds.items():
            if any(name not in choice for choice in choices):
                every = [x for x, is_a in kinds.items() if kind in (is_a, "object")]
                choices = [choice | {name: x} for choice in choices for x in every]
        return {
            frozenset(
                (predicate, *(choice.get(term, term) for term in terms))
                for predicate, *terms in self._conditions
                if predicate in _FLUENT
            )
            for choice in choices
            if all(choice.get(a, a) != choice.get(b, b) for a, b in self._different)
        }


# ---- rules and words


def _digest(words: Iterable[str]) -> str:
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:16]


@lru_cache(8)
def _cleaners(domain: str) -> tuple[str, ...]:
    """The types of receptacle that clean."""
    try:
        return _CLEANERS[_digest(_TOKEN.findall(_COMMENT.sub("", domain.lower())))]
    except KeyError:
        raise DataError(f"it has a PDDL domain of its own {_OTHER}") from None


def _task(grammar: str) -> str:
    """The sentence that states the task."""
    found = _TASK.search(grammar)
    if not found or not _known(grammar[: found.start(1)] + grammar[found.end(1) :]):
        raise DataError(f"it has a text grammar of its own {_OTHER}")
    return json.loads(found[1])  # type: ignore[no-any-return]


@lru_cache(8)
def _known(grammar: str) -> bool:
    """Whether these are words that :class:`BuiltinGame` says; the task is left out."""
    return _digest(grammar.split()) in _WORDS
