"""One episode of ALFWorld: what a response asks for, and what the policy is shown for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rsipo_lightning.environments.alfworld.game import PlayedGame
from rsipo_lightning.environments.alfworld.wording import AlfworldWording
from rsipo_lightning.environments.templates import inert
from rsipo_lightning.errors import DataError, EnvironmentFault
from rsipo_lightning.protocols import StepResult
from rsipo_lightning.types import Stop, Task

if TYPE_CHECKING:
    from rsipo_lightning.environments.alfworld.suite import AlfworldConfig

WON = 10.0  # reward of a success (methods.md 1.4)

_TAG = re.compile(r"</?(?:action|think)>")
_ACTION = ("<action>", "</action>")
_THOUGHT = ("<think>", "</think>")
_CHINESE = re.compile("[\u4e00-\u9fff]")
_PUT = re.compile(r"put (.+?) (?:in/on|in|on) (.+)")
_START = re.compile(r"(?:-=.*=-)?(.*?)Your task is to: ([^\n]+)", re.DOTALL)


class Action(NamedTuple):
    """What a response says: a command of the game, or "" and the reason in ``why``."""

    command: str
    why: str = ""


def parse(response: str, think: bool) -> Action:
    """The one action of a response; ``think`` says whether a thought must precede it.

    >>> parse("<action>Go to  Desk 2</action>", think=False).command
    'go to desk 2'

    None, several, nested, unclosed or empty blocks and Chinese characters make it invalid (this is
    stricter than methods.md 1.3); a command that the game would not accept does not. Text outside
    is ignored.
    """
    tags = list(_TAG.finditer(response))
    names = tuple(tag.group() for tag in tags)
    thoughts = names[:-2]
    if names[-2:] != _ACTION or thoughts != _THOUGHT * (len(thoughts) // 2):
        several = names.count("<action>") > 1
        return Action("", "more than one action" if several else "no complete action")
    if think and not thoughts:
        return Action("", "no thought")
    if _CHINESE.search(response):
        return Action("", "Chinese characters")
    command = " ".join(response[tags[-2].end() : tags[-1].start()].lower().split())
    return Action(command) if command else Action("", "the action is empty")


def reworded(command: str, admissible: Collection[str]) -> str:
    """The command as the game words it: models still write "put" as in ALFWorld before 0.4.

    >>> reworded("put mug 1 in/on desk 2", ["look", "move mug 1 to desk 2"])
    'move mug 1 to desk 2'
    """
    old = _PUT.fullmatch(command)
    if old is None or command in admissible:  # a game of the older release
        return command
    return "move {} to {}".format(*old.groups())


def brief(commands: Sequence[str]) -> str:
    """A list of commands in which each leaves out what it shares with the one before it.

    >>> brief(["go to bed 1", "go to desk 1", "go to desk 2", "look"])
    'go to bed 1, desk 1 2, look'
    >>> brief(["take mug 1 from desk 2", "take pen 1 from desk 2", "take pen 3 from desk 2"])
    'take mug 1 from desk 2, pen 1, 3'
    """
    text, before = "", [""]
    for command in commands:
        words = command.split()
        start = _shared(words, before)
        end = _shared(words[::-1], before[::-1])
        end -= end > 0 and words[-end].isdigit()  # "from desk 2", without the "1" of "pen 1"
        end = end if start and end > 2 else 0
        comma = "" if not text else " " if 0 < start == len(words) - 1 else ", "
        text += comma + " ".join(words[start : len(words) - end])
        before = words
    return text


def _shared(words: Sequence[str], others: Sequence[str]) -> int:
    """Number of equal words at the start; 0 if one list begins with the whole other one."""
    return next((i for i, (a, b) in enumerate(zip(words, others, strict=False)) if a != b), 0)


class AlfworldEpisode:
    """One live episode. ``open_game`` gives the game of a task, at its start."""

    def __init__(
        self,
        config: AlfworldConfig,
        wording: AlfworldWording,
        open_game: Callable[[Task], PlayedGame],
    ) -> None:
        self._config, self._wording, self._open = config, wording, open_game
        self._game: PlayedGame | None = None
        self._goal = ""
        self._seen = ""  # the latest observation
        self._steps: list[str] = []  # what was seen and done, a line of the history for each step

    def reset(self, task: Task) -> str:
        """The first user message: room and goal. A game that cannot be read: DataError."""
        self.close()
        self._game, self._steps = self._open(task), []
        said = _START.match(self._game.view.text)
        if said is None:
            raise DataError(f"{task.id}: the game does not say 'Your task is to: ...'")
        self._seen, self._goal = map(inert, said.groups())
        return self._wording.opening.format(
            task=self._goal,
            observation=self._seen,
            admissible=self._admissible(self._config.admissible != "never"),
            max_steps=self._config.max_steps,
        )

    def step(self, response: str) -> StepResult:
        """See the protocol. What is no action changes nothing, but takes a step."""
        if self._game is None:
            raise EnvironmentFault(
                "alfworld: step() after the end of the episode; call reset(task) first"
            )
        action, wording = parse(response, self._wording.think), self._wording
        valid, view = not action.why, self._game.view
        command = reworded(action.command, view.admissible)
        if valid:
            view = self._game.step(command)
        seen = inert(view.text if valid else wording.invalid.format(why=action.why))
        line = {"step": len(self._steps) + 1, "action": inert(command)}
        self._steps.append(wording.step.format(observation=self._seen, **line))
        self._seen = seen
        if view.won or len(self._steps) >= self._config.max_steps:
            self.close()
            reward, stop = (WON, Stop.DONE) if view.won else (0.0, Stop.MAX_TURNS)
            return StepResult(command, seen, reward, view.won, valid, stop)
        return self._goes_on(command, valid)

    def close(self) -> None:
        """End the episode."""
        if self._game is not None:
            self._game.close()
        self._game = None

    def _goes_on(self, command: str, valid: bool) -> StepResult:
        """The next message: a conversation that grows, or a prompt of its own."""
        taken = len(self._steps)
        shown = self._steps[-self._config.history :]
        values = {
            "observation": self._seen,
            "admissible": self._admissible(self._config.admissible == "always"),
            "taken": taken,
            "step": taken + 1,
            "max_steps": self._config.max_steps,
        }
        if self._config.context == "append":
            return StepResult(command, self._wording.next.format(**values), valid=valid)
        prompt = self._wording.window.format(
            task=self._goal, history="\n".join(shown), shown=len(shown), **values
        )
        return StepResult(command, self._seen, valid=valid, prompt=prompt)

    def _admissible(self, show: bool) -> str:
        """The commands that the game would accept, without the one for human players."""
        if not show:
            return ""
        assert self._game is not None
        commands = [inert(c) for c in self._game.view.admissible if c != "help"]
        text = brief(commands) if self._config.prompt == "compact" else ", ".join(commands)
        return self._wording.admissible.format(commands=text)
