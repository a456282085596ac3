"""Playing episodes: in lockstep, one engine call per turn for all that are live."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rsipo_lightning.codec import Codec
from rsipo_lightning.config import RunConfig
from rsipo_lightning.errors import ConfigError, EnvironmentFault
from rsipo_lightning.protocols import Engine, Environment, Expert, TaskSuite
from rsipo_lightning.rng import keyed_seed
from rsipo_lightning.types import (
    Completion,
    Prompt,
    Role,
    Skill,
    Stop,
    Task,
    Trajectory,
    Turn,
)


@dataclass(frozen=True, slots=True)
class Job:
    """One episode to play. (update, task, role, index) keys its sampling noise together with the
    run's seed.
    """

    task: Task
    role: Role
    index: int
    update: int
    skill: Skill | None = None  # in the prompt
    context: str = ""  # in its place


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the policy acts."""

    seed: int
    temperature: float
    max_new_tokens: int  # of one turn
    context: int  # tokens of one row
    live: int  # episodes played at once

    @classmethod
    def of(cls, config: RunConfig, temperature: float) -> Sampling:
        """As the run's config says, at this temperature."""
        r = config.rollout
        return cls(config.seed, temperature, r.max_new_tokens, r.context, r.live)


@dataclass(slots=True)
class _Episode:
    job: Job
    environment: Environment
    ids: tuple[int, ...] = ()  # the next prompt
    anchor: int = 0
    opening: str = ""
    message: str = ""  # the newest user message
    turns: list[Turn] = field(default_factory=list)
    success: bool = False
    stop: Stop | None = None
    error: str = ""
    measures: Mapping[str, float] = field(default_factory=dict)

    def fail(self, error: Exception | str) -> None:
        self.stop = Stop.ERROR
        self.error = error if isinstance(error, str) else f"{type(error).__name__}: {error}"


class Player:
    """Plays jobs with one suite, engine and codec."""

    def __init__(self, suite: TaskSuite, engine: Engine, codec: Codec) -> None:
        self.suite, self.engine, self.codec = suite, engine, codec

    def play(
        self,
        jobs: Sequence[Job],
        sampling: Sampling,
        progress: Callable[[int], None] = lambda n: None,
    ) -> list[Trajectory]:
        """One trajectory per job, same order. ``progress(n)``: n more episodes have ended.

        An exception of an episode makes a trajectory with ``Stop.ERROR``; EnvironmentFault and
        EngineError are raised.
        """
        done: list[Trajectory] = []
        for begin in range(0, len(jobs), sampling.live):
            batch = jobs[begin : begin + sampling.live]
            done += self._play(batch, sampling, progress)
        return done

    def _play(
        self, jobs: Sequence[Job], sampling: Sampling, progress: Callable[[int], None]
    ) -> list[Trajectory]:
        episodes = [_Episode(job, self.suite.make()) for job in jobs]
        try:
            for episode in episodes:
                self._reset(episode, sampling)
            while live := [e for e in episodes if e.stop is None]:
                self._turn(live, sampling)
                progress(sum(e.stop is not None for e in live))
        finally:
            for episode in episodes:
                episode.environment.close()
        return [self._trajectory(e) for e in episodes]

    def _reset(self, episode: _Episode, sampling: Sampling) -> None:
        try:
            episode.opening = episode.environment.reset(episode.job.task)
        except EnvironmentFault:
            raise
        except Exception as error:  # a broken episode is data
            episode.fail(error)
            return
        self._start(episode, episode.opening)
        if len(episode.ids) + sampling.max_new_tokens > sampling.context:
            episode.fail(
                f"first prompt of {len(episode.ids)} tokens does not fit "
                f"rollout.context={sampling.context}"
            )

    def _start(self, episode: _Episode, message: str) -> None:
        """A conversation that begins with this message; a skill is in each of them."""
        job, episode.message = episode.job, message
        advice = job.skill.text if job.skill else job.context
        episode.ids, episode.anchor = self.codec.start(message, advice)

    def _turn(self, live: list[_Episode], sampling: Sampling) -> None:
        completions = self._act(live, sampling)
        results = self.suite.step_many([e.environment for e in live], [c.text for c in completions])
        for episode, completion, result in zip(live, completions, results, strict=True):
            if isinstance(result, Exception):
                episode.fail(result)
                continue
            episode.turns.append(
                Turn(
                    prompt_ids=episode.ids,
                    anchor=episode.anchor,
                    completion=completion,
                    action=result.action,
                    observation=result.observation,
                    reward=result.reward,
                    valid=result.valid,
                )
            )
            episode.success, episode.stop = result.success, result.stop
            episode.measures = result.measures
            if result.stop is None:
                if result.prompt:
                    self._start(episode, result.prompt)
                else:
                    said = episode.ids + completion.ids
                    episode.message = result.observation
                    episode.ids = self.codec.extend(said, result.observation)
                if len(episode.ids) + sampling.max_new_tokens > sampling.context:
                    episode.stop = Stop.CONTEXT

    def _act(self, live: list[_Episode], sampling: Sampling) -> list[Completion]:
        return self.engine.generate([self._prompt(e, sampling) for e in live])

    def _prompt(self, episode: _Episode, sampling: Sampling) -> Prompt:
        job, turn = episode.job, len(episode.turns)
        return Prompt(
            ids=episode.ids,
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            seed=keyed_seed(sampling.seed, job.update, job.task.id, job.role, job.index, turn),
            stop_ids=self.codec.stop_ids,
            stop=self.suite.stop,
            session=f"{job.task.id}/{job.role}/{job.index}",
        )

    def _trajectory(self, episode: _Episode) -> Trajectory:
        turns = tuple(episode.turns)
        invalid = sum(not t.valid for t in turns) / max(len(turns), 1)
        assert episode.stop is not None
        return Trajectory(
            task=episode.job.task,
            index=episode.job.index,
            turns=turns,
            success=episode.success and episode.stop is not Stop.ERROR,
            score=sum(t.reward for t in turns) - self.suite.config.invalid_penalty * invalid,
            stop=episode.stop,
            max_steps=self.suite.config.max_steps,
            opening=episode.opening,
            skill=episode.job.skill,
            context=episode.job.context,
            error=episode.error,
            measures=episode.measures,
        )


class ExpertPlayer(Player):
    """Plays with scripted experts in the place of the engine; ``hire(job)`` gives the one who acts.

    What they say is encoded as a policy would have said it: with the end of its turn, unless the
    environment's stop strings end a response. Log-probs are 0.
    """

    def __init__(self, suite: TaskSuite, codec: Codec, hire: Callable[[Job], Expert]) -> None:
        self.suite, self.codec, self._hire = suite, codec, hire
        self._experts: dict[int, Expert] = {}
        self._said: dict[int, str] = {}  # this turn

    def _play(
        self, jobs: Sequence[Job], sampling: Sampling, progress: Callable[[int], None]
    ) -> list[Trajectory]:
        self._experts = {}
        try:
            return super()._play(jobs, sampling, progress)
        finally:
            for expert in self._experts.values():
                expert.close()

    def _reset(self, episode: _Episode, sampling: Sampling) -> None:
        super()._reset(episode, sampling)
        if episode.stop is not None:
            return
        try:
            self._experts[id(episode.job)] = self._hire(episode.job)
        except (EnvironmentFault, ConfigError):
            raise
        except Exception as error:  # one that plays along meets what breaks episodes too
            episode.fail(error)

    def _turn(self, live: list[_Episode], sampling: Sampling) -> None:
        for episode in live:
            try:
                expert = self._experts[id(episode.job)]
                self._said[id(episode.job)] = expert.act(episode.message)
            except EnvironmentFault:
                raise
            except Exception as error:
                episode.fail(error)
        if going := [episode for episode in live if episode.stop is None]:
            super()._turn(going, sampling)

    def _act(self, live: list[_Episode], sampling: Sampling) -> list[Completion]:
        said = [self._said[id(episode.job)] for episode in live]
        end = () if self.suite.stop else self.codec.end_ids
        rows = [(*self.codec.encode(text), *end) for text in said]
        return [
            Completion(ids, (0.0,) * len(ids), text, False, 0)
            for ids, text in zip(rows, said, strict=True)
        ]
