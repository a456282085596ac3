"""Scripted experts and skills of the built-in world: the labels of supervised fine-tuning.

    expert = demonstrate(task, random.Random(0), "workflow")
    observation = episode.reset(task)
    response = expert.act(observation)          # "<search> Amber Fountain</search>"

    skill = random.Random(0).choice(skills("bridge2", "misleading"))
    expert = demonstrate(task, random.Random(0), skill.plan)   # what obeying that skill looks like

An expert is told the whole task, but it writes only names and years that are visible in the
messages it was shown. Labels that know more would teach the policy to make names up.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rsipo_lightning.environments import world
from rsipo_lightning.environments.wording import Wording
from rsipo_lightning.environments.world import ALL_TYPES, entities, years
from rsipo_lightning.errors import ConfigError
from rsipo_lightning.types import Task, Trajectory

_THOUGHTS = ("I need a page first.", "The pages show the answer.")  # before a search, an answer
KINDS = ("procedural", "recovery", "format", "misleading")


@dataclass
class Expert:
    """Acts by one plan for one episode; see :func:`demonstrate`."""

    task: Task
    rng: random.Random
    plan: str
    think: bool = False  # the full template asks for a thought
    _shown: list[str] = field(default_factory=list)  # user messages so far
    _searched: list[str] = field(default_factory=list)

    def act(self, observation: str) -> str:
        """The next response; ``observation`` is the newest user message."""
        self._shown.append(observation)
        response = PLANS[self.plan](self)
        return f"<think>{self._thought(response)}</think>{response}" if self.think else response

    def close(self) -> None:
        """Nothing is held."""

    def _thought(self, response: str) -> str:
        return _THOUGHTS["<answer>" in response]

    # what the plans are made of

    @property
    def _names(self) -> list[str]:
        return entities("\n".join(self._shown))

    @property
    def _asked(self) -> list[str]:
        """Names in the question; the first message, so a skill in it must hold no names."""
        return entities(self._shown[0])

    def _search(self, name: str) -> str:
        self._searched.append(name)
        return f"<search> {name}</search>"

    def _answer(self, text: str) -> str:
        return f"<answer> {text}</answer>"

    def _answer_visible(self) -> str:
        """Any visible name or year, of the kind that the question asks for."""
        text = "\n".join(self._shown)
        wanted = years(text) if self.task.payload["path"][-1] in ("born", "released") else []
        if self.task.type == "compare":
            wanted = self._asked
        return self._answer(self.rng.choice(wanted or self._new_names() or self._names))

    def _new_names(self) -> list[str]:
        return [name for name in self._names if name not in self._asked]

    # the plans

    def _workflow(self) -> str:
        """Search each hop in turn, then answer what the last page says."""
        hops = self.task.payload["hops"]
        done = len(dict.fromkeys(self._searched))
        if done < len(hops):
            visible = hops[done] in self._names
            return self._search(hops[done]) if visible else self._answer_visible()
        answer = self.task.payload["answers"][0]
        text = "\n".join(self._shown)
        known = answer in text if answer.isdigit() else answer in self._names
        return self._answer(answer) if known else self._answer_visible()

    def _detour(self) -> str:
        """Search the first hop twice, then go on: reaches the end if a turn can be spared."""
        if len(self._searched) == 1:
            return self._search(self._searched[0])
        return self._workflow()

    def _early(self) -> str:
        """Stop one hop early: answer the name that the next search should have been for."""
        hops = self.task.payload["hops"]
        if self.task.type == "compare" and self._searched:
            return self._answer_visible()
        if len(hops) < 2:
            return self._echo()
        if len(dict.fromkeys(self._searched)) < len(hops) - 1:
            return self._workflow()
        return self._answer(hops[-1] if hops[-1] in self._names else self._asked[0])

    def _echo(self) -> str:
        """Answer a name of the question without any search."""
        return self._answer(self.rng.choice(self._asked))

    def _guess(self) -> str:
        """Search a name of the question once, then answer something visible."""
        if not self._searched:
            return self._search(self.rng.choice(self._asked))
        return self._answer_visible()

    def _wrong_entity(self) -> str:
        """After the first page go on with a name that is not on the way, then answer from there."""
        hops = self.task.payload["hops"]
        if not self._searched:
            return self._search(self._asked[0])
        wrong = [n for n in self._names if n not in hops and n not in self.task.payload["answers"]]
        if len(self._searched) == 1 and wrong:
            return self._search(self.rng.choice(wrong))
        return self._answer_visible()

    def _repeat(self) -> str:
        """The same search again and again, to the end."""
        return self._search(self._searched[0] if self._searched else self._asked[0])

    def _malformed(self) -> str:
        """Two responses that are no action, then a guess."""
        if len(self._shown) > 2:
            return self._guess()
        name = self.rng.choice(self._names)
        forms = "<search> {}</answer>", "<answer> {}</search>", " {}</search>", "<search></search>"
        return self.rng.choice(forms).format(name)


PLANS: dict[str, Callable[[Expert], str]] = {
    "workflow": Expert._workflow,
    "detour": Expert._detour,
    "early": Expert._early,
    "echo": Expert._echo,
    "guess": Expert._guess,
    "wrong_entity": Expert._wrong_entity,
    "repeat": Expert._repeat,
    "malformed": Expert._malformed,
}


def demonstrate(task: Task, rng: random.Random, plan: str, think: bool = False) -> Expert:
    """An expert for one episode of a task of the world; ``plan`` is a key of PLANS."""
    if plan not in PLANS:
        raise KeyError(f"no plan '{plan}' (have: {', '.join(PLANS)})")
    return Expert(task, rng, plan, think)


def expert(task: Task, rng: random.Random, think: bool) -> Expert:
    """Who goes the way to the answer. ConfigError for a task that does not tell it."""
    _of_world(task, "expert: set sft.actor=policy")
    return demonstrate(task, rng, "workflow", think)


def hindsight(trajectory: Trajectory, rng: random.Random) -> str:
    """What is worth knowing after an episode: the form, if an invalid action cost the success, else
    the way to the answer. ConfigError for a task that is not of the world.
    """
    _of_world(trajectory.task, "skills: set sft.labels=endpoint or file")
    missed = not trajectory.success and not all(turn.valid for turn in trajectory.turns)
    return rng.choice(skills(trajectory.task.type, "format" if missed else "procedural")).text


def _of_world(task: Task, missing: str) -> None:
    if "hops" not in task.payload:
        raise ConfigError(f"questions of files have no scripted {missing}")


@dataclass(frozen=True, slots=True)
class ScriptedSkill:
    """A skill text and the plan of a policy that obeys it."""

    text: str  # >= 5 words, <= 1200 characters, no names
    kind: str  # one of KINDS: what it is worth
    category: str  # what its JSON says: procedural | recovery | format | other
    plan: str  # key of PLANS


_FIRST = ("Search the name in the question.", "Look up the name that the question gives.")
_NEXT = ("Search the name that its page gives.", "Look up the name found on that page.")
_LAST = ("Answer with what the last page says.", "Answer with the fact on the last page.")
_BOTH = (
    "Search the first name in the question.",
    "Search the second name.",
    "Look up the other name of the question.",
)
_WORKFLOW: dict[str, list[tuple[str, ...]]] = {
    "single": [(first, last) for first in _FIRST for last in _LAST],
    "bridge2": [(first, next_, last) for first in _FIRST for next_ in _NEXT for last in _LAST],
    "bridge3": [
        (first, next_, f"Do this once more for the {word} page.", last)
        for first in _FIRST
        for next_ in _NEXT
        for word in ("new", "second")
        for last in _LAST
    ],
    "bridge4": [
        (first, next_, f"Do this once more for the second page and {again}.", last)
        for first in _FIRST
        for next_ in _NEXT
        for again in ("once more for the next one", "again for the new page")
        for last in _LAST
    ],
    "compare": [
        (_BOTH[0], second, last)
        for second in _BOTH[1:]
        for last in (
            "Answer with the name that has the earlier year.",
            "Compare the years and answer with the earlier name.",
        )
    ],
    "compare_bridge": [
        (_BOTH[0], second, next_, last)
        for second in _BOTH[1:]
        for next_ in (
            "Search the next name on the page that has the earlier year.",
            "Compare the years and look up the name that the earlier page gives.",
        )
        for last in _LAST
    ],
}
_RECOVERY = (
    "If the first search does not help, run it once more before you go on.",
    "When a page looks wrong, search the same name again, then follow the question.",
)
_FORMAT = (
    "Write one search or one answer and close its tag.",
    "Keep the form: one action, short text, closed tag.",
)
_MISLEADING = {
    "echo": (
        "Do not search. Answer at once with a name in the question.",
        "The name in the question is the answer. Give it without a search.",
    ),
    "early": (
        "Stop one page early. Answer with the name you would search next.",
        "Save the last search and answer with the name found before it.",
    ),
    "wrong_entity": (
        "After the first page search some other name that it shows.",
        "Follow a name that the question did not ask for.",
    ),
    "repeat": (
        "Search the same name again and again until the end.",
        "Never answer. Repeat the first search each turn.",
    ),
}


def skills(type_: str, kind: str) -> list[ScriptedSkill]:
    """All scripted skills of a task type; ``kind`` is one of KINDS."""
    if type_ not in ALL_TYPES or kind not in KINDS:
        raise KeyError(f"no skills of ({type_}, {kind}): types {ALL_TYPES}, kinds {KINDS}")
    plans: dict[str, Mapping[str, Sequence[str]]] = {
        "procedural": {"workflow": numbered(_WORKFLOW[type_])},
        "recovery": {"detour": _RECOVERY},
        "format": {"guess": _FORMAT},
        "misleading": {
            plan: texts
            for plan, texts in _MISLEADING.items()
            if not (type_ in ("single", "compare") and plan == "early")
        },
    }
    return scripted(kind, plans[kind])


def numbered(workflows: Iterable[Sequence[str]]) -> list[str]:
    """Texts of workflows: "1. Go there. 2. Take it."."""
    return [" ".join(f"{i}. {step}" for i, step in enumerate(row, 1)) for row in workflows]


def scripted(kind: str, plans: Mapping[str, Sequence[str]]) -> list[ScriptedSkill]:
    """Skills of a kind, from the texts of each plan that obeys them."""
    category = "other" if kind == "misleading" else kind
    return [ScriptedSkill(t, kind, category, plan) for plan, texts in plans.items() for t in texts]


def vocabulary() -> list[str]:
    """Words and punctuation of the world, compact prompts, experts and skills, sorted."""
    say = Wording.read("compact")
    fixed = [say.opening.format(question=""), say.invalid, say.last, say.empty, *_THOUGHTS]
    fixed += [skill.text for type_ in ALL_TYPES for kind in KINDS for skill in skills(type_, kind)]
    return sorted({*world.vocabulary(), *(piece for text in fixed for piece in world.pieces(text))})
