"""A game: find a hidden number; each answer says whether it is higher or lower."""

import re
from dataclasses import dataclass

from rsipo_lightning.errors import DataError, EnvironmentFault
from rsipo_lightning.protocols import EnvironmentConfig, StepResult, TaskSuite
from rsipo_lightning.types import Stop, Task

HIGHEST = {"narrow": 9, "wide": 99}  # by task type
SPLITS = ("train", "val", "test")  # number n is in split n % 3


@dataclass
class NumbersConfig(EnvironmentConfig):
    max_steps: int = 7  # enough for any number up to 127


class Game:
    def __init__(self, max_steps: int) -> None:
        self.max_steps, self.left, self.hidden = max_steps, 0, 0

    def reset(self, task: Task) -> str:
        self.hidden, self.left = task.payload["hidden"], self.max_steps
        return f"Your task is to: guess a number.\nSay <guess>{HIGHEST[task.type]}</guess> or less."

    def step(self, response: str) -> StepResult:
        if not self.left:
            raise EnvironmentFault("numbers: step() after the end; call reset(task) first")
        said = re.search(r"<guess>(\d{1,9})</guess>", response)
        guess, self.left = int(said[1]) if said else 0, self.left - 1
        if guess == self.hidden:
            self.left = 0
            return StepResult(str(guess), "", reward=1.0, success=True, stop=Stop.DONE)
        seen = "Higher." if guess < self.hidden else "Lower."
        stop = None if self.left else Stop.MAX_TURNS
        return StepResult(str(guess), seen, valid=bool(said), stop=stop)

    def close(self) -> None:
        self.left = 0


class Numbers(TaskSuite):
    Config, name, types, stop = NumbersConfig, "numbers", tuple(HIGHEST), ("</guess>",)

    def __init__(self, config: NumbersConfig, seed: int) -> None:
        self.config = config

    def tasks(self, split: str) -> list[Task]:
        if split not in SPLITS:
            raise DataError(f"numbers has no split '{split}' (have: {', '.join(SPLITS)})")
        every = [(kind, n) for kind, high in HIGHEST.items() for n in range(1, high + 1)]
        mine = [(kind, n) for kind, n in every if SPLITS[n % 3] == split]
        return [Task(f"{kind}-{n}", self.name, kind, {"hidden": n}) for kind, n in mine]

    def make(self) -> Game:
        return Game(self.config.max_steps)
