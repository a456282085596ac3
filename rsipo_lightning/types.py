"""The nouns of one iteration, in the order in which they are made.

    Task -> Prompt -> Completion -> Turn -> Trajectory -> RolloutGroup
         -> SkillRequest -> Skill -> ReplayRequest -> ReplayResult -> Sample -> MicroBatch

Convention, said once: value i belongs to token i, i.e. ``log p(ids[i] | ids[:i])``; position 0 is
never trained. Letters in shapes: P prompt tokens, A sampled tokens of one turn, L tokens of one
row, N sampled
(trained) tokens of one row, G rollouts of one task, K replays of one skill.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from rsipo_lightning.metrics import Metrics


class Stop(StrEnum):
    """Why an episode ended."""

    DONE = "done"  # the environment said so (answered, won)
    MAX_TURNS = "max_turns"  # the environment's step limit T_max
    CONTEXT = "context"  # the next prompt would not fit the context limit
    ERROR = "error"  # the environment raised: data, counted, outside group statistics and loss


class Role(StrEnum):
    """Who acts; part of the key of the sampling noise, so that roles never share random numbers."""

    STUDENT = "student"  # a rollout without skill
    WRITER = "writer"  # the policy writing a skill
    REPLAY = "replay"  # the policy acting with a skill in its prompt
    EVAL = "eval"


@dataclass(frozen=True, slots=True)
class Task:
    """One problem instance. ``Environment.reset(task)`` is a function of this alone."""

    id: str
    env: str  # registered name of the environment
    type: str  # task type: the groups of the empirical Bayes and of the log keys
    payload: Mapping[str, Any]  # plain JSON values, read by the environment only


class Message(NamedTuple):
    """One message of a conversation."""

    role: str  # "system", "user" or "assistant"
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """What an engine is asked to continue."""

    ids: tuple[int, ...]  # (P,)
    max_new_tokens: int
    temperature: float  # 0 is greedy
    seed: int  # key of this turn's sampling noise; never depends on the position in a batch
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()  # the token that completes one of these is the last one
    session: str = (
        ""  # prompts of one conversation share it, so that an engine can keep their KV cache
    )


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine sampled. These ids are what is trained, bit for bit; they are never
    re-tokenised.
    """

    ids: tuple[int, ...]  # (A,)
    logprobs: tuple[
        float, ...
    ]  # (A,) nats under the sampling policy, after temperature (temperature 1 if greedy)
    text: str  # decoded ids, special tokens left out
    truncated: bool  # ended by max_new_tokens rather than by a stop
    policy_version: int  # number of updates of the weights that sampled it
    temperature: float = 1.0  # that logprobs refer to


@dataclass(frozen=True, slots=True)
class Turn:
    """One decision. In append context ``prompt_ids`` starts with the ids of all earlier turns."""

    prompt_ids: tuple[int, ...]  # (P,)
    anchor: (
        int  # index in prompt_ids at which a skill section is inserted (right after the task line)
    )
    completion: Completion
    action: str  # what the environment understood
    observation: str  # what it answered
    reward: float
    valid: bool  # the response had the form that the template asks for


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode. ``score`` is what group statistics see: R minus penalty times the share of
    invalid turns.
    """

    task: Task
    index: int  # position in its group; part of the sampling key
    turns: tuple[Turn, ...]  # (T,)
    success: bool
    score: float
    stop: Stop
    max_steps: int  # T_max of the environment
    opening: str = ""  # first user message, without skill
    skill: Skill | None = None  # in the prompt while acting (replays)
    context: str = ""  # the same place of a student's prompt, filled by Algorithm.context
    error: str = ""  # text of the exception if stop is ERROR
    measures: Mapping[str, float] = field(default_factory=dict)  # see StepResult

    @property
    def steps(self) -> int:
        """T, environment steps taken, invalid ones included."""
        return len(self.turns)

    @property
    def scored(self) -> bool:
        """False for an episode that broke: it has no reward (not a reward of 0) and leaves every
        statistic.
        """
        return self.stop is not Stop.ERROR


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """The G rollouts of one task."""

    task: Task
    trajectories: tuple[Trajectory, ...]  # (G,)

    @property
    def scored(self) -> tuple[Trajectory, ...]:
        return tuple(t for t in self.trajectories if t.scored)


@dataclass(frozen=True, slots=True)
class SkillRequest:
    """Ask the policy, or the server that analyses in its place, for a skill from one finished
    trajectory.
    """

    trajectory: Trajectory
    temperature: float = 1.0  # of the policy; a server has its own
    step_skills: int = 0  # at most so many of single decisions may come with it
    attempts: int = 1  # 2: an answer that cannot be read is asked for once more, with the reason


@dataclass(frozen=True, slots=True)
class Skill:
    """Advice for a task: from a bank, or a WrittenSkill."""

    task: Task
    text: str  # the policy-facing advice; "" if it did not parse
    category: str  # procedural | recovery | format | other
    invalid: str = ""  # why it must not be used; "" if valid
    trajectory: Trajectory | None = None  # the evidence it was written from
    steps: Mapping[int, str] = field(default_factory=dict)  # {turn: advice for it alone}

    @property
    def valid(self) -> bool:
        return not self.invalid


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenSkill(Skill):
    """A sampled text, hence trainable: ``completion.ids`` after ``prompt_ids``."""

    trajectory: Trajectory
    prompt_ids: tuple[int, ...]
    completion: Completion


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """Play the skill's task n times from the same initial state with the skill in the prompt."""

    skill: Skill
    n: int  # K
    control: tuple[Trajectory, ...]  # (C,) rollouts without skill that exist already
    length_penalty: float  # alpha of the utility


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Outcome of the execution check; ``gain`` is None where lost episodes leave too few to
    compare.
    """

    skill: Skill
    treated: tuple[Trajectory, ...]  # (K,)
    control: tuple[Trajectory, ...]  # (C,)
    gain: float | None  # Delta_x = mean u(treated) - mean u(control)
    noise: float | None  # s_x^2, variance of the gain's estimate


class Credit(NamedTuple):
    """What one stream says of the N tokens of a row. Only ``weight`` is in the denominator."""

    weight: Tensor  # (N,) float32
    value: Tensor  # (N,) float32: an advantage, a trust, a reward


@dataclass(frozen=True, slots=True)
class TeacherView:
    """The same sampled tokens in another context, e.g. with a skill in the first message."""

    ids: Tensor  # (L',) int64
    mask: Tensor  # (L',) bool, True at M sampled tokens
    index: Tensor  # (M,) int64, where these sit among the row's N tokens


@dataclass(frozen=True, slots=True)
class Sample:
    """One training row."""

    ids: Tensor  # (L,) int64
    mask: Tensor  # (L,) bool, True at the N sampled tokens, never at 0
    turn: Tensor  # (N,) int64, turn of the trajectory that each token belongs to
    engine_logprobs: Tensor  # (N,) float32, NaN where no engine has sampled the token
    temperature: float = (
        1.0  # of its sampling; all log-probs of the row are of softmax(logits / temperature)
    )
    anchor: int = 0  # index in ids at which a skill section is inserted
    episode: str = ""  # the rows of one trajectory share it
    credits: Mapping[str, Credit] = field(default_factory=dict)
    views: Mapping[str, TeacherView] = field(default_factory=dict)
    scores: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # (N,) no-grad log-probs: old, reference, each view

    @property
    def n(self) -> int:
        return int(self.turn.numel())


class Iteration:
    """The tray that one iteration is put on: each field is filled once, left to right, by exactly
    one owner.

    A plain class: Lightning walks into dataclasses and tensors of a batch and would copy or cast
    them.
    """

    def __init__(self, update: int, tasks: list[Task], metrics: Metrics) -> None:
        self.update = update  # number of updates made before this iteration
        self.tasks = tasks
        self.metrics = metrics
        self.groups: list[RolloutGroup] = []
        self.skills: list[Skill] = []
        self.replays: list[ReplayResult] = []
        self.trust: dict[str, float] = {}  # task id -> omega


class MicroBatch:
    """Rows of one forward and the denominators of their update. Plain on purpose, see Iteration."""

    def __init__(self, samples: list[Sample], denominators: Mapping[str, float]) -> None:
        self.samples = samples
        # {stream: sum of weights over all micro-batches of the update and all ranks}
        self.denominators = denominators
