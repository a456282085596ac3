"""The three things that can be swapped from outside: environments, task suites and engines."""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from rsipo_lightning.checks import at_least
from rsipo_lightning.errors import ConfigError, EnvironmentFault
from rsipo_lightning.types import Completion, Prompt, Stop, Task, Trajectory

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

# The line of a first user message that states the task; a skill is put behind the first of them.
TASK_LINE = re.compile(
    r"^.*?(?:Your task is to:|Your current task is:|Your task is:|Your question:).*$", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an environment answers to one response of the policy."""

    action: str  # the action it understood, "" if none
    observation: str  # what the environment says; may be "" once the episode has ended
    reward: float = 0.0
    success: bool = False
    valid: bool = True  # the response had the form that the template asks for
    stop: Stop | None = None  # None while the episode goes on, else DONE or MAX_TURNS
    # "" if the observation is the next user message (append context); else the first user message
    # of a new conversation, which holds what the policy may still know of the old one (window)
    prompt: str = ""
    # further measures of the episode, set by its last step, e.g. {"lenient_match": 1.0}: logged,
    # never trained on
    measures: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """One live episode. Text in, text out; tokens are the rollout loop's business."""

    def reset(self, task: Task) -> str:
        """First user message. The same task gives the same text, always: that is what makes replays
        fair.

        It holds one line that states the task (``Your question: ...``), after which a skill can be
        inserted.
        """

    def step(self, response: str) -> StepResult:
        """Parse the policy's response and act. After the end: raises EnvironmentFault."""

    def close(self) -> None:
        """Free what the episode holds. May be called twice."""


class Expert(Protocol):
    """Who acts in one episode in the place of a policy."""

    def act(self, observation: str) -> str:
        """The next response; ``observation`` is the newest user message."""

    def close(self) -> None:
        """Free what it holds, however far the episode has come. May be called twice."""


@dataclass
class EnvironmentConfig:
    """Keys that every environment has; each adds its own in a subclass."""

    prompt: str = (
        "full"  # "full" (the wording of the papers' templates) | "compact" (for the tiny policy)
    )
    max_steps: int = 50  # T_max
    invalid_penalty: float = 0.1  # taken from the score, times the share of invalid turns

    def __post_init__(self) -> None:
        at_least("env.max_steps", self.max_steps, 1)
        at_least("env.invalid_penalty", self.invalid_penalty, 0)


SPLITS = ("train", "val", "test")  # of every environment


class Share(NamedTuple):
    """Training tasks that are drawn together."""

    tasks: Sequence[Task]
    weight: float = 1.0  # its part of every update is weight / sum of weights
    name: str = ""  # for messages: the file


class TaskSuite(ABC):
    """The tasks of one environment and the factory of its episodes. This is what an environment
    plugin registers.

    ``suite = Suite(config, seed)``; a broken file or key raises DataError or ConfigError here,
    before any work.
    """

    Config: ClassVar[type[EnvironmentConfig]] = EnvironmentConfig
    name: ClassVar[str]
    config: Any  # an instance of Config

    @property
    @abstractmethod
    def types(self) -> tuple[str, ...]:
        """All task types, in the order in which they are shown."""

    @abstractmethod
    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks of "train", "val" or "test" (``SPLITS``), or of a split of the environment's own;
        may be lazy. Unknown split: DataError.
        """

    @classmethod
    def evaluation_split(cls, config: Any, given: Collection[str]) -> str:
        """What ``rsipo-eval`` plays unless a split is named: of ``SPLITS`` as many tasks as
        ``eval.episodes`` says, any other in full.

        ``config`` is an instance of Config, ``given`` are its keys that were set for this
        evaluation.
        """
        return "test"

    def cluster(self, task: Task) -> str:
        """What tasks that repeat one another share: the intervals of evaluations take them together
        (two draws of a game tell less than two games).
        """
        return task.id

    def mixture(self) -> Sequence[Share]:
        """What an update draws its tasks from; ids are unique over all shares."""
        return [Share(self.tasks("train"))]

    @abstractmethod
    def make(self) -> Environment:
        """A fresh episode."""

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end a response, e.g. ``("</search>", "</answer>")``."""
        return ()

    def check_skill(self, trajectory: Trajectory, text: str) -> str:
        """Why a skill written from this trajectory must not be used (it gives the answer away), or
        "".
        """
        return ""

    def expert(self, task: Task, rng: random.Random) -> Expert:
        """A scripted expert for one episode, for stage 1. ConfigError if there is none."""
        raise ConfigError(f"{self.name} has no scripted expert: set sft.actor=policy")

    def hindsight(self, trajectory: Trajectory, rng: random.Random) -> str:
        """A scripted skill for a finished episode, for stage 1; it may have no turn. ConfigError if
        there is none.
        """
        raise ConfigError(f"{self.name} has no scripted skills: set sft.labels=endpoint or file")

    def describe(self) -> dict[str, Any]:
        """What a run records of its data: paths, counts, hashes."""
        return {}

    def step_many(
        self, episodes: Sequence[Environment], responses: Sequence[str]
    ) -> list[StepResult | Exception]:
        """Step all live episodes. An exception of one is returned in its place; EnvironmentFault is
        raised.

        Override to batch what episodes share (retriever calls).
        """
        results: list[StepResult | Exception] = []
        for episode, response in zip(episodes, responses, strict=True):
            try:
                results.append(episode.step(response))
            except EnvironmentFault:
                raise
            except Exception as error:  # a broken episode is data
                results.append(error)
        return results

    def close(self) -> None:  # noqa: B027  (most suites hold nothing)
        """Free what the episodes share. May be called twice."""


@dataclass(frozen=True, slots=True)
class Host:
    """What an engine is made for. Its weights come later, by ``Engine.sync_weights``."""

    policy: Any  # Policy, as it is trained: of weights that ranks share, this rank's part
    whole: Callable[[], Any]  # a Policy that generates here: that one, or under ZeRO-3 a whole copy
    tokenizer: PreTrainedTokenizerBase
    device: torch.device  # of this rank
    context: int  # tokens of one row, prompt and completion
    live: int  # prompts of one call, mostly
    rank: int = 0
    ranks: int = 1


class Engine(Protocol):
    """Token ids in, token ids and log-probs out.

    A registered one is made by ``EngineClass.of(config, host)``: ``config`` is an instance of its
    Config. ConfigError for what can be known there; nothing has been written yet.
    """

    # Whether it generates with the policy's own weights, so that none are sent and none can be
    # stale.
    own: bool
    policy_version: int

    def generate(self, prompts: Sequence[Prompt]) -> list[Completion]:
        """Continue each prompt; same order. KV caches of sessions that are not in the call are
        dropped.
        """

    def sync_weights(
        self, weights: Iterable[tuple[str, Tensor]] | Iterator[tuple[str, Tensor]], version: int
    ) -> None:
        """Take over new weights and drop every cache; completions carry ``version`` from now on.

        Each weight is whole until the next one is asked for. To be read to the end: under ZeRO-3
        every rank gathers together.
        """

    def rest(self) -> None:
        """Nothing is generated before the next ``sync_weights``: memory may be given back."""

    def close(self) -> None:
        """Free the engine. May be called twice."""
