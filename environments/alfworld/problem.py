"""What a game's texts say: its PDDL problem, and whether its rules and words are known ones."""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from sys import intern
from typing import Any, NamedTuple

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
ROOM = "You are in the middle of a room. Looking quickly around you, you see"
BESIDE = "Next to it, you see"


class _Unfamiliar(DataError):
    """A problem that the built-in engine does not know how to play; the package's may."""


class Action(NamedTuple):
    """What a command means; ids as in the problem."""

    verb: str
    what: str = ""
    where: str = ""


@dataclass(frozen=True, slots=True)
class Parsed:
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
    _standing: dict[str, dict[str, Action]] = field(default_factory=dict)  # as far as computed

    def fits(self, o: str, r: str) -> bool:
        """Whether the receptacle may hold the object."""
        return not self.kinds.get(o, frozenset()).isdisjoint(self.takes.get(r, ()))

    def standing(self, at: str) -> dict[str, Action]:
        """A fresh copy of the commands that one has at a location, whatever has happened."""
        if at not in self._standing:
            actions = {verb: Action(verb) for verb in ("look", "inventory", "help")}
            for place, receptacles in self.places.items():
                for r in receptacles:
                    if place == at:
                        actions[f"examine {self.names[r]}"] = Action("inspect", r)
                    else:
                        actions[f"go to {self.names[r]}"] = Action("go", r, place)
            self._standing[at] = actions
        return self._standing[at].copy()


def parse(domain: str, grammar: str, problem: str) -> Parsed:
    """DataError for what is no game, or one with other rules or words."""
    return _parse(problem, _cleaners(domain), _task(grammar))


def check_problem(problem: str) -> None:
    """DataError for what is no problem of a game, whichever engine is to play it."""
    with suppress(_Unfamiliar):
        _parse(problem, (), "")


def _parse(problem: str, cleaners: Sequence[str], task: str) -> Parsed:
    try:
        return _read(_nested(problem), cleaners, task)
    except DataError:
        raise
    except (KeyError, ValueError, TypeError, IndexError) as error:
        what = f"{type(error).__name__}: {error}"
        raise DataError(f"its PDDL problem cannot be read ({what})") from error


def _read(define: list[Any], cleaners: Sequence[str], task: str) -> Parsed:
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
    names = names_of(entities)
    located = sorted(set(constant["receptacleatlocation"]))
    if len(located) != len({r for r, _ in located}):
        raise _Unfamiliar("a receptacle stands at two places")
    places = _grouped((place, r) for r, place in located)
    if start in places:
        around = (
            f"You are facing the {listed([names[r] for r in places[start]])}. {BESIDE} nothing."
        )
    else:
        around = f"{ROOM} {some(names[r] for r, _ in located)}."

    kinds_of_r = _grouped(constant["receptacletype"])
    contained = _grouped(constant["cancontain"])
    treating = {"clean": cleaners, "heat": ("microwavetype",), "cool": ("fridgetype",)}
    return Parsed(
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


def listed(items: Sequence[str]) -> str:
    """Items as a game enumerates them: ``"a, and b"``, or "nothing"."""
    if len(items) < 2:
        return items[0] if items else "nothing"
    return f"{', '.join(items[:-1])}, and {items[-1]}"


def some(names: Iterable[str]) -> str:
    """:func:`listed`, each with its article."""
    return listed([f"a {name}" for name in names])


def _of(predicate: str, facts: Iterable[Fact]) -> Iterator[Fact]:
    return (fact for fact in facts if fact[0] == predicate)


def _grouped(pairs: Iterable[Fact]) -> dict[str, tuple[str, ...]]:
    """The sorted second members for each first one."""
    groups: dict[str, set[str]] = defaultdict(set)
    for key, value in pairs:
        groups[key].add(value)
    return {key: tuple(sorted(values)) for key, values in groups.items()}


def names_of(ids: Iterable[str]) -> dict[str, str]:
    """The name that each id is shown by. The ids of a kind count down: the first has the highest
    number.

    >>> names_of(["Mug_bar_1", "Mug_bar_2"])
    {'Mug_bar_1': 'mug 2', 'Mug_bar_2': 'mug 1'}
    """
    kinds: dict[str, list[str]] = defaultdict(list)
    names = {}
    for x in sorted(ids):
        kind, numbered, _ = x.lower().partition("_bar_")
        if numbered:
            kinds[kind + "basin" * ("basin" in x.lower())].append(x)
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
                    raise _Unfamiliar(f"its goal has two {name}")
                self._kinds[name] = kind
            self._add(body)
        elif head == "not" and rest[0][0] == "=":
            self._different.append((rest[0][1], rest[0][2]))
        elif head in _TRACELESS or not all(isinstance(word, str) for word in part):
            raise _Unfamiliar(f"its goal has a condition '{head}', which the built-in engine lacks")
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
    """Whether these are words that the built-in engine says; the task is left out."""
    return _digest(grammar.split()) in _WORDS
