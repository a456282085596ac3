"""``sft(config)``: the whole of stage 1, from episodes to a Hugging Face folder."""

from __future__ import annotations

import random
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rsipo_lightning.build import (
    Actors,
    accelerator,
    actors,
    check_devices,
    check_training,
    clock,
    first_whole,
    peak_rss_mib,
    quiet,
    say,
    since,
)
from rsipo_lightning.callbacks.progress import counting
from rsipo_lightning.callbacks.transcripts import trajectory_row
from rsipo_lightning.checks import one_of
from rsipo_lightning.config import SftConfig
from rsipo_lightning.demonstrations import MIXTURES, Demonstrations, Lessons, Teacher
from rsipo_lightning.endpoint import Endpoint
from rsipo_lightning.environments.alfworld.suite import AlfworldSuite
from rsipo_lightning.environments.search import SearchSuite
from rsipo_lightning.errors import ConfigError, DataError, RsipoError
from rsipo_lightning.files import append_jsonl
from rsipo_lightning.freshness import Sender
from rsipo_lightning.household import HOUSE_MIXTURES, HouseDemonstrations
from rsipo_lightning.imitation import Epochs
from rsipo_lightning.run_folder import RunFolder, on_disk
from rsipo_lightning.sft import report
from rsipo_lightning.sft.episodes import STAGE1, held_out, play, rows, written
from rsipo_lightning.sft.labels import Ask, Labeller, read_known
from rsipo_lightning.sft.training import mean_nll, train
from rsipo_lightning.skills import analysis_messages, analysis_template
from rsipo_lightning.types import Stop, Task, Trajectory

LABELS = "labels.jsonl"
EPISODES = "trajectories.jsonl"


def sft(config: SftConfig, command: Sequence[str] = ()) -> Path:
    """Make a policy by stage 1; gives the run's folder, in which it lies as ``policy``.

    Nothing is written before all that can be checked is. Raises ConfigError, DataError and
    PluginError then; later EngineError, EnvironmentFault, DivergedError, DataError and
    KeyboardInterrupt with a note on how to start again.
    """
    began = clock()
    quiet()
    known = read_known(config.sft.labels_file) if config.sft.labels_file else None
    if config.sft.labels == "file" and not known:
        raise DataError(f"{config.sft.labels_file}: holds no labels")
    endpoint = None
    if config.sft.labels == "endpoint":
        endpoint = Endpoint(config.sft.endpoint, "sft.endpoint")
    check_devices(config.training(1))
    with closing(actors(config, ("train",))) as made:
        check_training(config.training(1), made)
        lessons = _lessons(config, made) if config.sft.lessons else None
        labeller = Labeller(made.suite, _ask(config, made), config.seed, known, endpoint)
        if lessons is None:
            _check_episodes(config, made, labeller)
        folder = RunFolder.create(config, command, made.suite.describe())
        console = Console()
        shown = console if config.log.progress else None
        with _noted(config, folder):
            say(console, f"run folder: {folder.path}")
            made.policy.to(accelerator(config))
            Sender(made.player, config.training(1)).send(made.policy, 0)
            if lessons is not None:
                result = _learn_lessons(config, made, lessons, folder.path, shown)
            else:
                result = _learn_skills(config, made, labeller, folder.path, shown)
            made.close()
            wall, cpu = since(began)
            folder.finish({**result, "peak_rss_mib": peak_rss_mib()}, wall, cpu)
            if table := _table(result):
                console.print(table)
            cost = f"{wall:.0f} s ({cpu:.0f} CPU s)"
            say(console, f"{result['updates']} updates in {cost}: {folder.path}")
    return folder.path


# ---- skills for episodes


def _check_episodes(config: SftConfig, made: Actors, labeller: Labeller) -> None:
    """What can be known before the first episode. ConfigError, DataError."""
    s, tasks = config.sft, config.rollout.tasks
    if s.val_frac and tasks - max(1, round(s.val_frac * tasks)) < 1:
        raise ConfigError(
            f"rollout.tasks={tasks}: with sft.val_frac={s.val_frac} none is left to train on"
        )

    def begin(task: Task) -> None:
        if s.actor == "expert":
            made.suite.expert(task, random.Random(0)).close()
        if s.labels == "scripted":
            empty = Trajectory(task, 0, (), False, 0.0, Stop.DONE, 1)
            made.suite.hindsight(empty, random.Random(0))

    first_whole(made.suite.tasks("train"), begin)
    if labeller.endpoint:
        labeller.endpoint.probe()


def _learn_skills(
    config: SftConfig, made: Actors, labeller: Labeller, folder: Path, console: Console | None
) -> dict[str, Any]:
    """Episodes, labels, training, and a look at the skills of held-out tasks before and after."""
    s, r = config.sft, config.rollout
    with _counting("episodes", r.tasks * r.group, console) as progress:
        played = play(config, made, progress)
    found = [trajectory_row(STAGE1 + 1, s.actor, t, made.codec) for t in played]
    append_jsonl(folder / EPISODES, found)
    episodes = [t for t in played if t.scored]
    with _counting("labels", len(episodes), console) as progress:
        labels = labeller.label(episodes, folder / LABELS, progress)
    held = held_out(played, s.val_frac, config.seed)
    done = rows(config, made, labeller.ask, zip(episodes, labels, strict=True), held)
    done.left_out["episode broke"] += len(played) - len(episodes)
    batches = Epochs(done.train, s.batch, config.seed)
    training = config.training(s.epochs * batches.length)
    size = max(1, s.batch // config.trainer.micro_batches)  # rows of a forward
    unseen = [t for t in episodes if t.task.id in held]

    def look() -> dict[str, Any]:
        loss = mean_nll(made.policy, done.held, size) if done.held else None
        skills = written(training, made, unseen, s.skill_temperature)
        return {
            "episodes": len(unseen),
            "parsed": sum(bool(skill.text) for skill in skills),
            "valid": sum(skill.valid for skill in skills),
            "too_long": len(unseen) - len(skills),  # neither parsed nor valid
            "loss": loss,
        }

    summary = {
        "episodes": len(played),
        "success_frac": sum(t.success for t in episodes) / max(len(episodes), 1),
        "labels": sum(not label.problem for label in labels),
        "rows": {"train": len(done.train), "held_out": len(done.held)},
        "left_out": {reason: n for reason, n in done.left_out.items() if n},
    }
    if console:
        say(console, _counts(summary))
    before = look()
    train(training, made, batches, folder, console, done.held, batches.length)
    made.save(folder / "policy")
    return {**summary, "updates": training.trainer.updates, "before": before, "after": look()}


def _ask(config: SftConfig, made: Actors) -> Ask:
    """The prompt that the policy writes skills from is the one that asks for labels."""
    file, style = config.rollout.analysis_template, made.suite.config.prompt
    template = analysis_template(file) if file else None
    return lambda trajectory: analysis_messages(trajectory, style, template)


def _counting(
    what: str, total: int, console: Console | None
) -> AbstractContextManager[Callable[[int], None]]:
    return counting(what, total, console) if console else nullcontext(lambda n: None)


def _counts(summary: Mapping[str, Any]) -> str:
    left = "; ".join(f"{n} x {reason}" for reason, n in summary["left_out"].items()) or "nothing"
    return (
        f"{summary['episodes']} episodes (success {summary['success_frac']:.2f}), "
        f"{summary['labels']} labels, {summary['rows']['train']} rows to train, "
        f"{summary['rows']['held_out']} held out; left out: {left}"
    )


def _table(result: Mapping[str, Any]) -> Table | None:
    """What the run shows at its end; None if it has played nothing to be shown."""
    if "report" in result:
        return report.table(result["report"]) if result["report"] else None
    looks = [result["before"], result["after"]]
    if not looks[0]["episodes"]:
        return None
    table = Table(title=f"Skills of {looks[0]['episodes']} unseen episodes")
    for name in ("", "before", "after"):
        table.add_column(name, justify="right" if name else "left")
    for name in ("parsed", "valid"):
        table.add_row(name, *(f"{look[name] / look['episodes']:.1%}" for look in looks))
    losses = ["-" if look["loss"] is None else f"{look['loss']:.3f}" for look in looks]
    table.add_row("loss of the labels", *losses)
    return table


# ---- lessons


def _lessons(config: SftConfig, made: Actors) -> Lessons:
    """ConfigError unless environment and tokenizer are those that the lessons are about."""
    name, suite, seed = config.sft.mixture, made.suite, config.seed
    one_of("sft.mixture", name, (*MIXTURES, *HOUSE_MIXTURES))
    teach: Callable[[], Teacher]
    if name in HOUSE_MIXTURES:
        if not isinstance(suite, AlfworldSuite) or suite.config.context != "window":
            raise ConfigError(f"sft.lessons of {name} are of --env alfworld, env.context=window")
        fits = "untrained_alfworld or tiny_alfworld"
        teach = partial(HouseDemonstrations, made.codec, seed, HOUSE_MIXTURES[name], suite)
    else:
        if not isinstance(suite, SearchSuite) or suite.config.questions:
            raise ConfigError("sft.lessons are of the built-in world: --env search without files")
        fits = "untrained or tiny"
        teach = partial(Demonstrations, made.codec, seed, MIXTURES[name], suite.config)
    try:
        return Lessons(teach())
    except ValueError as error:  # a word of the world is several tokens
        raise ConfigError(
            f"sft.lessons of {name} need the tiny policy's tokenizer, not that of "
            f"{config.model.path}; use model.path={fits}"
        ) from error


def _learn_lessons(
    config: SftConfig, made: Actors, lessons: Lessons, folder: Path, console: Console | None
) -> dict[str, Any]:
    s, training = config.sft, config.training(config.sft.lessons)
    train(training, made, lessons, folder, console)
    made.save(folder / "policy")
    shown = lessons.teacher.skills
    report_of = report.figures(training, made, s.report, shown) if s.report else None
    return {"updates": s.lessons, "report": report_of}


# ---- the folder


@contextmanager
def _noted(config: SftConfig, folder: RunFolder) -> Iterator[None]:
    """Errors that end the run get a note on how to start again without paying for labels twice.

    The command line tells by this note that work had started (exit code 75, not 2).
    """
    try:
        with on_disk(folder.path):
            yield
    except (RsipoError, KeyboardInterrupt) as error:
        again = f"rsipo-sft --config {shlex.quote(str(folder.config_file))}"
        labels = folder.path / LABELS
        if config.sft.labels == "endpoint" and labels.exists():
            again += f" sft.labels_file={shlex.quote(str(labels))}"
        error.add_note(f"start again with: {again}")
        raise
