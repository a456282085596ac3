"""A scripted expert for the six types that acts from text alone, and scripted skills.

    expert = Housekeeper(random.Random(0))
    command = expert.decide(view.text, view.admissible)  # "go to fridge 1"

It searches receptacles in the order in which the wanted object is likely found there, type by type
and number by number, so that a policy which imitates it can tell the next place from the last one.

    skill = random.Random(0).choice(skills("pick_heat_then_place_in_recep", "misleading"))
    expert = Housekeeper(random.Random(0), skill.plan)  # what obeying that skill looks like

Skills name no receptacle but the appliances, and no object, number or place of a game.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from rsipo_lightning.environments.alfworld.game import TYPES, PlayedGame
from rsipo_lightning.environments.alfworld.house import OBJECTS, OPENABLE, TREATMENTS
from rsipo_lightning.environments.experts import KINDS, ScriptedSkill, numbered, scripted
from rsipo_lightning.errors import DataError
from rsipo_lightning.types import Trajectory

NOTHING = "Nothing happens."

_TASKS = {  # how the task of each type is put
    "pick_clean_then_place_in_recep": r"(?:put a clean|clean some) (\w+) (?:and put it )?in (\w+)",
    "pick_heat_then_place_in_recep": r"(?:put a hot|heat some) (\w+) (?:and put it )?in (\w+)",
    "pick_cool_then_place_in_recep": r"(?:put a cool|cool some) (\w+) (?:and put it )?in (\w+)",
    "pick_two_obj_and_place": r"(?:put|find) two (\w+) (?:and put them )?in (\w+)",
    "look_at_obj_in_light": r"(?:look at|examine the) (\w+) (?:under|with) the (\w+)",
    "pick_and_place_simple": r"put (?:a|some) (\w+) (?:in|on) (\w+)",
}
_APPLIANCES = {  # verb, and where it is done
    kind: (one.verb, one.where.lower()) for kind, one in TREATMENTS.items()
}
_PLACES = {
    name.lower(): {place.lower(): share for place, share in kind.places.items()}
    for name, kind in OBJECTS.items()
}
_CLOSABLE = frozenset(name.lower() for name in OPENABLE)
SEEN = re.compile(r"(?:On the (\w+ \d+)|The (\w+ \d+) is open\. In it), you see (.*?)\.")
NAME = re.compile(r"[a-z]+ \d+")
_TAKE = re.compile(r"take (\w+ \d+) from (\w+ \d+)")
_TAKEN = re.compile(r"You pick up the (\w+ \d+) from the (\w+ \d+)\.")
_MOVED = re.compile(r"You move the (\w+ \d+) to the (\w+ \d+)\.")
_TREATED = re.compile(r"You (clean|heat|cool) the (\w+ \d+) using")


@dataclass(frozen=True, slots=True)
class Goal:
    """What a task line asks for."""

    type: str  # one of TYPES
    object: str  # type of the object, e.g. "mug"
    target: str  # type of the receptacle, or of the lamp


def read_goal(text: str) -> Goal:
    """The goal that the task line of a game's text states. DataError if it states none.

    >>> read_goal("Your task is to: put a hot mug in shelf.")
    Goal(type='pick_heat_then_place_in_recep', object='mug', target='shelf')
    """
    task = text.partition("Your task is to: ")[2].partition("\n")[0]
    for kind, pattern in _TASKS.items():
        if match := re.match(pattern, task):
            return Goal(kind, *match.groups())
    raise DataError(f"the scripted expert cannot read the task '{task or text[:80]}'")


class Housekeeper:
    """Plays one episode by a plan; see :meth:`decide`."""

    def __init__(
        self,
        rng: random.Random,
        plan: str = "workflow",
        noise: float = 0.0,
        mistakes: float = 0.0,
    ) -> None:
        """``plan`` is a key of PLANS; ``noise`` the share of turns whose command is not the plan's:
        0 is the best it can, 1 never follows the plan. ``mistakes`` is the share of turns before
        those whose command does nothing, as a weak policy's would; see ``mistaken``.
        """
        if plan not in PLANS:
            raise KeyError(f"no plan '{plan}' (have: {', '.join(PLANS)})")
        self.mistaken: list[bool] = []  # by turn: from its command nothing can be learned
        self._rng, self._plan, self._noise, self._mistakes = rng, plan, noise, mistakes
        self._goal = Goal("", "", "")  # until the first text
        self._options: Sequence[str] = ()  # what the game would accept
        self._said = ""  # latest command
        self._order: list[str] = []  # receptacles, likely ones first
        self._last = ""  # latest receptacle of the search
        self._done: set[str] = set()  # receptacles that were looked into
        self._seen: dict[str, list[str]] = {}  # {receptacle: objects in it}
        self._lamp = ""  # a receptacle beside which the lamp can be used
        self._held = ""  # object in the hand
        self._at_hand = "", ""  # wanted object that can be taken now, and the command for it
        self._ready: set[str] = set()  # objects that were treated

    def decide(self, text: str, admissible: Sequence[str]) -> str:
        """The next command.

        ``text`` is the game's newest answer; the first one must hold the task line. ``admissible``
        are the commands that the game would accept now.
        """
        self._options = admissible
        if not self._order:
            self._goal = read_goal(text)
            self._order = self._likely_first()
        self._observe(text)
        self._at_hand = self._wanted()
        self.mistaken.append(self._rng.random() < self._mistakes)
        if self.mistaken[-1]:
            self._said = self._mistake()
        elif self._rng.random() < self._noise:
            self._said = self._distraction()
        else:
            self._said = PLANS[self._plan](self)
        return self._said

    def thought(self) -> str:
        """The object that counts, by name once it can be taken or is in the hand: ``"mug 1"``."""
        return self._held or self._at_hand[0] or self._goal.object

    # ---- what it knows

    def _likely_first(self) -> list[str]:
        """All receptacles, by the share of objects like the wanted one that a command finds."""
        names = [o.removeprefix("go to ") for o in self._options if o.startswith("go to ")]
        count = Counter(map(_type, names))
        places = _PLACES.get(self._goal.object, {})
        share = {t: places.get(t, 1) / count[t] / (2 if t in _CLOSABLE else 1) for t in count}
        return sorted(names, key=lambda name: (-share[_type(name)], _type(name), _number(name)))

    def _observe(self, text: str) -> None:
        """Learn from an answer and from what may be done now."""
        if match := _TAKEN.search(text):
            self._held = match[1]
            self._seen[match[2]] = [o for o in self._seen.get(match[2], []) if o != self._held]
        if match := _MOVED.search(text):
            self._held = ""
            self._seen.setdefault(match[2], []).append(match[1])
        if match := _TREATED.search(text):
            treatment = TREATMENTS.get(self._goal.type)
            if treatment and match[1] == treatment.verb:
                self._ready.add(match[2])
            elif treatment and match[1] == treatment.undo:
                self._ready.discard(match[2])
        if match := SEEN.search(text):
            self._seen[match[1] or match[2]] = NAME.findall(match[3])
        lamp = self._first(f"use {self._goal.target} ")
        for option in self._options:
            verb, _, name = option.partition(" ")
            if verb == "examine" and name in self._order:
                if lamp:
                    self._lamp = name
                if f"open {name}" not in self._options:
                    self._done.add(name)
            elif match := _TAKE.fullmatch(option):
                inside = self._seen.setdefault(match[2], [])
                if match[1] not in inside:
                    inside.append(match[1])

    def _holds(self, place: str) -> bool:
        """Whether an object of the wanted type is known to be in a receptacle."""
        return any(_type(o) == self._goal.object for o in self._seen.get(place, ()))

    def _target(self) -> str:
        """The target: for two objects the one that has the first of them, else one at hand."""
        targets = [place for place in self._order if _type(place) == self._goal.target]
        if self._goal.type == "pick_two_obj_and_place" and any(map(self._holds, targets)):
            return next(filter(self._holds, targets))
        here = (place for place in targets if f"move {self._held} to {place}" in self._options)
        return next(here, targets[0])

    def _kept(self) -> str:
        """The receptacle from which nothing is taken any more, "" if there is none."""
        return self._target() if self._goal.type == "pick_two_obj_and_place" else ""

    def _wanted(self) -> tuple[str, str]:
        """The first object of the wanted type that can be taken, and how; "" if there is none."""
        matches = [_TAKE.fullmatch(option) for option in self._options]
        takes = [m for m in matches if m and _type(m[1]) == self._goal.object]
        kept = self._kept() if takes else ""
        return next(((m[1], m[0]) for m in takes if m[2] != kept), ("", ""))

    def _first(self, start: str) -> str:
        """The first admissible command that starts like this, "" if there is none."""
        return next((o for o in self._options if o.startswith(start)), "")

    # ---- the plans

    def _workflow(self) -> str:
        """Find and take the object, treat it, bring it to the target."""
        kind, held = self._goal.type, self._held
        if not held:
            return self._fetch()
        if _type(held) != self._goal.object:
            return self._first(f"move {held} to ") or self._search()
        if kind in _APPLIANCES and held not in self._ready:
            verb, where = _APPLIANCES[kind]
            place = next(place for place in self._order if _type(place) == where)
            return self._first(f"{verb} {held} with ") or self._visit(place)
        if kind == "look_at_obj_in_light":
            use = self._first(f"use {self._goal.target} ")
            return use or (self._visit(self._lamp) if self._lamp else self._search())
        target = self._target()
        move = f"move {held} to {target}"
        return move if move in self._options else self._visit(target)

    def _fetch(self) -> str:
        """Take the object, go where one was seen, or search on."""
        if take := self._at_hand[1]:
            return take
        kept = self._kept()
        known = (place for place in self._order if place != kept and self._holds(place))
        place = next(known, "")
        return self._visit(place) if place else self._search()

    def _visit(self, place: str) -> str:
        """The next command on the way into a receptacle."""
        commands = (f"go to {place}", f"open {place}", f"examine {place}")
        return next((c for c in commands if c in self._options), "look")

    def _search(self) -> str:
        """Look into the next receptacle of the order; begin again after the last one."""
        if self._done.issuperset(self._order):
            self._done.clear()
        start = self._order.index(self._last) if self._last else 0
        places = self._order[start:] + self._order[:start]
        self._last = next(place for place in places if place not in self._done)
        return self._visit(self._last)

    def _detour(self) -> str:
        """Look around after each arrival, then go on: gets there if turns can be spared."""
        return "look" if self._said.startswith("go to ") else self._workflow()

    def _unprepared(self) -> str:
        """Leave out what the type is about: the treatment, the lamp or the second object."""
        if self._goal.type in _APPLIANCES:
            self._ready.add(self._held)
            return self._workflow()
        light = self._goal.type == "look_at_obj_in_light"
        enough = self._held if light else self._holds(self._target())
        return self._wander() if enough else self._workflow()

    def _wander(self) -> str:
        """Go to any receptacle, again and again."""
        return self._rng.choice([o for o in self._options if o.startswith("go to ")])

    def _repeat(self) -> str:
        """The first command of the workflow, again and again."""
        return self._said or self._workflow()

    def _distraction(self) -> str:
        """A command that does not serve the task, or one that the game may not accept any more."""
        kind = self._rng.random()
        if kind < 0.5:
            return self._wander()
        return self._said if kind < 0.6 and self._said else self._rng.choice(self._options)

    def _mistake(self) -> str:
        """Most often nothing happens then."""
        at = {*self._order} & {option.partition(" ")[2] for option in self._options}
        near = [o.removeprefix("go to ") for o in self._options if o.startswith("go to ")]
        here = next(iter(sorted(at.difference(near))), self._order[0])
        thing = f"{self._goal.object} {self._rng.randint(1, 3)}"
        wrong = (f"go to {here}", f"take {thing} from {here}", f"open {here}", self._said or "look")
        return self._rng.choice(wrong)


PLANS: dict[str, Callable[[Housekeeper], str]] = {
    "workflow": Housekeeper._workflow,
    "detour": Housekeeper._detour,
    "unprepared": Housekeeper._unprepared,
    "wander": Housekeeper._wander,
    "repeat": Housekeeper._repeat,
}


def _type(name: str) -> str:
    """``"mug"`` of ``"mug 2"``."""
    return name.partition(" ")[0]


def _number(name: str) -> int:
    return int(name.partition(" ")[2])


class Player:
    """A housekeeper in the place of a policy.

    It plays along in a game of its own, which gives the same answers to the same commands. So it
    needs no prompt, whatever the wording and however little of the game a prompt shows.
    """

    def __init__(self, game: PlayedGame, keeper: Housekeeper) -> None:
        """``game`` is at its start."""
        self._game, self.keeper = game, keeper

    def act(self, observation: str) -> str:
        """The next response: ``<think> mug 1</think><action>go to fridge 1</action>``."""
        command = self.keeper.decide(self._game.view.text, self._game.view.admissible)
        self._game.step(command)
        return f"<think> {self.keeper.thought()}</think><action>{command}</action>"

    def close(self) -> None:
        """Close its game."""
        self._game.close()


# ---- skills

_FIND = (
    "Search the room until you find the object and take it.",
    "Look in one after the other, open what is closed, and take the object.",
)
_PUT = ("Go to the target and put it there.", "Then go to the target and move it there.")
_WORKFLOW: dict[str, tuple[tuple[str, ...], ...]] = {  # the wordings of each step
    "pick_and_place_simple": (_FIND, _PUT),
    "look_at_obj_in_light": (
        _FIND,
        ("Go to the desklamp with it.", "Find the desklamp with the object in your hand."),
        ("Use the desklamp there.", "Then use the desklamp."),
    ),
    **{
        kind: (
            _FIND,
            (f"Go to the {where} and {verb} it.", f"{verb.capitalize()} it with the {where}."),
            _PUT,
        )
        for kind, (verb, where) in _APPLIANCES.items()
    },
    "pick_two_obj_and_place": (
        _FIND,
        _PUT,
        ("Find the second object and take it.", "Search again for one more and take it."),
        ("Put it in the same target.", "Move it to the same target as the first."),
    ),
}
_RECOVERY = (
    "If nothing happens, look around and do not run the same command again.",
    "When nothing happens, you are there: look what is next to you, then go on.",
)
_FORMAT = (
    "Write one action in each turn and close its tag.",
    "Keep the form: one command of the list, then the closed tag.",
)
_MISLEADING = {
    "wander": (
        "Go from one to the next and do not take the object.",
        "Do not take it. Go to some other target each turn.",
    ),
    "repeat": (
        "Run the first command again and again until the end.",
        "Do not go on. Repeat the same command each turn.",
    ),
}
_UNPREPARED = {  # what the plan of that name leaves out
    "look_at_obj_in_light": (
        "Do not use the desklamp. Take the object and go around with it.",
        "Find the object and do not look for the desklamp.",
    ),
    **{
        kind: (
            f"Do not {verb} it. Put the object in the target at once.",
            f"Go to the target without the {where}.",
        )
        for kind, (verb, where) in _APPLIANCES.items()
    },
    "pick_two_obj_and_place": (
        "Stop after the first object. Do not look for the second one.",
        "Put only one object in the target, then go around.",
    ),
}


def skills(type_: str, kind: str) -> list[ScriptedSkill]:
    """All scripted skills of a task type; ``kind`` is one of KINDS."""
    if type_ not in TYPES or kind not in KINDS:
        raise KeyError(f"no skills of ({type_}, {kind}): types {TYPES}, kinds {KINDS}")
    plans: dict[str, Mapping[str, Sequence[str]]] = {
        "procedural": {"workflow": numbered(product(*_WORKFLOW[type_]))},
        "recovery": {"detour": _RECOVERY},
        "format": {"workflow": _FORMAT},
        "misleading": {**_MISLEADING, "unprepared": _UNPREPARED.get(type_, ())},
    }
    return scripted(kind, plans[kind])


def hindsight(trajectory: Trajectory, rng: random.Random) -> str:
    """What is worth knowing after an episode.

    The form, if invalid actions came before a failure; what to do when nothing happens, if that was
    often so; else the way to the goal.
    """
    kind, turns = "procedural", trajectory.turns
    if not trajectory.success and turns:
        lost = sum(NOTHING in turn.observation for turn in turns)
        if not all(turn.valid for turn in turns):
            kind = "format"
        elif lost >= len(turns) / 4:
            kind = "recovery"
    return rng.choice(skills(trajectory.task.type, kind)).text
