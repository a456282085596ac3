"""``rsipo-compare`` on runs of the tiny policy: what it writes, skips, refuses and continues."""

from __future__ import annotations

import csv
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rsipo_lightning.cli import fit_main
from rsipo_lightning.compare.cli import main
from rsipo_lightning.compare.plan import Arm, Setup, State, plan

ROOT = Path(__file__).parents[2]
KEYS = ("rollout.tasks=2", "eval.episodes=6", "eval.every=1", "eval.val_episodes=6")
ARMS = ["--env", "search", "--algos", "grpo,rsipo"]
FIGURES = {
    "success-updates.png",
    "success-env-steps.png",
    "success-cpu-s.png",
    "trust.png",
    "skill-categories.png",
    "replay-gain.png",
    "teacher.png",
}


def call(out: Path, *more: str) -> list[str]:
    return [*ARMS, "--seeds", "2", "--updates", "2", *KEYS, "--out", str(out), *more]


def started(out: Path) -> list[Path]:
    return sorted(path for path in out.rglob("run.json"))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two arms and two seeds, run in this process; then compared by the command."""
    out = tmp_path_factory.mktemp("compare") / "out"
    setup = Setup({"env": "search"}, ("trainer.updates=2", *KEYS), out)
    arms = [Arm("grpo", "grpo"), Arm("rsipo", "rsipo")]
    for runs in plan(setup, arms, [0, 1], None).values():
        for run in runs:
            assert fit_main(run.arguments(State.NEW)) == 0
    assert main(call(out, "--no-control", "--budget", "env_steps")) == 0
    return out


def report(out: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((out / "compare.json").read_text(encoding="utf-8"))
    return loaded


def test_the_numbers_are_those_of_the_runs(done: Path) -> None:
    found = report(done)
    assert (found["schema"], found["complete"], found["missing"]) == (1, True, [])
    assert (found["seeds"], found["reference"], found["test_tasks"]) == ([0, 1], "grpo", 6)
    grpo, rsipo = found["results"]
    success = {}
    for row in (grpo, rsipo):
        looks = [json.loads((done / f / "eval.json").read_text()) for f in row["runs"].values()]
        success[row["arm"]] = [look["after"]["overall"]["success_frac"] for look in looks]
        before = [look["before"]["overall"]["success_frac"] for look in looks]
        assert row["success"]["mean"] == pytest.approx(sum(success[row["arm"]]) / 2)
        gained = sum(success[row["arm"]]) / 2 - sum(before) / 2
        assert row["change"]["mean"] == pytest.approx(gained)
    assert grpo["difference"] is None
    pairs = zip(success["rsipo"], success["grpo"], strict=True)
    assert rsipo["difference"]["mean"] == pytest.approx(sum(a - b for a, b in pairs) / 2)
    assert rsipo["difference"]["n"] == 2
    one = found["arms"][0]["runs"]["0"]
    assert one["curve"]["updates"] == [1, 2]
    assert one["episodes"] == 2 * 2 * 8  # updates, tasks, rollouts
    assert one["curve"]["env_steps"][1] == one["env_steps"]
    assert 0 < one["curve"]["cpu_s"][0] < one["cpu_s"]
    two = found["arms"][1]["runs"]["0"]
    skills = (done / "rsipo" / "s0" / "skills.jsonl").read_text(encoding="utf-8").splitlines()
    replays = 4 * sum(json.loads(line)["valid"] for line in skills)
    assert two["episodes"] == 2 * 2 * 8 + replays > 2 * 2 * 8
    with (done / "rsipo" / "s0" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    steps = [[float(r[f"{a}/env_steps_count"]) for r in rows] for a in ("rollout", "replay")]
    assert two["env_steps"] == sum(map(sum, steps)) > sum(steps[0])


def test_the_budget_is_what_every_run_reached(done: Path) -> None:
    found = report(done)
    ends = [run["env_steps"] for arm in found["arms"] for run in arm["runs"].values()]
    assert found["budget"] == {"kind": "env_steps", "value": min(ends)}
    assert [row["arm"] for row in found["at_budget"]] == ["grpo", "rsipo"]
    assert "## At the same budget" in (done / "compare.md").read_text(encoding="utf-8")


def test_skills_are_sorted_by_the_evidence_rollouts(done: Path) -> None:
    run = report(done)["arms"][1]["runs"]["0"]
    lines = (done / "rsipo" / "s0" / "skills.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["gain"] is not None]
    teacher = run["skills"]["teacher"]
    assert sum(n for n, _, _ in teacher.values()) == len(rows) > 0
    better = sum(row["treated_success_frac"] > row["control_success_frac"] for row in rows)
    assert sum(b for _, b, _ in teacher.values()) == better
    gains = run["skills"]["gain"].values()
    assert sum(n * mean for n, mean in gains) == pytest.approx(sum(row["gain"] for row in rows))
    assert len(run["series"]["trust/omega_mean"]) == 2


def test_page_and_figures(done: Path) -> None:
    page = (done / "compare.md").read_text(encoding="utf-8")
    assert "| grpo |" in page
    assert "[s1](rsipo/s1/)" in page
    assert "difference to grpo" in page
    runs = [json.loads(path.read_text())["cpu_s"] for path in started(done)]
    assert f"{sum(runs) / 60:.1f} CPU minutes" in page
    rates = re.findall(r"(?<![+\d.-])\d+\.\d \[(-?[\d.]+), (-?[\d.]+)\]", page)
    assert rates
    assert all(0 <= float(end) <= 100 for rate in rates for end in rate)
    assert "with 2 seeds, fewer than 8" in page or "Note" not in page
    assert {path.name for path in done.glob("*.png")} == FIGURES
    for name in FIGURES:
        assert f"({name})" in page
        with Image.open(done / name) as image:
            assert min(image.size) > 300
            colours = image.convert("RGB").getcolors(1 << 20)
            assert colours is not None
            assert len(colours) > 20  # axes, letters, and something drawn


def test_what_is_done_is_not_run_again(
    done: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")  # any process would fail
    times = {path: path.stat().st_mtime_ns for path in started(done)}
    assert main(call(done, "--no-control")) == 0
    assert {path: path.stat().st_mtime_ns for path in started(done)} == times
    assert capsys.readouterr().out.endswith(f"report: {done}/compare.md\n")


def test_another_config_or_policy_or_data_is_refused(
    done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(done, out)
    page = (out / "compare.md").read_text(encoding="utf-8")
    assert main(call(out, "optim.lr=0.1")) == 2
    assert "run with optim.lr=0.0006, now it would be 0.1" in capsys.readouterr().err
    shutil.move(out / "started.json", out / "kept")
    (out / "started.json").write_text('{"path": "tiny", "sha256": "0"}')
    assert main(call(out, "--no-control")) == 2
    assert "begun with another policy" in capsys.readouterr().err
    shutil.move(out / "kept", out / "started.json")
    record = json.loads((out / "rsipo/s1/run.json").read_text())
    record["data"]["passages"] = 1
    (out / "rsipo/s1/run.json").write_text(json.dumps(record))
    assert main(call(out, "--no-control")) == 2
    assert "read different data" in capsys.readouterr().err
    shutil.rmtree(out / "rsipo")
    with (out / "started.json").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert main(call(out, "--no-control")) == 2
    assert "another rsipo-compare is at work in" in capsys.readouterr().err
    assert (out / "compare.md").read_text(encoding="utf-8") == page


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("eval.json", None, "FileNotFoundError"),
        ("eval.json", "{", "JSONDecodeError"),
        ("metrics.csv", "first", "metrics.csv has 1 rows, the run made 2 updates"),
        ("skills.jsonl", '{"gain": 1', "JSONDecodeError"),
        ("run.json", "[]", "run.json holds no JSON object"),
    ],
)
def test_a_damaged_run_is_said_before_any_work(
    file: str, text: str | None, says: str, done: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out = tmp_path / "out"
    shutil.copytree(done, out)
    shutil.rmtree(out / "grpo")  # to be run
    path = out / "rsipo" / "s0" / file
    if text == "first":
        text = "".join(path.read_text().splitlines(keepends=True)[:2])
    path.unlink()
    if text is not None:
        path.write_text(text)
    assert main(call(out, "--no-control")) == 2
    err = capsys.readouterr().err
    assert says in err
    assert str(path.parent) in err
    assert err.count("\n") == 1
    assert not (out / "grpo").exists()


def test_a_policy_that_was_mistyped_leaves_no_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No run was begun with it, so that the folder can be used."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    out = tmp_path / "out"
    for path in ("no-such-model", "tiny"):
        assert main([*call(out), "--model", "tiny", f"model.path={path}"]) == 75
        assert "of 6 runs failed; grpo seed 0: exit code 1" in capsys.readouterr().err
        assert json.loads((out / "started.json").read_text())["path"] == path


def test_a_full_disk_is_one_line(
    done: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers are written before the figures."""
    before = (done / "compare.json").read_text()

    def full(report: Any, folder: Path) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rsipo_lightning.compare.figures.draw", full)
    (done / "compare.json").unlink()
    assert main(call(done, "--no-control", "--budget", "env_steps")) == 75
    err = capsys.readouterr().err
    assert err.endswith("No space left on device; make room; the same command goes on\n")
    assert json.loads(before)["results"] == report(done)["results"]


def test_a_second_look_and_an_arm_without_training(done: Path) -> None:
    """Rows of ``after_skill``; an arm that trains nothing is a line, the same at every budget."""
    from rsipo_lightning.compare.figures import curves
    from rsipo_lightning.compare.summary import at_budget, label, results

    grpo, rsipo = report(done)["arms"]
    for run in rsipo["runs"].values():
        run["looks"]["after_skill"] = {**run["looks"]["after"], "success_frac": 1.0}
    rows = results([grpo, rsipo], "grpo")
    assert [label(row) for row in rows] == ["grpo", "rsipo", "rsipo (after_skill)"]
    assert rows[2]["success"]["mean"] == 1.0
    rsipo["trains"] = False
    _, at = at_budget([grpo, rsipo], "grpo", "cpu_s")
    last = [run["curve"]["success_frac"][-1] for run in rsipo["runs"].values()]
    assert at[1]["success"]["mean"] == pytest.approx(sum(last) / 2)
    lines = curves("updates")([grpo, rsipo]).axes[0].get_lines()
    assert [line.get_linestyle() for line in lines] == ["-", "--"]


@pytest.mark.slow
def test_a_failed_arm_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real processes; the control is added, and the same command runs what is missing."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    out = tmp_path / "out"
    bad = ["--arm", "bad: grpo optim.lr=1e8"]
    argv = [*call(out), *bad, "--seeds", "1", "--jobs", "2"]
    assert main(argv) == 75
    said, err = capsys.readouterr()
    assert "grpo-matched seed 0: done" in said
    assert "1 of 4 runs failed; bad seed 0: rsipo-fit: error: " in err
    assert "in update 2; lower optim.lr" in err
    found = report(out)
    assert not found["complete"]
    assert [run["arm"] for run in found["missing"]] == ["bad"]
    rows = {row["arm"]: row["success"] for row in found["results"]}
    assert rows["bad"] is None
    assert all(rows[name] for name in ("grpo", "rsipo", "grpo-matched"))
    assert "**Incomplete.**" in (out / "compare.md").read_text(encoding="utf-8")
    times = {path: path.stat().st_mtime_ns for path in started(out)}
    assert main(argv) == 75  # continues the bad run from its checkpoint
    changed = [p for p, at in times.items() if p.stat().st_mtime_ns != at]
    assert changed == [out / "bad/s0/run.json"]


@pytest.mark.slow
def test_ctrl_c_stops_the_runs_and_the_same_command_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    more = ["--algos", "grpo", "--seeds", "2", "--updates", "8", "--jobs", "1", "--out", str(out)]
    command = [sys.executable, "-m", "rsipo_lightning.compare", "--env", "search", *KEYS, *more]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = out / "grpo" / "s0" / "metrics.csv"
    deadline = time.monotonic() + 120
    while not metrics.exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err.strip() == "rsipo-compare: stopped by Ctrl-C; the same command goes on"
    assert not (out / "grpo" / "s1").exists()
    assert not report(out)["complete"]
    assert list((out / "grpo" / "s0" / "checkpoints").glob("update-*.ckpt"))
    (out / "grpo" / "s1").mkdir()  # as if killed before its first checkpoint
    again = subprocess.run(command, cwd=tmp_path, env=environ, timeout=240)
    assert again.returncode == 0
    record = json.loads((out / "grpo" / "s0" / "run.json").read_text())
    assert len(record["resumed"]) == 1
    assert (out / "grpo" / "s1-killed-1").is_dir()
    assert report(out)["complete"]
    assert len((out / "grpo" / "s0" / "metrics.csv").read_text().splitlines()) == 9
