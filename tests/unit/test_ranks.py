"""Ranks end together, and the reason of the first is told."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rsipo_lightning import ranks

ROOT = Path(__file__).parents[2]
HEAD = "import os, signal, sys, time\nfrom rsipo_lightning import ranks\nrank = ranks.rank()\n"
WAIT = "time.sleep(60)\n"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(ranks, "GRACE_S", 1.0)
    monkeypatch.setattr(ranks, "TERM_S", 1.0)


def program(body: str) -> list[str]:
    return [sys.executable, "-c", HEAD + textwrap.dedent(body)]


def alive(pid: int) -> bool:
    """Not counting what has ended and is not yet collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_ranks_know_their_places(tmp_path: Path) -> None:
    body = f"""
    place = [os.environ[k] for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")]
    open({str(tmp_path)!r} + f"/{{rank}}", "w").write(" ".join(place) + f" {{ranks.count(9)}}")
    """
    assert ranks.launch(program(body), 3) is None
    assert (tmp_path / "2").read_text() == "2 2 3 127.0.0.1 3"
    assert not ranks.started()
    assert (ranks.rank(), ranks.count(9)) == (0, 9)


def test_the_first_reason_is_told_and_the_others_end(tmp_path: Path) -> None:
    """Even if the others fail too, later, or hear no SIGTERM."""
    body = f"""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open({str(tmp_path)!r} + f"/{{rank}}", "w").write(str(os.getpid()))
    ranks.announce(__import__("pathlib").Path({str(tmp_path)!r}), [])
    if rank == 1:
        ranks.report("no disk", 75)
        open({str(tmp_path)!r} + "/said", "w")
        sys.exit(75)
    if rank == 0:
        while not os.path.exists({str(tmp_path)!r} + "/said"):
            time.sleep(0.01)
        ranks.report("lost the other rank", 1)
        sys.exit(1)
    time.sleep(60)
    """
    began = time.monotonic()
    assert ranks.launch(program(body), 3) == ranks.Failure(1, 75, "no disk", tmp_path)
    assert time.monotonic() - began < 20
    assert not any(alive(int((tmp_path / str(k)).read_text())) for k in range(3))


def test_a_rank_that_has_said_why_but_does_not_end_is_ended() -> None:
    body = "ranks.report('broken', 2) if rank else None\n" + WAIT
    assert ranks.launch(program(body), 2) == ranks.Failure(1, 2, "broken")


def test_a_killed_rank_is_the_first_whatever_the_others_say() -> None:
    body = """
    if rank == 0:
        ranks.report("connection closed", 1)
        sys.exit(1)
    time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    failed = ranks.launch(program(body), 2)
    assert failed
    assert (failed.rank, failed.code) == (1, -signal.SIGKILL)


def test_a_rank_that_aborts_since_another_has_failed_is_not_the_first(tmp_path: Path) -> None:
    """As NCCL does once the others are gone."""
    body = f"""
    if rank == 1:
        ranks.report("no disk", 75)
        open({str(tmp_path)!r} + "/said", "w")
        sys.exit(75)
    while not os.path.exists({str(tmp_path)!r} + "/said"):
        time.sleep(0.01)
    os.abort()
    """
    assert ranks.launch(program(body), 2) == ranks.Failure(1, 75, "no disk")


def test_one_that_aborts_by_itself_is() -> None:
    body = "time.sleep(60) if rank else os.abort()\n"
    failed = ranks.launch(program(body), 2)
    assert failed
    assert (failed.rank, failed.code) == (0, -signal.SIGABRT)


def test_the_last_words_of_a_rank_that_reports_nothing() -> None:
    body = "print('segment 7', flush=True)\nif rank: os._exit(3)\n" + WAIT
    assert ranks.launch(program(body), 2) == ranks.Failure(1, 3, "segment 7")


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_rank_outlives_its_launcher(tmp_path: Path, signum: int) -> None:
    """Nor what it has started."""
    rank = tmp_path / "rank.py"
    rank.write_text(
        HEAD
        + textwrap.dedent(
            f"""
            import subprocess
            ranks.follow_launcher()
            child = subprocess.Popen(["sleep", "60"])
            part = {str(tmp_path)!r} + f"/{{rank}}.part"
            open(part, "w").write(f"{{os.getpid()}} {{child.pid}}")
            os.rename(part, part.replace(".part", ".pids"))
            time.sleep(60)
            """
        )
    )
    launcher = subprocess.Popen(
        program(f"ranks.launch([sys.executable, {str(rank)!r}], 2)"), env=os.environ
    )
    files = [tmp_path / "0.pids", tmp_path / "1.pids"]
    end = time.monotonic() + 30
    while not all(file.exists() for file in files) and time.monotonic() < end:
        time.sleep(0.05)
    pids = [int(pid) for file in files for pid in file.read_text().split()]
    launcher.send_signal(signum)
    launcher.wait(30)
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(alive, pids))
