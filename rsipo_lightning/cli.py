"""``rsipo-fit``, ``rsipo-sft`` and ``rsipo-eval``: flags in, exit code out.

Exit codes: 0 done; 2 cannot start, one line says why and nothing was written; 75 stopped, and the
line says what is kept or how to go on; 130 Ctrl-C; 143 SIGTERM before there was anything to keep.
Any other exception keeps its traceback.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rsipo_lightning import ranks
from rsipo_lightning.errors import ConfigError, DataError, RsipoError, Terminated

CANNOT_START, STOPPED, INTERRUPTED, TERMINATED = 2, 75, 130, 143


def fit_main(argv: Sequence[str] | None = None) -> int:
    """Train: ``rsipo-fit --algo A --env E [key=value ...]``. Returns the exit code."""
    return guard("rsipo-fit", _fit, sys.argv[1:] if argv is None else list(argv))


def sft_main(argv: Sequence[str] | None = None) -> int:
    """Stage 1: ``rsipo-sft --env E [--sft RECIPE] [key=value ...]``. Returns the exit code."""
    return guard("rsipo-sft", _sft, sys.argv[1:] if argv is None else list(argv))


def eval_main(argv: Sequence[str] | None = None) -> int:
    """Evaluate: ``rsipo-eval RUN_OR_MODEL_DIR [key=value ...]``. Returns the exit code."""
    return guard("rsipo-eval", _eval, sys.argv[1:] if argv is None else list(argv))


main = fit_main


class Parser(argparse.ArgumentParser):
    """Errors are exceptions of ours, so that they end in one line like all others."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Flags and words in any order. ConfigError for a flag that does not exist."""
        flags, unknown = self.parse_known_intermixed_args(argv)
        if unknown:
            close = get_close_matches(unknown[0].split("=")[0], self._option_string_actions, n=1)
            hint = f"did you mean {close[0]}?" if close else "--help shows all"
            raise ConfigError(f"no flag {unknown[0]}; {hint}")
        return flags


FLAGS = {  # group: (metavar, help)
    "algo": ("A", "algorithm: rsipo, grpo, ... (see --list)"),
    "sft": ("R", "recipe: scripted (default), seed, tiny, ... (see --list)"),
    "env": ("E", "environment: search, alfworld, ..."),
    "model": ("M", "preset of the policy (default: tiny or tiny_ENV; hf if model.path is given)"),
    "trainer": ("T", "preset of devices and strategy (default: auto)"),
    "engine": ("X", "what generates (default: hf)"),
}


def _parser(program: str, groups: Sequence[str], description: str, example: str) -> Parser:
    """Flags of a command that composes a config."""
    parser = Parser(
        program, allow_abbrev=False, description=description, epilog=f"example: {example}"
    )
    add = parser.add_argument
    for group in FLAGS:
        if group in groups:
            add(f"--{group}", metavar=FLAGS[group][0], help=FLAGS[group][1])
    add("--config", metavar="FILE", help="YAML with any keys, e.g. config.yaml of an earlier run")
    add("--print-config", action="store_true", help="show every value and its source, and exit")
    add("--list", action="store_true", help="show what the flags can name, and exit")
    add("overrides", nargs="*", metavar="key=value", help="any key that --print-config shows")
    return parser


def _fit(argv: list[str]) -> int:
    from rsipo_lightning.composing import FIT, compose_kind, saved_groups, to_yaml
    from rsipo_lightning.run_folder import RunFolder, check_writable

    parser = _parser(
        "rsipo-fit",
        FIT.groups,
        "Train a policy. A run writes <run.root>/<env>/<algo>/<time>-s<seed>/.",
        "rsipo-fit --algo rsipo --env search seed=1 trainer.updates=10",
    )
    parser.add_argument("--resume", metavar="RUN", help="go on with the run in this folder")
    parser.add_argument(
        "--print-memory", action="store_true", help="show what a GPU must hold, and exit"
    )
    args = parser.read(argv)
    if args.list:
        return _list(FIT.groups)
    flags = {group: getattr(args, group) for group in FLAGS if group in FIT.groups}
    source = args.config
    if args.resume:
        if given := [f"--{name}" for name, value in flags.items() if value] + (
            ["--config"] if args.config else []
        ):
            raise ConfigError(f"--resume takes these from the run: leave out {', '.join(given)}")
        source = RunFolder.open(args.resume).config_file
        if "sft" in saved_groups(source):
            raise ConfigError(
                f"{args.resume} is of stage 1: rsipo-sft --config {source} starts again"
            )
    composed = compose_kind(FIT, flags, source, args.overrides)
    if args.print_config:
        print(to_yaml(composed.config, composed.origins), end="")
        return 0
    if (
        args.resume
        and compose_kind(FIT, {}, source).config.model.lora != composed.config.model.lora
    ):
        raise ConfigError(f"{args.resume} goes on with the adapter it has: leave out model.lora.*")
    if args.print_memory:
        from rich.console import Console

        from rsipo_lightning import memory

        memory.report(composed.config, Console())
        return 0
    if not args.resume and ranks.rank() == 0:
        check_writable(composed.config)
    trainer = composed.config.trainer
    if (trainer.ranks > 1 or trainer.zero3) and not ranks.started():
        if trainer.nodes > 1:
            raise ConfigError(
                f"trainer.nodes={trainer.nodes}: start the command on every node with torchrun "
                "(docs/scaling.md)"
            )
        return _on_ranks(argv, trainer.devices)
    from rsipo_lightning import build

    build.fit(composed.config, resume=args.resume, command=["rsipo-fit", *argv])
    return 0


def _on_ranks(argv: Sequence[str], count: int) -> int:
    """The same command as so many processes; what the first one to fail says, once."""
    from rsipo_lightning.run_folder import RunFolder, go_on

    failed = ranks.launch(ranks.command(argv), count)
    if failed is None:
        return 0
    if failed.code < 0:
        note = go_on(failed.run) if failed.run else ""
        how = f"rank {failed.rank} was killed by {signal.Signals(-failed.code).name}"
        print(failed.text, f"rsipo-fit: error: {how}{note and f'; {note}'}", file=sys.stderr)
        return STOPPED if note else 1
    if failed.code == CANNOT_START and failed.run:  # another rank may have left it
        RunFolder(failed.run, failed.made).discard()
    print(failed.text, file=sys.stderr)
    return failed.code


def _sft(argv: list[str]) -> int:
    from rsipo_lightning.composing import SFT, compose_kind, to_yaml
    from rsipo_lightning.run_folder import check_writable

    parser = _parser(
        "rsipo-sft",
        SFT.groups,
        "Stage 1: play episodes, label them with skills, and fine-tune the policy on these skills. "
        "A run writes <run.root>/<env>/sft-<recipe>/<time>-s<seed>/.",
        "rsipo-sft --env search sft.epochs=1 rollout.tasks=20",
    )
    args = parser.read(argv)
    if args.list:
        return _list(SFT.groups)
    flags = {group: getattr(args, group) for group in SFT.groups}
    composed = compose_kind(SFT, flags, args.config, args.overrides)
    if args.print_config:
        print(to_yaml(composed.config, composed.origins), end="")
        return 0
    check_writable(composed.config)
    from rsipo_lightning.sft import run

    run.sft(composed.config, command=["rsipo-sft", *argv])
    return 0


def _list(groups: Sequence[str]) -> int:
    from rsipo_lightning.listing import listing

    print(listing(groups), end="")
    return 0


def _eval(argv: list[str]) -> int:
    parser = Parser(
        "rsipo-eval",
        allow_abbrev=False,
        description="Success of the policy of a run, or of any model folder, on tasks.",
        epilog="example: rsipo-eval runs/search/rsipo/TIME-s0 --episodes 500 env.questions=FILE",
    )
    add = parser.add_argument
    add("--env", metavar="E", help="environment (default: the run's)")
    add("--model", metavar="M", help="preset for a folder that is no run (default: hf)")
    add(
        "--split",
        metavar="S",
        help="train, val, test or one of the environment's own (default: test; for search with "
        "env.questions=FILE its split all, every question; for alfworld valid_seen)",
    )
    cap = parser.add_mutually_exclusive_group().add_argument
    cap("--episodes", metavar="N", type=int, help="tasks to play (default: eval.episodes)")
    cap("--per-type", metavar="N", type=int, help="at most N tasks of each type, instead")
    add("--samples", metavar="K", type=int, default=1, help="play each task K times (default: 1)")
    add("--out", metavar="FILE.json", help="write the result; episodes go to FILE.jsonl")
    add("--published", metavar="CSV", help="show published numbers of sets that were run in full")
    add("--published-model", metavar="NAME", help="whose numbers, e.g. Qwen2.5-3B")
    add("path", metavar="RUN_OR_MODEL_DIR", help="folder of a run, or one with a config.json")
    add("overrides", nargs="*", metavar="key=value", help="any key of rsipo-fit --print-config")
    args = parser.read(argv)
    from rsipo_lightning import registry
    from rsipo_lightning.composing import COMMAND_LINE, FIT, component, compose_kind, saved_groups
    from rsipo_lightning.protocols import TaskSuite
    from rsipo_lightning.run_folder import CONFIG

    path = Path(args.path)
    for flag in ("episodes", "per_type", "samples"):
        if (value := getattr(args, flag)) is not None and value < 1:
            raise ConfigError(f"--{flag.replace('_', '-')} {value}: must be at least 1")
    run = (path.parent if path.name == "policy" else path) / CONFIG
    # A bare model, like a run of stage 1, names no algorithm; GRPO shows it the bare task.
    chosen = {"algo": "grpo", "env": args.env, "model": args.model}
    if run.is_file():
        chosen["algo"] = saved_groups(run).get("algo", "grpo")
        config, origins = compose_kind(FIT, chosen, run, args.overrides)
    elif (path / "config.json").is_file():
        chosen["model"] = args.model or "hf"
        config, origins = compose_kind(FIT, chosen, None, args.overrides)
    else:
        raise DataError(f"{path} is neither the folder of a run ({CONFIG}) nor of a model")
    if args.samples > 1 and config.eval.temperature == 0:
        raise ConfigError(f"--samples {args.samples} are all the same at eval.temperature=0")
    if args.published_model and not args.published:
        raise ConfigError("--published-model is given without --published CSV")
    from rsipo_lightning.published import Published

    env = component("env", config.groups["env"])
    published = args.published and Published.read(args.published, args.published_model, env)
    given = [
        key.removeprefix("env.")
        for key, origin in origins.items()
        if key.startswith("env.") and origin == COMMAND_LINE
    ]
    suite = registry.load_class("environments", env, TaskSuite)
    split = args.split or suite.evaluation_split(config.env, given)
    from rsipo_lightning import build
    from rsipo_lightning.eval_report import EvalReport

    build.evaluate(
        path,
        config,
        split=split,
        episodes=args.episodes,
        per_type=args.per_type,
        samples=args.samples,
        published=published,
        out=EvalReport(args.out) if args.out else None,
        command=["rsipo-eval", *argv],
    )
    return 0


def guard(program: str, work: Callable[[list[str]], int], argv: list[str]) -> int:
    """Run ``work``; one of our errors becomes a line on stderr and an exit code."""
    ranks.follow_launcher()
    try:
        with _sigterm_raises():
            return work(argv)
    except (RsipoError, KeyboardInterrupt) as error:
        notes = getattr(error, "__notes__", [])  # of what was kept: work had started
        terminated = isinstance(error, Terminated)
        interrupted = isinstance(error, KeyboardInterrupt) and not terminated
        text = "stopped by Ctrl-C" if interrupted else f"error: {error}"
        line = f"{program}: {'; '.join([text, *notes])}"
        code = STOPPED if notes else TERMINATED if terminated else CANNOT_START
        if interrupted:
            code = INTERRUPTED
        if not ranks.report(line, code):
            print(line, file=sys.stderr)
        return code
    except Exception:
        if not ranks.report(f"rank {ranks.rank()}:\n{traceback.format_exc()}", 1):
            raise
        return 1


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Terminated where the process would die without a word; a handler of others is left alone."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise Terminated("stopped by SIGTERM")

    mine = threading.current_thread() is threading.main_thread()  # others may set none
    if not mine or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
