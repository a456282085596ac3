"""What an algorithm is: a mapping from rollouts to per-token (stream, weight, value), and a table
of streams.

An algorithm is a set of pure functions. It returns what should happen (skills to write, replays to
play, rows to train); callbacks and the module do it. Nothing here knows an engine, an environment
or Lightning.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from torch import Tensor

from rsipo_lightning.tokens import TokenBatch
from rsipo_lightning.types import (
    Iteration,
    ReplayRequest,
    RolloutGroup,
    Sample,
    Skill,
    SkillRequest,
    Task,
)

if TYPE_CHECKING:
    from rsipo_lightning.bank import SkillBank
    from rsipo_lightning.codec import Codec
    from rsipo_lightning.config import RolloutSection
    from rsipo_lightning.endpoint import EndpointConfig

TokenLoss = Callable[
    [TokenBatch, Tensor, Tensor], Tensor
]  # (batch, log-probs [N], values [N]) -> [N]
Sums = Mapping[str, tuple[float, ...]]
PLAIN, TRAIN = "plain", "train"  # phases, see Algorithm.context


@dataclass(frozen=True, slots=True)
class Stream:
    """One term of the objective: coef * sum(weight * loss(value)) / sum(weight over all ranks).

    The loss of a token, and its gradient, must be 0 where its value is 0: rows without any other
    are left out of the forward (they still count in the denominator). A teacher view that has a
    stream of its name is for that stream alone: it is not scored where the stream's values are 0.
    """

    loss: TokenLoss
    coef: float = 1.0
    reference: bool = False  # the loss reads batch.scores["reference"]
    # It is a mean over tokens as the policy samples them, so that those of an engine whose
    # log-probs differ are weighted. False: whichever token was sampled changes nothing (entropies)
    sampled: bool = True
    # factor in [0, 1] of each token in that loss, (batch, log-probs [N]) -> [N]: logged
    gate: Callable[[TokenBatch, Tensor], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Teacher:
    """The weights that score the teacher views: those of the policy before the update, or a copy.

    ``every`` n > 1: a copy that is refreshed every n updates; 0: the policy as it was at the start.
    ``ema`` d > 0: a copy that becomes d * copy + (1 - d) * policy after each update.
    """

    every: int = 1
    ema: float = 0.0

    @property
    def live(self) -> bool:
        return self.every == 1 and not self.ema


@dataclass
class AlgorithmConfig:
    """Keys of an algorithm; each has its own subclass."""


C = TypeVar("C", bound=AlgorithmConfig)


class Algorithm(ABC, Generic[C]):
    """Base of all methods. Hooks are called once per iteration, in the order in which they stand
    here.
    """

    Config: ClassVar[type[AlgorithmConfig]] = AlgorithmConfig
    # What the student's prompt holds where the policy is evaluated, see ``context``. The first one
    # is the result of a run; each further one costs as much again.
    phases: ClassVar[tuple[str, ...]] = (PLAIN,)

    def __init__(
        self, config: C, seed: int, codec: Codec | None = None, bank: SkillBank | None = None
    ) -> None:
        self.config = config
        self.seed = seed
        self.codec = codec
        self.bank = bank

    @classmethod
    def check(cls, config: C, rollout: RolloutSection) -> None:
        """Raise ConfigError if the method cannot run with these values, before any work."""

    @classmethod
    def uses_bank(cls, config: C) -> bool:
        """Whether it is to be given the skill bank of its keys, see BankConfig."""
        return False

    @property
    @abstractmethod
    def streams(self) -> Mapping[str, Stream]:
        """The objective, written as a sum; terms with coefficient 0 are left out by the trainer."""

    @property
    def teacher(self) -> Teacher:
        """Whose weights score the teacher views."""
        return Teacher()

    @property
    def analyzer(self) -> EndpointConfig | None:
        """The server that writes the skills of ``propose``; None: the policy does, and a loss may
        train it on them.
        """
        return None

    @property
    def shapes(self) -> bool:
        """Whether ``shape`` reads ``scores["old"]``, which may cost a pass over the rows."""
        return False

    @property
    def max_batches(self) -> int:
        """Batches of tasks that one update may play, see ``accept``."""
        return 1

    @property
    def extra_episodes(self) -> int:
        """Episodes that may be played for a task beyond its group (replays)."""
        return 0

    def context(self, task: Task, phase: str) -> str:
        """Advice in the prompt of a student; ``phase`` is "train" or one of ``phases``."""
        return ""

    def accept(self, group: RolloutGroup) -> bool:
        """Whether to train on a group. Other tasks are played in place of the others, until the
        update is full or has played ``max_batches`` batches of tasks.
        """
        return True

    def propose(self, it: Iteration) -> Sequence[SkillRequest | Skill]:
        """Skills to be written, and skills as they are. May read ``it.groups``."""
        return []

    def plan(self, it: Iteration) -> list[ReplayRequest]:
        """Replays to be played. May read ``it.groups`` and ``it.skills``."""
        return []

    def statistics(self, it: Iteration) -> Sums:
        """Sums over this rank's tasks; the trainer adds them up over ranks. May read all but
        ``it.trust``.
        """
        return {}

    @abstractmethod
    def credit(self, it: Iteration, sums: Sums) -> list[Sample]:
        """Training rows with their credits and teacher views."""

    def shape(self, samples: list[Sample], it: Iteration) -> list[Sample]:
        """Change credits once teacher and reference scores are known; NaN is no score."""
        return samples

    def state_dict(self) -> dict[str, Any]:
        """State that outlives an iteration, as plain containers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""


def active(streams: Mapping[str, Stream]) -> dict[str, Stream]:
    """Streams that count."""
    return {name: stream for name, stream in streams.items() if stream.coef != 0}
