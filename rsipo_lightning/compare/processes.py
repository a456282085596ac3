"""Runs as processes: at most so many at once, stopped by Ctrl-C, continued by the next call."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from rsipo_lightning.compare.board import Board
from rsipo_lightning.compare.plan import Run, State
from rsipo_lightning.errors import RsipoError

POLL_S = 0.2


class Signals:
    """Owns SIGINT and SIGTERM while inside: the runs are told, and this process goes on."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)


def execute(
    states: Mapping[Run, State], jobs: int, board: Board, held: Sequence[int] = ()
) -> dict[Run, str]:
    """Run what is not done, ``jobs`` at once, each with one torch thread.

    A run that fails does not stop the others. Returns the last line that each failed run wrote.
    Runs inherit the open files ``held``: a lock on them lasts as long as any run does, even if this
    process is killed.
    KeyboardInterrupt after Ctrl-C (RsipoError after SIGTERM), when the runs have written their
    checkpoints; a second signal is passed on too, a third one kills.
    """
    waiting = deque(run for run, state in states.items() if state is not State.DONE)
    live: dict[Run, subprocess.Popen[bytes]] = {}
    failed: dict[Run, str] = {}
    told = 0
    with Signals() as signals, board:
        try:
            while live or (waiting and not signals.received):
                while waiting and len(live) < jobs and not signals.received:
                    run = waiting.popleft()
                    live[run] = _start(run, states[run], held)
                    board.started(run)
                for number in signals.received[told:]:
                    told += 1
                    board.stopping(len(live))
                    _tell(live, number if told < 3 else signal.SIGKILL)
                for run in [run for run, process in live.items() if process.poll() is not None]:
                    code = live.pop(run).returncode
                    if code == 0:
                        board.finished(run)
                    elif not signals.received:
                        failed[run] = _why(code, run.log)
                        board.failed(run, failed[run])
                time.sleep(POLL_S)
        finally:
            _tell(live, signal.SIGTERM)
    if signal.SIGINT in signals.received:
        raise KeyboardInterrupt
    if signals.received:
        raise RsipoError("stopped by SIGTERM")
    return failed


def _why(code: int, log: Path) -> str:
    """What a run says last, unless it was killed (by the system, short of memory) in mid-word."""
    return f"killed by signal {-code}" if code < 0 else _last_line(log) or f"exit code {code}"


def _start(run: Run, state: State, held: Sequence[int]) -> subprocess.Popen[bytes]:
    """A process in a group of its own: Ctrl-C in the terminal reaches this process only."""
    run.log.parent.mkdir(parents=True, exist_ok=True)
    if state is State.NEW and run.folder.exists():
        _put_aside(run.folder)
    command = [sys.executable, "-m", "rsipo_lightning", *run.arguments(state)]
    with run.log.open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            pass_fds=held,
        )


def _put_aside(folder: Path) -> None:
    """A run that was killed before its first checkpoint: nothing is deleted."""
    names = (folder.with_name(f"{folder.name}-killed-{i}") for i in range(1, 1000))
    folder.rename(next(name for name in names if not name.exists()))


def _tell(live: Mapping[Run, subprocess.Popen[bytes]], number: int) -> None:
    for process in live.values():
        with suppress(ProcessLookupError, PermissionError):  # it has just ended
            os.killpg(process.pid, number)  # further ranks too, as a terminal would


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
