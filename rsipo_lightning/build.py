"""RunConfig -> objects -> a run. The only file that knows every part."""

from __future__ import annotations

import logging
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import torch
import transformers
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rich.console import Console
from torch import nn
from transformers import PreTrainedModel

from rsipo_lightning import memory, ranks, registry
from rsipo_lightning.adapter import attach, check_package
from rsipo_lightning.algorithms.base import PLAIN, Algorithm, active
from rsipo_lightning.bank import SkillBank
from rsipo_lightning.callbacks.best_skills import BestSkills
from rsipo_lightning.callbacks.board import writer_errors_once
from rsipo_lightning.callbacks.checkpoints import (
    Checkpoints,
    check_ranks,
    check_weights,
    latest,
    updates_of,
)
from rsipo_lightning.callbacks.eval_result import EvalResult, details, table
from rsipo_lightning.callbacks.evaluation import Evaluation, choose, choose_per_type
from rsipo_lightning.callbacks.evaluation import evaluate as look_at
from rsipo_lightning.callbacks.interrupt import Interrupt
from rsipo_lightning.callbacks.loggers import check_loggers, make_loggers
from rsipo_lightning.callbacks.logging import MetricsLogger
from rsipo_lightning.callbacks.progress import Progress, counting
from rsipo_lightning.callbacks.replays import ReplayGains
from rsipo_lightning.callbacks.rollouts import RolloutCollector, most
from rsipo_lightning.callbacks.skills import SkillCategory
from rsipo_lightning.callbacks.transcripts import Transcripts
from rsipo_lightning.codec import Codec
from rsipo_lightning.composing import component, plain, saved_groups
from rsipo_lightning.config import UNTRAINED, LoraSection, RunConfig, SftConfig
from rsipo_lightning.endpoint import Endpoint
from rsipo_lightning.errors import ConfigError, DataError, EnvironmentFault, RsipoError
from rsipo_lightning.eval_report import EvalReport
from rsipo_lightning.freshness import Sender
from rsipo_lightning.frozen import AdapterOff, frozen
from rsipo_lightning.metrics import gather, rank_of_ranks
from rsipo_lightning.metrics_csv import MetricsCsv
from rsipo_lightning.module import PolicyModule
from rsipo_lightning.policy import Policy, check_fit, load_model, load_tokenizer, save_policy
from rsipo_lightning.protocols import SPLITS, Host, TaskSuite
from rsipo_lightning.published import Published
from rsipo_lightning.rollout import Player
from rsipo_lightning.run_folder import CONFIG, RunFolder, on_disk, origin
from rsipo_lightning.sharding import Shards, adapter_state, full_state, local_device, plain_copy
from rsipo_lightning.skills import analysis_template
from rsipo_lightning.strategy import Zero3Strategy, check_zero3, connect, disconnect, environment
from rsipo_lightning.tiny import MORE, build_tokenizer, new_model
from rsipo_lightning.types import Task

T = TypeVar("T")

TRIED = 8  # tasks, of which one must begin before a run starts


@dataclass(frozen=True, slots=True)
class FitResult:
    """What a run ends with."""

    folder: Path
    looks: Mapping[str, EvalResult]  # before, after, and after_<phase> of methods that have several
    interrupted: bool

    @property
    def before(self) -> EvalResult | None:
        return self.looks.get("before")

    @property
    def after(self) -> EvalResult | None:
        return self.looks.get("after")


@dataclass(frozen=True, slots=True)
class Actors:
    """A policy and where it acts."""

    suite: TaskSuite
    codec: Codec
    policy: Policy
    player: Player
    load: Callable[[], PreTrainedModel]  # the weights that the policy starts with
    shards: Shards | None  # where each rank holds its share of the policy

    def save(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder. Collective under ZeRO-3."""
        model = self.policy.model
        state, adapter = full_state(model), adapter_state(model)
        if rank_of_ranks()[0] == 0:
            save_policy(model, self.codec.tokenizer, folder, state, adapter)

    def frozen(self) -> nn.Module:
        """The policy as it starts, to stay. Collective under ZeRO-3."""
        if self.policy.adapted:
            return AdapterOff(self.policy)
        if self.shards is None:
            return frozen(self.policy)
        policy = Policy(self.shards.load(self.load)).requires_grad_(False)
        self.shards.frozen(policy)
        return policy

    def close(self) -> None:
        """Free the engine and what the environment holds. May be called twice."""
        self.player.engine.close()
        self.suite.close()


@dataclass(frozen=True, slots=True)
class Parts(Actors):
    """Everything that a run is made of; making it checks all that can be checked before work
    starts.
    """

    algorithm: Algorithm[Any]

    def described(self) -> tuple[dict[str, Any], dict[str, str] | None]:
        """Data and skill bank, as a run records them."""
        bank = self.algorithm.bank
        return self.suite.describe(), bank.describe() if bank else None


def parts(
    config: RunConfig, splits: Sequence[str], training: bool, shards: Shards | None = None
) -> Parts:
    """Build, cheap checks first. Raises ConfigError, DataError, PluginError.

    ``splits`` are those that will be played. Where the policy only acts alone, the file of the
    skill bank may be gone. Collective with ``shards``.
    """
    name = component("algo", config.groups["algo"])
    algorithm_class = registry.load_class("algorithms", name, Algorithm)
    algorithm_class.check(config.algo, config.rollout)
    a = actors(config, splits, shards)
    with ExitStack() as on_error:
        on_error.callback(a.close)
        bank = None
        alone = not training and algorithm_class.phases[0] == PLAIN
        if algorithm_class.uses_bank(config.algo) and not alone:
            bank = SkillBank.of(config.algo, a.suite.name, a.suite.types, a.suite.config.prompt)
        algorithm = algorithm_class(config.algo, config.seed, a.codec, bank)
        on_error.pop_all()
    return Parts(a.suite, a.codec, a.policy, a.player, a.load, a.shards, algorithm)


def actors(
    config: RunConfig | SftConfig, splits: Sequence[str], shards: Shards | None = None
) -> Actors:
    """The part of :func:`parts` that needs no algorithm."""
    if config.groups["model"] == "hf" and config.model.path == "tiny":
        raise ConfigError("--model hf needs model.path=FOLDER_OR_HUB_NAME")
    check_package(config.model.lora)
    path = config.model.path
    dtype, new = config.model.dtype, path in UNTRAINED
    codec = Codec(build_tokenizer(MORE.get(path, ())) if new else load_tokenizer(path))
    name = component("env", config.groups["env"])
    suite: TaskSuite = registry.load_class("environments", name, TaskSuite)(config.env, config.seed)
    with ExitStack() as on_error:
        on_error.callback(suite.close)
        for split in splits:
            if not len(suite.tasks(split)):
                raise DataError(f"{suite.name}: split '{split}' has no tasks")
        if config.trainer.threads:
            torch.set_num_threads(config.trainer.threads)

        def load() -> PreTrainedModel:
            made = new_model(codec.tokenizer, config.seed) if new else load_model(path, dtype)
            attach(made, config.model.lora, config.seed)
            return made

        model = shards.load(load) if shards else load()
        check_fit(model, codec.tokenizer, path, config.rollout.context)
        policy = Policy(model, config.model.gradient_checkpointing)
        device = local_device(accelerator(config))

        def whole() -> Policy:
            return Policy(plain_copy(model, device)) if shards else policy

        r = config.rollout
        host = Host(policy, whole, codec.tokenizer, device, r.context, r.live, *rank_of_ranks())
        engine_class = registry.load("engines", component("engine", config.groups["engine"]))
        player = Player(suite, engine_class.of(config.engine, host), codec)
        on_error.pop_all()
    return Actors(suite, codec, policy, player, load, shards)


def check_training(config: RunConfig, made: Actors, bank: SkillBank | None = None) -> None:
    """What only a training run needs. ConfigError, before anything is written."""
    t, r = config.trainer, config.rollout
    if config.model.dtype != "float32" and not t.zero3 and not config.model.lora.rank:
        raise ConfigError(
            f"model.dtype={config.model.dtype}: AdamW loses small updates of such weights; "
            "train in float32, or with --trainer zero3, which keeps float32 weights beside them, "
            "or with model.lora.rank=N, whose own are float32 (rsipo-eval takes any)"
        )
    check_loggers(config.log.loggers)
    if r.analysis_template:
        analysis_template(r.analysis_template)
    shares = made.suite.mixture()
    for share, limit in zip(shares, most(shares, r.tasks), strict=True):
        if limit > (have := len(share.tasks)):
            where = f" in {share.name}, of which {limit} are drawn" if share.name else ""
            raise ConfigError(
                f"rollout.tasks={r.tasks}: there are only {have} training tasks{where}"
            )
    opening = first_whole(shares[0].tasks, partial(_opening, made.suite))
    skill = max((bank.text(kind) for kind in made.suite.types), key=len) if bank else ""
    need = len(made.codec.start(opening, skill)[0]) + r.max_new_tokens
    if need > r.context:
        hint = " with a skill of the bank; algo.bank_top=N shows fewer" if bank else ""
        raise ConfigError(
            f"rollout.context={r.context}: a first prompt and a turn of rollout.max_new_tokens="
            f"{r.max_new_tokens} take {need} tokens{hint}"
        )


def first_whole(tasks: Iterable[Task], begin: Callable[[Task], T]) -> T:
    """What ``begin`` gives for the first task that does not break. If all do, of TRIED: the error
    of the first.
    """
    errors: list[Exception] = []
    for task in islice(tasks, TRIED):
        try:
            return begin(task)
        except (EnvironmentFault, ConfigError):
            raise
        except Exception as error:  # a broken episode is data, unless no other one is there
            errors.append(error)
    raise errors[0]


def _opening(suite: TaskSuite, task: Task) -> str:
    """The first message."""
    with closing(suite.make()) as episode:
        return episode.reset(task)


def say(console: Console, line: str) -> None:
    """A line of paths and data as it is: one to copy, which a narrow terminal does not cut."""
    console.print(line, soft_wrap=True, highlight=False, markup=False)


def accelerator(config: RunConfig | SftConfig) -> str:
    """Lightning's "auto" also takes Apple's GPUs, which lack the float64 that sampling needs."""
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    return {"auto": auto, "gpu": "cuda", "cpu": "cpu"}[config.trainer.accelerator]


def fit(
    config: RunConfig, resume: str | Path | None = None, command: Sequence[str] = ()
) -> FitResult:
    """Train; ``resume`` is the folder of a run, whose config ``config`` must be.

    Nothing is written before everything is built. Raises what ``parts`` raises, then EngineError,
    EnvironmentFault, CheckpointError and KeyboardInterrupt with a note on how to go on.
    """
    began = clock()
    quiet()
    kind = accelerator(config)
    if kind == "cuda":
        memory.report(config, Console())
    check_devices(config)
    checkpoint = latest(Path(resume)) if resume else None
    if checkpoint:
        check_ranks(checkpoint, config.trainer)
    connect(config, kind)
    first_rank = rank_of_ranks()[0] == 0
    shards = Shards(config, kind) if config.trainer.zero3 else None
    with closing(parts(config, ("train", "val", "test"), training=True, shards=shards)) as made:
        check_training(config, made, made.algorithm.bank)
        if made.algorithm.teacher.ema and made.policy.trained()[0].dtype != torch.float32:
            raise ConfigError(
                f"model.dtype={config.model.dtype}: a moving average of such weights does not "
                f"move; {config.method} trains in float32"
            )
        server = made.algorithm.analyzer
        analyzer = Endpoint(server, "algo.endpoint") if server else None
        if analyzer:
            analyzer.probe()
        if checkpoint:
            check_weights(checkpoint, made.policy)
        first = updates_of(checkpoint) + 1 if checkpoint else 1
        loggers = None
        if resume:
            folder = RunFolder.open(resume)
            if first > config.trainer.updates + 1:
                asked = f"trainer.updates={config.trainer.updates}"
                raise ConfigError(f"{asked}: {resume} has made {first - 1} already")
            loggers = make_loggers(config, folder, first)  # what cannot start changes nothing
            gather(None)  # nor what another rank lacks
            if first_rank:
                folder.resumed(config, command)
        else:
            folder = _new_folder(config, command, made)
        if first_rank:
            ranks.announce(folder.path, folder.made)
        with folder.resumable():
            console = Console()
            if first_rank:
                line = f"run folder: {folder.path}"
                say(console, line)
            loggers = loggers or make_loggers(config, folder, first)
            result, module, trainer = _train(
                config, made, folder, checkpoint, loggers, console, analyzer
            )
            made.save(folder.path / "policy")
            if trainer.is_global_zero:
                wall, cpu = since(began)
                folder.finish(_summary(result, module.version), wall, cpu)
                for name in ("", *(f"_{phase}" for phase in made.algorithm.phases[1:])):
                    before, after = (result.looks.get(when + name) for when in ("before", "after"))
                    if before or after:
                        console.print(*(["phase", name[1:]] if name else []), table(before, after))
                line = f"{module.version} updates in {wall:.0f} s ({cpu:.0f} CPU s): {folder.path}"
                say(console, line)
            if result.interrupted:
                raise KeyboardInterrupt
    disconnect()
    return result


def check_devices(config: RunConfig) -> None:
    """ConfigError where a strategy or so many devices cannot be had."""
    t, kind, gpus = config.trainer, accelerator(config), torch.cuda.device_count()
    if kind == "cuda" and t.devices > gpus:
        raise ConfigError(f"trainer.devices={t.devices}: this machine has {gpus} GPUs")
    check_zero3(config, kind)


def _new_folder(config: RunConfig, command: Sequence[str], made: Parts) -> RunFolder:
    """Of all ranks, made by the first once all are ready to start."""
    described = made.described()
    gather(None)
    if rank_of_ranks()[0]:
        return RunFolder(gather(None)[0])
    folder = RunFolder.create(config, command, *described)
    gather(folder.path.resolve() if rank_of_ranks()[1] > 1 else None)
    return folder


def _train(
    config: RunConfig,
    made: Parts,
    folder: RunFolder,
    checkpoint: Path | None,
    loggers: list[Logger],
    console: Console,
    analyzer: Endpoint | None,
) -> tuple[FitResult, PolicyModule, L.Trainer]:
    t = config.trainer
    # The copy of an adapter is made where it is needed.
    alone = made.algorithm.teacher.live or made.policy.adapted
    teacher = None if alone else made.frozen()
    module = PolicyModule(
        made.policy, made.algorithm, config, made.player, _reference(made), teacher
    )
    transcripts = Transcripts(folder.path, config.log.groups)
    evaluation = Evaluation(
        made.suite,
        folder.path,
        config.eval,
        on_groups=transcripts.write_evaluation,
        max_error_frac=config.rollout.max_error_frac,
        phases=made.algorithm.phases,
    )
    display = [Progress(t.updates, console)] if config.log.progress else []
    interrupt = Interrupt()
    best_skills = BestSkills(folder.path, config.log.best_skills)
    rollouts = RolloutCollector(made.player, made.suite.mixture(), config)
    callbacks: list[L.Callback] = [
        *display,
        rollouts,
        ReplayGains(made.player, config, analyzer),
        SkillCategory(),
        best_skills,
        transcripts,
        evaluation,
        MetricsLogger([MetricsCsv(folder.path / "metrics.csv"), *display]),
        interrupt,
        Checkpoints(
            folder.path,
            config.checkpoint.every,
            config.checkpoint.keep,
            best_skills,
            partial(made.save, folder.path / "policy"),
            config.checkpoint.export_every,
        ),
    ]
    trainer = L.Trainer(
        accelerator=accelerator(config),
        devices=t.devices,
        num_nodes=t.nodes,
        strategy=Zero3Strategy(made.shards.config) if made.shards else t.strategy,
        plugins=environment(),
        max_epochs=t.updates,
        accumulate_grad_batches=t.micro_batches,
        gradient_clip_val=config.optim.clip or None,
        logger=loggers,
        callbacks=callbacks,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder.path),
    )
    try:
        with interrupt, writer_errors_once():
            trainer.fit(module, ckpt_path=checkpoint, weights_only=True)
            if made.player.engine.policy_version != module.version:  # nothing was left to train
                rollouts.sender.send(made.policy, module.version)
            evaluation.finish(trainer, module)
    except SIGTERMException as error:  # a SystemExit of code 0, as if all had been done
        raise RsipoError("stopped by SIGTERM") from error
    finally:
        made.close()
    result = FitResult(folder.path, evaluation.looks, interrupt.presses > 0)
    return result, module, trainer


def quiet() -> None:
    """Libraries keep their tips and bars to themselves; their warnings about our use stay."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    if not torch.cuda.is_available():  # accelerate imports deepspeed, which warns that it sees none
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)")  # of Lightning itself
    warnings.filterwarnings("ignore", ".*module.s. in eval mode at the start of training")
    warnings.filterwarnings("ignore", ".*does not have many workers")
    warnings.filterwarnings("ignore", ".*DeepSpeed handles gradient clipping internally")
    warnings.filterwarnings("ignore", ".*each worker will save a shard of the checkpoint")
    warnings.filterwarnings("ignore", "`torch.distributed.*is deprecated", FutureWarning)


def _summary(result: FitResult, updates: int) -> dict[str, Any]:
    """What run.json keeps of the result."""
    return {
        "updates": updates,
        "peak_rss_mib": peak_rss_mib(),
        "interrupted": result.interrupted,
        **{name: look.to_json() for name, look in result.looks.items()},
    }


def clock() -> tuple[float, float]:
    """Seconds so far: wall, and CPU of this process and of its children that have ended."""
    own, ended = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    cpu = own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime
    return time.perf_counter(), cpu


def since(began: tuple[float, float]) -> tuple[float, float]:
    """Seconds since :func:`clock` was read. What workers took is in it once they are closed."""
    wall, cpu = clock()
    return wall - began[0], cpu - began[1]


def peak_rss_mib() -> int:
    """The most memory that this process has held."""
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(kib / (1 << 20 if sys.platform == "darwin" else 1024))


def _reference(made: Parts) -> nn.Module | None:
    """The policy as it starts, if any term needs it."""
    if not any(stream.reference for stream in active(made.algorithm.streams).values()):
        return None
    return made.frozen()


def evaluate(
    path: str | Path,
    config: RunConfig,
    split: str = "test",
    episodes: int | None = None,
    per_type: int | None = None,
    samples: int = 1,
    published: Published | None = None,
    out: EvalReport | None = None,
    command: Sequence[str] = (),
) -> EvalResult:
    """Success of the policy in the folder of a run or of a model, each task ``samples`` times.

    ``split`` is one of the environment's. ``per_type`` caps the number of tasks of each type, else
    ``episodes`` caps that of all, which is ``eval.episodes`` unless given, and unlimited for a
    split that not every environment has. ``published`` is shown beside the result, ``out`` gets it
    all as files.

    Raises what ``parts`` raises, then EngineError, EnvironmentFault, CheckpointError and
    KeyboardInterrupt with a note on what was kept.
    """
    began = clock()
    quiet()
    path = Path(path)
    if (path / CONFIG).is_file() and not (path / "policy").is_dir():
        stage1 = "sft" in saved_groups(path / CONFIG)
        finish = f"rsipo-sft --config {path / CONFIG}" if stage1 else f"rsipo-fit --resume {path}"
        raise DataError(f"{path} is not finished, it has no policy/ yet: {finish}")
    limit = episodes or (config.eval.episodes if split in SPLITS else sys.maxsize)
    if per_type is None and not limit:
        raise ConfigError("eval.episodes=0: how many tasks? Give --episodes N or --per-type N")
    folder = path / "policy" if (path / "policy").is_dir() else path
    # An adapter is merged in the folder of a run; a new one would change nothing.
    config = replace(config, model=replace(config.model, path=str(folder), lora=LoraSection()))
    with closing(parts(config, (split,), training=False)) as made:
        if per_type is not None:
            tasks = choose_per_type(made.suite, split, per_type)
        else:
            tasks = choose(made.suite, split, limit)
        if published:
            published.check({task.type for task in tasks})
        made.policy.to(accelerator(config))
        Sender(made.player, config).send(made.policy, 0)
        module = PolicyModule(made.policy, made.algorithm, config, made.player)
        record = origin(config, command, *made.described())
        console = Console()
        if out:
            out.start()
        with _begun(out):
            with counting("episodes", len(tasks) * samples, console) as count:
                result = look_at(
                    made.suite,
                    tasks,
                    partial(module.play, progress=count),
                    split=split,
                    temperature=config.eval.temperature,
                    samples=samples,
                    block=max(1, config.rollout.live // samples),
                    on_groups=out.add if out else None,
                    max_error_frac=config.rollout.max_error_frac,
                )
            console.print(details(result))
            if published:
                wide = console if console.is_terminal else Console(width=160)
                for part in published.tables(result, wide.width):
                    wide.print(part)
            made.close()
            wall, cpu = since(began)
            line = f"{result.overall.n} episodes in {wall:.0f} s ({cpu:.0f} CPU s)"
            if out:
                out.finish(
                    {
                        **record,
                        "model": str(folder.resolve()),
                        "samples": samples,
                        "wall_s": round(wall, 2),
                        "cpu_s": round(cpu, 2),
                        **result.to_json(),
                        **({"published": published.to_json(result)} if published else {}),
                        "config": plain(config),
                    }
                )
                line += f": {out.result}, {out.episodes}"
    say(console, line)
    return result


@contextmanager
def _begun(out: EvalReport | None) -> Iterator[None]:
    """Errors that end an evaluation get a note on what was kept.

    The command line tells by this note that work had started (exit code 75, not 2).
    """
    try:
        with on_disk(out.result if out else Path()):
            yield
    except (RsipoError, KeyboardInterrupt) as error:
        error.add_note(out.kept() if out else "nothing is kept; --out FILE.json keeps the episodes")
        raise
