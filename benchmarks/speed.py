"""CPU time and memory of an update: beside TRL's, as work grows, and by algorithm.

    make bench                                     # all of it, with TRL in .venv-trl
    python benchmarks/speed.py --only side --rounds 1
    python benchmarks/speed.py --quick             # everything once, in small

An update lasts from the end of one to the end of the next: rollouts, credit, training and what is
logged. CPU seconds are those of the process, all its threads (one of torch), which other work on
the machine changes least; compare within one run only. The first update warms up and is left out.
Both sides have a process of their own for each round, in turn; peak memory is that of the process.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from workload import Workload, digest, held_mib, peak_mib

HERE = Path(__file__).parent
ROOT = HERE.parent
TRL = ROOT / ".venv-trl" / "bin" / "python"
PARTS = ("side", "growth", "head", "algorithms", "alone")
SIDE = {
    "a: single turn": Workload(),
    "b: 8 turns": Workload(turns=8, action=24),
}
SMALL = Workload(tasks=2, group=4, turns=4, action=24)
GROWTH: dict[str, list[tuple[int, Workload]]] = {
    "turns": [(n, replace(SMALL, turns=n)) for n in (4, 8, 16, 32)],
    "group": [(n, replace(SMALL, group=n)) for n in (4, 8, 16)],
    "vocabulary": [(n, replace(SMALL, vocabulary=n)) for n in (8192, 151_936)],
}
LIVE = (16, 64, 256, 512)  # episodes at once, of 512
CROWD = Workload(tasks=64, group=8, turns=2, prompt=16, action=8, observation=8)
# what issue 7 asks for, as ratios
BESIDE_TRL = {"a: single turn": 0.60, "b: 8 turns": 0.45}
MEMORY = {"b: 8 turns": 0.60}
DOUBLED = {("turns", 8): 2.2, ("turns", 16): 2.2, ("turns", 32): 2.8}
DOUBLED |= {("group", 8): 2.1, ("group", 16): 2.1}
RSIPO = {"search": 1.7, "alfworld": 1.9}
HEAD_TIME, HEAD_MIB = 1.3, 400
QUICK = Workload(tasks=2, group=2, turns=2, prompt=16, action=4, observation=8)
EMBEDDED = {"search": ["--env", "search"], "alfworld": ["--env", "alfworld"]}
EMBEDDED["alfworld"] += ["--model", "tiny_alfworld"]


@dataclass
class Target:
    """A ratio that is to be at most ``limit``."""

    what: str
    value: float
    limit: float

    @property
    def said(self) -> str:
        return f"<= {self.limit:g} {'met' if self.value <= self.limit else 'missed'}"


class Report:
    """Tables on the terminal, numbers for JSON."""

    def __init__(self) -> None:
        self.console = Console(width=150)
        self.numbers: dict[str, Any] = {}
        self.targets: list[Target] = []

    def target(self, what: str, value: float, limit: float | None) -> str:
        """What stands behind a ratio: nothing where no target is known."""
        if limit is None:
            return ""
        self.targets.append(Target(what, value, limit))
        return self.targets[-1].said

    def table(self, title: str, *columns: str) -> Table:
        """An empty one; all columns but the first hold numbers."""
        made = Table(title=title)
        for i, name in enumerate(columns):
            made.add_column(name, justify="right" if i else "left")
        return made

    def write(self, out: Path) -> None:
        """JSON of all that was measured so far."""
        self.numbers["targets"] = [{**asdict(t), "met": t.value <= t.limit} for t in self.targets]
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(self.numbers, indent=2) + "\n")


# ---- one run, in a process of its own


class Clock:
    """Notes the CPU time at which the rollouts of an update begin, have ended, and the update has.

    ``with Clock() as clock: fit_main(...)`` fills ``clock.updates``.
    """

    def __init__(self) -> None:
        self.updates: list[dict[str, float]] = []
        self.prompts = ""
        self.start_mib = 0.0
        self.idle = 0.0  # share of the rows run that gave no token: their turn had ended
        self._began = self._acted = self._last = 0.0
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Clock:
        from rsipo_lightning.callbacks.replays import ReplayGains
        from rsipo_lightning.callbacks.rollouts import RolloutCollector
        from rsipo_lightning.module import PolicyModule

        self._around(RolloutCollector, "on_train_epoch_start", before=self._begin)
        self._around(ReplayGains, "on_train_epoch_start", after=self._act)
        self._around(PolicyModule, "on_train_epoch_end", after=self._end)
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def _around(
        self,
        owner: type,
        name: str,
        before: Callable[[Any], None] = lambda module: None,
        after: Callable[[Any], None] = lambda module: None,
    ) -> None:
        original = getattr(owner, name)

        def hook(*args: Any) -> None:
            before(args[-1])  # the module
            original(*args)
            after(args[-1])

        setattr(owner, name, hook)
        self._undo.callback(setattr, owner, name, original)

    def _begin(self, module: Any) -> None:
        self.start_mib = self.start_mib or held_mib()
        self._began = time.process_time()

    def _act(self, module: Any) -> None:
        self._acted = time.process_time()

    def _end(self, module: Any) -> None:
        it, now = module.iteration, time.process_time()
        played = [t for g in it.groups for t in g.trajectories]
        played += [t for r in it.replays for t in r.treated]
        said = [turn.completion for t in played for turn in t.turns]
        said += [s.completion for s in it.skills if hasattr(s, "completion")]
        if self._last:  # the first update warms up
            update = {
                "total_s": now - self._last,
                "generation_s": self._acted - self._began,
                "tokens": sum(len(c.ids) for c in said),
            }
            self.updates.append(update)
        self._last = now
        self.prompts = digest([t.turns[0].prompt_ids for t in played])
        counts = getattr(module.player.engine, "counts", {"tokens": 0, "idle": 0})
        self.idle = counts["idle"] / max(sum(counts.values()), 1)


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """One run of ``rsipo-fit`` in this process; ``spec`` as :class:`Runs` writes it."""
    from fixed import arguments

    from rsipo_lightning.cli import fit_main

    argv = list(spec.get("argv", []))
    if "work" in spec:
        argv += arguments(Workload(**spec["work"]), Path(spec["policy"]))
    with tempfile.TemporaryDirectory() as folder:
        argv += [
            *(
                "trainer.threads=1",
                f"trainer.updates={1 + spec['updates']}",
                "trainer.accelerator=cpu",
            ),
            *("eval.episodes=0", "eval.every=0", "checkpoint.every=1000", "checkpoint.keep=1"),
            *("log.progress=false", "log.groups=0", "log.best_skills=0", "log.loggers=[]"),
            *(f"run.dir={folder}/run", *spec.get("keys", [])),
        ]
        said = io.StringIO()
        with Clock() as clock, contextlib.redirect_stdout(said):
            code = fit_main(argv)
    if code:
        raise SystemExit(f"rsipo-fit {' '.join(argv)}\nended with code {code}\n{said.getvalue()}")
    return {
        "updates": clock.updates,
        "start_mib": clock.start_mib,
        "peak_mib": peak_mib(),
        "prompts": clock.prompts,
        "idle": clock.idle,
    }


def measure_head(vocabulary: int, tokens: int, full: bool) -> dict[str, float]:
    """Log-probs and entropies of ``tokens`` tokens of width 1,024 and the gradient of the former,
    the policy's way or that of the full matrix. CPU seconds (the least of three), and peak MiB
    beyond the gradient of the head's weight.
    """
    import torch

    from rsipo_lightning.head import log_probs

    torch.set_num_threads(1)
    torch.manual_seed(0)
    linear = torch.nn.Linear(1024, vocabulary, bias=False)
    hidden = torch.randn(tokens, 1024, requires_grad=True)
    target, ones = torch.randint(vocabulary, (tokens,)), torch.ones(tokens)

    def once(n: int) -> None:
        linear.weight.grad = hidden.grad = None
        if full:
            logp = torch.log_softmax(linear(hidden[:n]) / ones[:n, None], dim=-1)
            chosen = logp.gather(-1, target[:n, None])
            with torch.no_grad():
                -(logp.exp() * logp).sum(-1)
        else:
            chosen = log_probs(linear, hidden[:n], target[:n], ones[:n], False)[0]
        chosen.sum().backward()

    once(8)
    linear.weight.grad = None
    before = held_mib() + linear.weight.nbytes / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # peak memory from here on
    seconds = []
    for _ in range(3):
        began = time.process_time()
        once(tokens)
        seconds.append(time.process_time() - began)
    return {"cpu_s": min(seconds), "extra_mib": peak_mib() - before}


def answers(specs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was measured of each."""
    return [measure_head(*spec["head"]) if "head" in spec else measure(spec) for spec in specs]


class Runs:
    """Starts the processes."""

    def __init__(self, folder: Path, trl: Path, apart: bool) -> None:
        self.folder, self.python, self.apart = folder, trl, apart
        self._made: dict[int, Path] = {}

    def policy(self, vocabulary: int) -> str:
        """A folder that both sides load."""
        if vocabulary not in self._made:
            from fixed import write_policy

            made = self.folder / f"policy-{vocabulary}"
            write_policy(made, vocabulary)
            self._made[vocabulary] = made
        return str(self._made[vocabulary])

    def of(self, work: Workload, updates: int, *keys: str) -> dict[str, Any]:
        """What is to be run."""
        policy = self.policy(work.vocabulary)
        return {"work": asdict(work), "policy": policy, "updates": updates, "keys": keys}

    def ours(self, *specs: dict[str, Any], apart: bool = False) -> list[dict[str, Any]]:
        """Each run in turn, all in one process: one of their own if ``apart``, or if all are."""
        if not (apart or self.apart):
            return answers(specs)
        command = [sys.executable, __file__, "--measure"]
        done: list[dict[str, Any]] = self._run(command, list(specs))
        return done

    def trl(self, spec: dict[str, Any]) -> dict[str, Any]:
        """The same work in TRL's process."""
        done: dict[str, Any] = self._run([str(self.python), str(HERE / "trl_grpo.py")], spec)
        return done

    def _run(self, command: list[str], spec: Any) -> Any:
        asked, answer = self.folder / "spec.json", self.folder / "out.json"
        asked.write_text(json.dumps(spec))
        path = os.pathsep.join([str(ROOT), str(self.folder / "site")])
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
        env.pop("ALFWORLD_DATA", None)  # generated games
        done = subprocess.run(
            [*command, str(asked), str(answer)], env=env, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        return json.loads(answer.read_text())


def spread(updates: Sequence[dict[str, float]], name: str) -> str:
    """Median and range."""
    values = [update[name] for update in updates]
    return f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def middle(updates: Sequence[dict[str, float]], name: str = "total_s") -> float:
    """Median alone."""
    return median(update[name] for update in updates)


# ---- the parts


def side(report: Report, runs: Runs, quick: bool, rounds: int) -> None:
    """This trainer and TRL in turn, on the same prompts and token counts."""
    works = {"quick": QUICK} if quick else SIDE
    updates, there = 1 if quick else 2, runs.python.exists()
    if not there:
        report.console.print(f"TRL is left out: there is no {runs.python}; make bench makes it")
    shown = report.table(
        "An update: CPU s, median (range)",
        *("", "update", "generation", "training", "tokens/CPU s", "peak MiB", "of that training"),
    )
    verdicts = report.table("Ours / TRL", "", "CPU", "target", "peak memory", "target")
    for name, work in works.items():
        spec, sides = runs.of(work, updates), {}  # type: dict[str, Any], dict[str, list[Any]]
        for _ in range(rounds):
            sides.setdefault("ours", []).extend(runs.ours(spec, apart=True))
            if there:
                sides.setdefault("TRL", []).append(runs.trl(spec))
        for who, done in sides.items():
            every = [update for one in done for update in one["updates"]]
            for update in every:
                update["training_s"] = update["total_s"] - update["generation_s"]
                assert update["tokens"] == work.policy_tokens, (who, update, work.policy_tokens)
            peak = max(one["peak_mib"] for one in done)
            own = max(one["peak_mib"] - one["start_mib"] for one in done)
            times = [spread(every, f"{key}_s") for key in ("total", "generation", "training")]
            rate = work.policy_tokens / middle(every)
            shown.add_row(f"{name}, {who}", *times, f"{rate:.0f}", f"{peak:.0f}", f"{own:.0f}")
        if there:
            prompts = {one["prompts"] for done in sides.values() for one in done}
            assert len(prompts) == 1, "the two sides had other prompts"
            cpu, mib = (
                ours / theirs
                for ours, theirs in (
                    [
                        middle([u for one in done for u in one["updates"]])
                        for done in sides.values()
                    ],
                    [max(one["peak_mib"] for one in done) for done in sides.values()],
                )
            )
            first = report.target(f"{name}: CPU of TRL's", cpu, BESIDE_TRL.get(name))
            second = report.target(f"{name}: memory of TRL's", mib, MEMORY.get(name))
            verdicts.add_row(name, f"{cpu:.2f}", first, f"{mib:.2f}", second)
        report.numbers.setdefault("side", {})[name] = {"work": asdict(work), **sides}
    report.console.print(shown)
    if there:
        report.console.print(verdicts)


def growth(report: Report, runs: Runs, quick: bool, rounds: int) -> None:
    """Turns, group size, vocabulary, and live episodes."""
    axes = GROWTH
    crowd, live, updates = CROWD, LIVE, 2
    if quick:
        axes = {"turns": [(n, replace(QUICK, turns=n)) for n in (2, 4)]}
        crowd, live, updates = QUICK, (2, 4), 1
    title = "CPU s of an update as work grows, median (range)"
    shown = report.table(title, "", "tokens a row", "update", "generation", "ratio", "target")
    for axis, points in axes.items():
        done = runs.ours(*(runs.of(work, updates) for _, work in points))
        before = 0.0
        for (n, work), one in zip(points, done, strict=True):
            now = middle(one["updates"])
            limit = DOUBLED.get((axis, n))
            said = report.target(f"{axis} doubled to {n}", now / before, limit) if before else ""
            ratio = f"{now / before:.2f}" if before else ""
            times = [spread(one["updates"], key) for key in ("total_s", "generation_s")]
            shown.add_row(f"{axis} {n:,}", str(work.row), *times, ratio, said)
            before = now
        report.numbers.setdefault("growth", {})[axis] = dict(
            zip([str(n) for n, _ in points], done, strict=True)
        )
    report.console.print(shown)
    done = runs.ours(*(runs.of(crowd, 1, f"rollout.live={n}") for n in live))
    episodes = f"{crowd.episodes} episodes of {crowd.turns} turns"
    shown = report.table(f"Rollouts of {episodes}", "live", "CPU s", "tokens/CPU s", "update")
    for n, one in zip(live, done, strict=True):
        acting = middle(one["updates"], "generation_s")
        times = [spread(one["updates"], key) for key in ("generation_s", "total_s")]
        shown.add_row(str(n), times[0], f"{crowd.policy_tokens / acting:.0f}", times[1])
    report.console.print(shown)
    report.numbers["live"] = dict(zip(map(str, live), done, strict=True))


def head(report: Report, runs: Runs, quick: bool, rounds: int) -> None:
    """Log-probs of trained tokens with a large vocabulary against the full matrix."""
    vocabulary, tokens = (8192, 64) if quick else (151_936, 1024)
    ways = {"the full matrix": True, "the policy's": False}
    done = {name: runs.ours({"head": [vocabulary, tokens, full]})[0] for name, full in ways.items()}
    title = f"Log-probs of {tokens:,} tokens, vocabulary {vocabulary:,}, and their gradient"
    shown = report.table(title, "", "CPU s", "of the full matrix", "target", "extra MiB", "target")
    full = done["the full matrix"]["cpu_s"]
    for name, one in done.items():
        own = name != "the full matrix" and not quick
        time_, memory = (
            report.target(f"log-probs: {what}", value, limit) if own else ""
            for what, value, limit in (
                ("time of the full matrix", one["cpu_s"] / full, HEAD_TIME),
                ("extra MiB", one["extra_mib"], HEAD_MIB),
            )
        )
        ratio = f"{one['cpu_s'] / full:.2f}"
        extra = f"{one['extra_mib']:.0f}"
        shown.add_row(name, f"{one['cpu_s']:.2f}", ratio, time_, extra, memory)
    report.console.print(shown)
    report.numbers["head"] = done


def algorithms(report: Report, runs: Runs, quick: bool, rounds: int) -> None:
    """Each algorithm that trains, KL on in all, on the embedded worlds."""
    from dataclasses import fields

    from rsipo_lightning import registry
    from rsipo_lightning.testing import make_algorithm

    trained = [n for n in registry.names("algorithms") if make_algorithm(n).streams]
    others = {"search": sorted({*trained} - {"grpo"}), "alfworld": ["rsipo"]}
    updates, small = 3, []
    if quick:
        others = {"search": ["rsipo"]}
        updates, small = 1, ["rollout.tasks=2", "rollout.group=4"]
    for world, names in others.items():
        specs = []
        for name in ("grpo", *names):
            known = {f.name for f in fields(registry.load("algorithms", name).Config)}
            keys = [*small, *(["algo.kl=0.01"] if "kl" in known else [])]
            argv = [*EMBEDDED[world], "--algo", name]
            specs.append({"argv": argv, "keys": keys, "updates": updates})
        done = dict(zip(("grpo", *names), runs.ours(*specs), strict=True))
        shown = report.table(
            f"An update on {world}: CPU s, median (range)",
            *("", "update", "generation", "tokens", "idle rows %", "of GRPO's", "target"),
        )
        base = middle(done["grpo"]["updates"])
        for name, one in done.items():
            times = [spread(one["updates"], key) for key in ("total_s", "generation_s")]
            ratio = middle(one["updates"]) / base
            limit = RSIPO[world] if name == "rsipo" and not quick else None
            said = report.target(f"rsipo / grpo on {world}", ratio, limit)
            tokens = f"{middle(one['updates'], 'tokens'):,.0f}"
            idle = f"{100 * one['idle']:.1f}"
            shown.add_row(name, *times, tokens, idle, f"{ratio:.2f}", said)
        report.console.print(shown)
        report.numbers.setdefault("algorithms", {})[world] = done


def alone(report: Report, runs: Runs, quick: bool, rounds: int) -> None:
    """Engines of ALFWorld and retrievers, by their own benchmarks."""
    data = Path(os.environ.get("RSIPO_DATA") or ROOT.parent / "shared" / "data")
    games = data / "alfworld" / "games.jsonl.xz"
    asked = {
        "alfworld_engines": (games, ["--data", str(games), "--games", "16", "--repeats", "10"]),
        "retrieval": (data / "search" / "corpus.jsonl", ["--data", str(data), "--engines", "bm25"]),
    }
    if quick:
        return
    for name, (needed, keys) in asked.items():
        if not needed.is_file():
            report.console.print(f"{name} is left out: there is no {needed}")
            continue
        out = runs.folder / f"{name}.json"
        command = [sys.executable, str(HERE / f"{name}.py"), *keys, "--out", str(out)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, check=True, env=env)
        numbers = json.loads(out.read_text())
        for one in numbers.values():
            one.pop("hits", None)  # of each question
        report.numbers[name] = numbers


def machine() -> dict[str, Any]:
    """Where it was measured."""
    from importlib.metadata import version

    packages = ("torch", "transformers", "lightning")
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        **{name: version(name) for name in packages},
    }


@contextlib.contextmanager
def workplace(trl: Path, apart: bool) -> Iterator[Runs]:
    """A folder with the environment's entry point, seen by this process too."""
    from fixed import register

    from rsipo_lightning.build import quiet

    quiet()
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        register(site)
        sys.path.append(str(site))
        yield Runs(Path(folder), trl, apart)
        sys.path.remove(str(site))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the parts that are asked for, print tables, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PARTS), help="of: %(default)s")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each side (2)")
    parser.add_argument(
        "--quick", action="store_true", help="small works, whose times mean nothing"
    )
    parser.add_argument("--trl", type=Path, default=TRL, help="python that has TRL (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/speed.json"))
    parser.add_argument("--measure", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.measure:  # what a process of its own does
        asked, answer = args.measure
        answer.write_text(json.dumps(answers(json.loads(asked.read_text()))))
        return
    chosen = args.only.split(",")
    if unknown := sorted({*chosen} - {*PARTS}):
        parser.error(f"--only {unknown[0]}: choose from {', '.join(PARTS)}")
    report = Report()
    report.numbers["machine"] = machine()
    parts = dict(zip(PARTS, (side, growth, head, algorithms, alone), strict=True))
    with workplace(args.trl, apart=not args.quick) as runs:
        for name in chosen:
            parts[name](report, runs, args.quick, 1 if args.quick else args.rounds)
            report.write(args.out)
    report.console.print(*(f"{t.what}: {t.value:.2f} {t.said}" for t in report.targets), sep="\n")
    report.console.print(f"numbers: {args.out}")


if __name__ == "__main__":
    main()
