"""The processes of a run on several devices: started together, ended together.

:func:`launch` starts the same command once for each rank and waits. Whichever rank fails first, all
of them end, and its reason is the one that is told. torchrun sets the same variables (RANK,
LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and can take its place.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import IO, Any

# A folder in which ranks that `launch` started tell it what it cannot see.
NOTES = "RSIPO_LAUNCH_DIR"
POLL_S = 0.1
# What the other ranks get to end by themselves once one has failed, and after SIGTERM.
GRACE_S, TERM_S = 10.0, 5.0


@dataclass(frozen=True, slots=True)
class Failure:
    """What ended a run on several ranks."""

    rank: int
    code: int  # exit code; negative: the number of the signal that killed the rank
    text: str  # what the rank had to say, "" for nothing
    run: Path | None = None  # the run's folder, if it was known by then
    made: tuple[Path, ...] = ()  # for a new run: its folder and the parents that it lacked


def rank() -> int:
    """This process's place in the run, over all nodes; 0 where there is one process."""
    return int(os.environ.get("RANK", "0"))


def count(planned: int) -> int:
    """How many ranks there are; ``planned`` where none has started."""
    return int(os.environ.get("WORLD_SIZE", planned))


def started() -> bool:
    """Whether a launcher has started this process as one of several."""
    return "RANK" in os.environ  # Lightning takes WORLD_SIZE away when it ends


# ---- in a rank


def follow_launcher() -> None:
    """End with the launcher, however it ends: the other end of stdin closes then.

    Takes what this rank has started along.
    """
    if NOTES not in os.environ:
        return

    def wait() -> None:
        with suppress(OSError):
            while os.read(0, 4096):
                pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def report(text: str, code: int) -> bool:
    """Leave to the launcher what is to be told; False if there is none."""
    return _note(f"failed-{rank()}", {"time": time.time(), "code": code, "text": text})


def announce(run: Path, made: Sequence[Path]) -> None:
    """Tell the launcher where the run is, and which folders were made for it."""
    _note("run", {"path": str(run.resolve()), "made": [str(path.resolve()) for path in made]})


def _note(name: str, content: Mapping[str, Any]) -> bool:
    if NOTES not in os.environ:
        return False
    path = Path(os.environ[NOTES]) / name
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content), encoding="utf-8")
    os.replace(part, path)
    return True


# ---- in the launcher


def launch(command: Sequence[str], count: int) -> Failure | None:
    """Run ``command`` as ``count`` ranks on this machine; None once all have ended well.

    The first rank has this process's output; what the others print is shown only if one of them
    dies without a word. Signals (Ctrl-C, SIGTERM) are passed on to all.
    """
    with tempfile.TemporaryDirectory(prefix="rsipo-ranks-") as folder:
        notes = Path(folder)
        processes: list[subprocess.Popen[bytes]] = []
        outputs: list[IO[bytes]] = []
        with _signals_to(processes):
            try:
                port = _free_port()
                for k in range(count):
                    outputs.append((notes / f"output-{k}").open("wb"))
                    processes.append(_start(command, k, count, port, notes, outputs[k]))
                return _wait(processes, notes)
            finally:
                for process in processes:
                    _kill(process, signal.SIGKILL)  # what it had started is in its group too
                    process.wait()
                    if process.stdin:
                        process.stdin.close()
                for output in outputs:
                    output.close()


def _start(
    command: Sequence[str], k: int, count: int, port: int, notes: Path, output: IO[bytes]
) -> subprocess.Popen[bytes]:
    env = {
        **os.environ,
        "RANK": str(k),
        "LOCAL_RANK": str(k),
        "NODE_RANK": "0",
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        NOTES: str(notes),
    }
    shown: dict[str, Any] = {} if k == 0 else {"stdout": output, "stderr": output}
    # A group of its own: Ctrl-C of a terminal reaches the launcher alone, which passes it on once.
    return subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, start_new_session=True, **shown
    )


def _wait(processes: Sequence[subprocess.Popen[bytes]], notes: Path) -> Failure | None:
    died: dict[int, int] = {}  # rank: exit code, of those that failed by themselves
    while not died and not _reports(notes):
        codes = [process.poll() for process in processes]
        if all(code == 0 for code in codes):
            return None
        died = {k: code for k, code in enumerate(codes) if code}
        time.sleep(POLL_S)
    # An abort that late is NCCL's or gloo's answer to the end of others.
    died |= {k: code for k, code in _end(processes).items() if code != -signal.SIGABRT}
    failure = _first(died, notes)
    if run := _read(notes / "run"):
        made = tuple(Path(path) for path in run["made"])
        return replace(failure, run=Path(run["path"]), made=made)
    return failure


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> dict[int, int]:
    """End all; exit codes of those that did so by themselves."""
    _wait_for(processes, GRACE_S)
    by_themselves = {k: p.returncode for k, p in enumerate(processes) if p.returncode}
    for process in processes:
        if process.poll() is None:
            _kill(process, signal.SIGTERM)
    _wait_for(processes, TERM_S)  # the caller kills what is left
    return by_themselves


def _wait_for(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(p.poll() is None for p in processes):
        time.sleep(POLL_S)


def _first(died: Mapping[int, int], notes: Path) -> Failure:
    """A rank that was killed lets the others fail as well; else the earliest report counts."""
    reports = _reports(notes)
    silent = {k: code for k, code in died.items() if k not in reports}
    killed = min((k for k, code in silent.items() if code < 0), default=None)
    if killed is None and reports:
        k = min(reports, key=lambda k: float(reports[k]["time"]))
        return Failure(k, int(reports[k]["code"]), str(reports[k]["text"]))
    k = min(silent) if killed is None else killed
    said = (notes / f"output-{k}").read_text(encoding="utf-8", errors="replace")
    return Failure(k, silent[k], said[-4000:].rstrip())


def _reports(notes: Path) -> dict[int, dict[str, Any]]:
    found = {
        int(path.name.split("-")[1]): _read(path)
        for path in notes.glob("failed-*")
        if not path.suffix
    }
    return {k: content for k, content in found.items() if content}


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return content


def _kill(process: subprocess.Popen[bytes], signum: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signum)


@contextmanager
def _signals_to(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    def pass_on(signum: int, frame: FrameType | None) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signum)

    if threading.current_thread() is not threading.main_thread():  # others may set no handler
        yield
        return
    before = {s: signal.signal(s, pass_on) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def command(argv: Sequence[str]) -> list[str]:
    """``rsipo-fit`` with these arguments, as a process of its own."""
    return [sys.executable, "-m", "rsipo_lightning", *argv]
