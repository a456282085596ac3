"""``compare``: plan, run, read, report."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from rsipo_lightning.compare import figures
from rsipo_lightning.compare.board import Board
from rsipo_lightning.compare.collect import read_run
from rsipo_lightning.compare.plan import (
    Arm,
    Run,
    Setup,
    State,
    check_data,
    extra_episodes,
    plan,
    trains,
)
from rsipo_lightning.compare.processes import execute
from rsipo_lightning.compare.report import markdown
from rsipo_lightning.compare.summary import at_budget, notes, results
from rsipo_lightning.errors import ConfigError, RsipoError, did_you_mean
from rsipo_lightning.run_folder import RECORD, on_disk, write_json, write_text

SCHEMA = 1
STARTED = "started.json"


def compare(
    setup: Setup,
    arms: Sequence[Arm],
    seeds: Sequence[int],
    *,
    control: str | None = "grpo",
    reference: str | None = None,
    budget: str = "updates",
    jobs: int | None = None,
    command: Sequence[str] = (),
) -> dict[str, Any]:
    """Run what is missing of all arms and seeds, and write compare.json, compare.md and figures.

    ``control``: algorithm of the arm with matched episodes (see ``plan``), None for none.
    ``reference``: arm that differences refer to (default: the first). ``budget``: "updates",
    "env_steps" or "cpu_s". ``jobs``: processes at once (default: one per core).
    Returns what compare.json holds. Raises ConfigError, PluginError and DataError before anything
    is written; RsipoError with a note if runs failed, and KeyboardInterrupt after Ctrl-C, both
    after writing what there is.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("the figures need matplotlib: pip install 'rsipo-lightning[plot]'")
    runs = plan(setup, arms, seeds, control)
    names = [arm.name for arm in runs]
    reference = reference or names[0]
    if reference not in names:
        raise ConfigError(f"no arm '{reference}'{did_you_mean(reference, names)}")
    everything = [run for of_arm in runs.values() for run in of_arm]
    failed: dict[Run, str] = {}
    with _alone(setup.out) as started:
        states = {run: run.state() for run in everything}
        check_data(run for run, state in states.items() if state is State.DONE)
        for run in (run for run, state in states.items() if state is State.DONE):
            read_run(run.folder, setup.out)  # what is damaged is said now, not hours later
        model = _same_policy(started, setup.out, everything[0])
        with _going_on(setup.out):
            try:
                board = Board(states)
                failed = execute(states, jobs or cores(), board, [started.fileno()])
            finally:
                report = _report(setup, runs, failed, reference, budget, model, command)
                write_json(setup.out / "compare.json", report)
                drawn = figures.draw(report, setup.out)
                write_text(setup.out / "compare.md", markdown(report, drawn))
            if failed:
                run, why = next(iter(failed.items()))
                error = RsipoError(
                    f"{len(failed)} of {len(everything)} runs failed; {run.arm.name} seed "
                    f"{run.seed}: {why}"
                )
                error.add_note(f"logs: {setup.out}/ARM/sSEED.log")
                raise error
    return report


def cores() -> int:
    """Those that this process may use: in a container fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _alone(out: Path) -> Iterator[IO[str]]:
    """The folder, ours alone while inside and while any process has the file open that is given.

    ConfigError if another process is at work there.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        file: IO[str] = (out / STARTED).open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write to {out}: {error.strerror}; choose --out") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"another rsipo-compare is at work in {out}, or a run that one has left behind"
            ) from error
        yield file


@contextmanager
def _going_on(out: Path) -> Iterator[None]:
    """Errors after work has started get a note; a full disk is one of them."""
    try:
        with on_disk(out):
            yield
    except (RsipoError, KeyboardInterrupt) as error:
        error.add_note("the same command goes on")
        raise


def _same_policy(started: IO[str], out: Path, run: Run) -> dict[str, Any]:
    """Path and checksum of the policy, which the file keeps from the first run on.

    ConfigError if they have changed since.
    """
    path = run.config.model.path
    model = {"path": path, "sha256": _checksum(path)}
    started.seek(0)
    known, now = started.read(), json.dumps(model)
    if known == now:
        return model
    if known and any(out.glob(f"*/*/{RECORD}")):
        raise ConfigError(
            f"{out} was begun with another policy: {known}, now {now}; choose another --out"
        )
    with on_disk(out):
        started.truncate(0)
        started.write(now)
        started.flush()
    return model


def _checksum(path: str) -> str | None:
    """Of the weight files of a folder, or of the policy that is shipped; None of a hub name."""
    from rsipo_lightning.policy import model_source

    folder = Path(model_source(path))
    digest = hashlib.sha256()
    files = sorted((*folder.glob("*.safetensors"), *folder.glob("*.bin")))
    for file in files:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest() if files else None


def _report(
    setup: Setup,
    runs: Mapping[Arm, Sequence[Run]],
    failed: Mapping[Run, str],
    reference: str,
    budget: str,
    model: Mapping[str, Any],
    command: Sequence[str],
) -> dict[str, Any]:
    """Everything that tables and figures are made of."""
    everything = [run for of_arm in runs.values() for run in of_arm]
    done = {run: read_run(run.folder, setup.out) for run in everything if run.state() is State.DONE}
    arms = [
        {
            "name": arm.name,
            "algo": arm.algo,
            "overrides": list(arm.overrides),
            "group": of_arm[0].config.rollout.group,
            "trains": trains(of_arm[0].config),
            "extra_episodes": extra_episodes(of_arm[0].config),
            "runs": {str(run.seed): done[run] for run in of_arm if run in done},
        }
        for arm, of_arm in runs.items()
    ]
    rows = results(arms, reference)
    value, budget_rows = at_budget(arms, reference, budget)
    seeds = list(dict.fromkeys(run.seed for run in everything))
    evaluation = everything[0].config.eval
    return {
        "schema": SCHEMA,
        "command": shlex.join(command),
        "folder": os.getcwd(),
        "env": everything[0].config.groups["env"],
        "overrides": list(setup.overrides),
        "seeds": seeds,
        "reference": reference,
        "budget": {"kind": budget, "value": value},
        "test_tasks": max((row["tasks"] for row in rows), default=0),
        "temperature": evaluation.temperature,
        "model": dict(model),
        "complete": len(done) == len(everything),
        "missing": [
            {"arm": run.arm.name, "seed": run.seed, "why": failed.get(run, "")}
            for run in everything
            if run not in done
        ],
        "results": rows,
        "at_budget": budget_rows,
        "notes": notes(rows),
        "arms": arms,
    }
