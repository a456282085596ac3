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
from functools import lru_cache
from typing import Self

from rsipo_lightning.environments.alfworld.game import Game, View
from rsipo_lightning.environments.alfworld.problem import (
    BESIDE,
    ROOM,
    Action,
    Parsed,
    listed,
    parse,
    some,
)
from rsipo_lightning.errors import DataError

_MOVING = frozenset({"go", "open", "close", "take", "move"})  # verbs that change the commands
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
        self._parsed = lru_cache(keep)(parse)

    def open(self, game: Game) -> BuiltinGame:
        """A live game. One that cannot be read, or has other rules or words: DataError."""
        try:
            return BuiltinGame(self._parsed(game.domain, game.grammar, game.problem))
        except DataError as error:
            raise DataError(f"game {game.id}: {error}") from error

    def close(self) -> None:
        """Forget the parsed games."""
        self._parsed.cache_clear()


class BuiltinGame:
    """One live game: what has changed, over a parsed game that all its copies share."""

    __slots__ = ("_actions", "_at", "_facts", "_game", "_inside", "view")

    view: View

    def __init__(self, game: Parsed) -> None:
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

    def _possible(self) -> dict[str, Action]:
        """Every command that changes or tells something, with its meaning."""
        game, names, at, facts = self._game, self._game.names, self._at, self._facts
        actions = game.standing(at)
        held = self._held()
        full = ("holdsany", game.agent) in facts
        for o in held:
            actions[f"examine {names[o]}"] = Action("examine", o)
            if o in game.knives:
                for co in game.having["sliceable"]:
                    if ("objectatlocation", co, at) in facts:
                        command = f"slice {names[co]} with {names[o]}"
                        actions[command] = Action("slice", co, o)
        for r in game.places.get(at, ()):
            name = names[r]
            visible = True
            if r in game.having["openable"]:
                visible = ("opened", r) in facts
                verb = "close" if visible else "open"
                actions[f"{verb} {name}"] = Action(verb, r)
            for o in self._inside.get(r, ()):
                if visible and not full and o in game.having["pickupable"]:
                    actions[f"take {names[o]} from {name}"] = Action("take", o, r)
                if o in game.having["toggleable"]:
                    actions[f"use {names[o]}"] = Action("use", o)
            for o in held:
                if visible and game.fits(o, r):
                    actions[f"move {names[o]} to {name}"] = Action("move", o, r)
                for verb in game.treatments.get(r, ()):
                    if o in game.having[f"{verb}able"]:
                        actions[f"{verb} {names[o]} with {name}"] = Action(verb, o, r)
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
                return f"You are carrying: {some(names[o] for o in self._held())}."
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
            return f"{ROOM} nothing."
        beside = sorted(
            fact
            for fact in self._facts
            if fact[0] == "not_inreceptacle"
            and fact[2] in here
            and ("objectatlocation", fact[1], self._at) in self._facts
        )
        facing = listed([names[r] for r in here])
        return f"You are facing the {facing}. {BESIDE} {some(names[f[1]] for f in beside)}."

    def _receptacle(self, r: str) -> str:
        names = self._game.names
        inside = some(names[o] for o in self._inside.get(r, ()))
        if r not in self._game.having["openable"]:
            return f"On the {names[r]}, you see {inside}."
        if ("opened", r) in self._facts:
            return f"The {names[r]} is open. In it, you see {inside}."
        return f"The {names[r]} is closed."

    def _object(self, o: str) -> str:
        names, having, facts = self._game.names, self._game.having, self._facts
        name = names[o]
        if o in having["isreceptacleobject"]:
            inside = some(names[x] for x in self._game.inner.get(o, ()))
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
