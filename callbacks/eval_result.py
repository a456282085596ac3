"""What an evaluation found: sums by task type, as JSON, as log keys and as tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, NamedTuple

from rich.markup import escape
from rich.table import Table

from rsipo_lightning import keys
from rsipo_lightning.metrics import NORMAL_95, wilson
from rsipo_lightning.types import RolloutGroup

SUCCESS: Final = "success"
SAMPLE, MACRO = "sample average", "macro average"


class Estimate(NamedTuple):
    """A mean and its 95 % interval; (0, 0, 1) of nothing."""

    mean: float = 0.0
    low: float = 0.0
    high: float = 1.0


@dataclass(frozen=True, slots=True)
class Sums:
    """One value summed over tasks. A task's value is the mean of its episodes; in the squares,
    tasks that repeat one another have their common mean.
    """

    total: float = 0.0
    squares: float = 0.0


@dataclass(frozen=True, slots=True)
class Tally:
    """Sums over tasks. Episodes that broke are counted in ``broken`` and nowhere else."""

    n: int = 0  # episodes
    tasks: int = 0
    turns: int = 0
    valid_turns: int = 0
    broken: int = 0
    values: Mapping[str, Sums] = field(default_factory=dict)  # SUCCESS and Trajectory.measures
    repeats: int = 0  # pairs of tasks that repeat one another, in both orders

    @classmethod
    def of(cls, *groups: RolloutGroup) -> Tally:
        """Of one task, or of all that repeat one another. An episode that lacks a measure which
        others have counts as 0 of it.
        """
        tasks = [group.scored for group in groups if group.scored]
        scored = [t for task in tasks for t in task]
        broken = sum(len(group.trajectories) for group in groups) - len(scored)
        if not scored:
            return cls(broken=broken)
        values = {}
        for name in dict.fromkeys([SUCCESS, *(name for t in scored for name in t.measures)]):
            total = 0.0
            for task in tasks:
                each = [t.success if name == SUCCESS else t.measures.get(name, 0.0) for t in task]
                total += sum(each) / len(each)
            values[name] = Sums(total, total * total / len(tasks))
        turns = [turn for t in scored for turn in t.turns]
        valid, n = sum(turn.valid for turn in turns), len(tasks)
        return cls(len(scored), n, len(turns), valid, broken, values, n * (n - 1))

    def __add__(self, other: Tally) -> Tally:
        values = dict(self.values)
        for name, sums in other.values.items():
            mine = values.get(name, Sums())
            values[name] = Sums(mine.total + sums.total, mine.squares + sums.squares)
        return Tally(
            self.n + other.n,
            self.tasks + other.tasks,
            self.turns + other.turns,
            self.valid_turns + other.valid_turns,
            self.broken + other.broken,
            values,
            self.repeats + other.repeats,
        )

    @property
    def measures(self) -> tuple[str, ...]:
        """Names of the values beside success."""
        return tuple(name for name in self.values if name != SUCCESS)

    def mean(self, name: str = SUCCESS) -> float:
        """Over tasks; 0 where none has it."""
        return self.values.get(name, Sums()).total / max(self.tasks, 1)

    @property
    def single(self) -> float:
        """How many tasks would tell as much if those that repeat one another always ended alike
        (Kish's effective sample size): ``tasks`` without repeats.
        """
        return self.tasks**2 / max(self.tasks + self.repeats, 1)

    def variance(self, name: str) -> float:
        """Between tasks."""
        squares = self.values.get(name, Sums()).squares / max(self.tasks, 1)
        return max(squares - self.mean(name) ** 2, 0.0)

    def independent(self, name: str) -> float | None:
        """How many independent episodes would tell as much; None if values lie outside 0..1.

        The task is the unit, with all that repeat it: several episodes of one are as good as so
        many of different tasks as would vary like the means of the tasks do, at least ``single``
        and at most ``n``.
        """
        mean, variance = self.mean(name), self.variance(name)
        of_one = mean * (1 - mean)  # variance of a single yes or no
        if variance > of_one + 1e-9:
            return None
        least = of_one * self.single / max(self.n, 1)
        return self.single * of_one / max(variance, least) if least > 0 else self.single

    def estimate(self, name: str = SUCCESS) -> Estimate:
        """Mean over tasks with Wilson's interval of ``independent`` episodes."""
        if not self.tasks:
            return Estimate()
        mean, n = self.mean(name), self.independent(name)
        if n is None:
            return _normal(mean, mean, self.variance(name) / self.single)
        return Estimate(mean, *wilson(mean * n, n))

    @property
    def success_frac(self) -> float:
        return self.mean()

    @property
    def valid_action_frac(self) -> float:
        return self.valid_turns / self.turns if self.turns else 0.0

    @property
    def turns_mean(self) -> float:
        return self.turns / self.n if self.n else 0.0

    def to_json(self) -> dict[str, Any]:
        """The sums, and what a reader would otherwise compute."""
        success = self.estimate()
        return asdict(self) | {
            "success_frac": success.mean,
            "interval": [success.low, success.high],
            "measures": {name: self.estimate(name)._asdict() for name in self.measures},
            "valid_action_frac": self.valid_action_frac,
            "turns_mean": self.turns_mean,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Tally:
        """The inverse of ``to_json``; older files have no ``repeats``."""
        known = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        values = {name: Sums(**sums) for name, sums in data["values"].items()}
        return cls(**{**known, "values": values})


@dataclass(frozen=True, slots=True)
class EvalResult:
    """One look at one split, over all ranks."""

    env: str
    split: str
    temperature: float
    types: dict[str, Tally]  # in the suite's order; types without a task are left out
    seconds: float

    @property
    def overall(self) -> Tally:
        """All tasks together: the sample average, in which large task types count more."""
        return sum(self.types.values(), Tally())

    def macro(self, name: str = SUCCESS) -> Estimate:
        """Mean over the task types, each with the same weight.

        Its variance is the sum of the k types' p (1 - p) / n, over k squared, after 2/k successes
        and 2/k failures were added to each type, so that it stands at 0 and at 1 too (Price &
        Bonett 2004). Only the interval sees what was added.
        """
        types = [tally for tally in self.types.values() if tally.tasks]
        if not types:
            return Estimate()
        k = len(types)
        centre = variance = 0.0
        least, most = 0.0, 1.0
        for tally in types:
            p, n = tally.mean(name), tally.independent(name)
            if n is None:  # no share
                centre, variance = centre + p, variance + tally.variance(name) / tally.single
                least, most = -math.inf, math.inf
            else:
                p, n = (p * n + 2 / k) / (n + 4 / k), n + 4 / k
                centre, variance = centre + p, variance + p * (1 - p) / n
        mean = sum(tally.mean(name) for tally in types) / k
        _, low, high = _normal(mean, centre / k, variance / k**2)
        return Estimate(mean, max(low, least), min(high, most))

    def row(self, area: str) -> dict[str, float]:
        """Log keys: both averages of success, further measures, and success by task type."""
        overall = self.overall
        if not overall.tasks:
            return {}
        return {
            f"{area}/success_frac": overall.success_frac,
            keys.macro_success(area): self.macro().mean,
            **{keys.measure(area, m): overall.mean(m) for m in overall.measures},
            **{
                keys.by_type(area, self.env, name): tally.success_frac
                for name, tally in self.types.items()
                if tally.tasks
            },
        }

    def to_json(self) -> dict[str, Any]:
        """Plain containers, with what a reader would otherwise compute."""
        success = self.macro()
        return {
            "env": self.env,
            "split": self.split,
            "temperature": self.temperature,
            "seconds": self.seconds,
            "types": {name: tally.to_json() for name, tally in self.types.items()},
            "overall": self.overall.to_json(),
            "macro": {
                "success_frac": success.mean,
                "interval": [success.low, success.high],
                "measures": {m: self.macro(m)._asdict() for m in self.overall.measures},
            },
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> EvalResult:
        """The inverse of ``to_json``."""
        types = {name: Tally.from_json(tally) for name, tally in data["types"].items()}
        return cls(data["env"], data["split"], data["temperature"], types, data["seconds"])


def table(before: EvalResult | None, after: EvalResult | None) -> Table:
    """Success before and after by task type, with 95 % intervals and numbers of episodes."""
    looks = [result for result in (before, after) if result is not None]
    split = looks[0].split if looks else "test"
    title = f"Success on the same {split} tasks" if len(looks) == 2 else f"Success on {split} tasks"
    result = Table(title=title, pad_edge=False)
    result.add_column("task type")
    result.add_column("episodes", justify="right")
    names = [n for n, r in (("before", before), ("after", after)) if r is not None]
    for name in names if before else ["success"] * len(names):
        result.add_column(name, justify="right")
        result.add_column("95 %", justify="right", no_wrap=True)
    if len(looks) == 2:
        result.add_column("change", justify="right")
    for task_type in dict.fromkeys(name for look in looks for name in look.types):
        tallies = [look.types.get(task_type, Tally()) for look in looks]
        estimates = [tally.estimate() if tally.n else None for tally in tallies]
        # data may hold markup
        result.add_row(escape(task_type), _episodes(tallies), *_cells(estimates))
    result.add_section()
    tallies = [look.overall for look in looks]
    known = [tally.n > 0 for tally in tallies]
    averages: dict[str, list[Estimate]] = {
        SAMPLE: [tally.estimate() for tally in tallies],
        MACRO: [look.macro() for look in looks],
    }
    for label, means in averages.items():
        cells = _cells([e if k else None for e, k in zip(means, known, strict=True)])
        result.add_row(label, _episodes(tallies), *cells, style="bold")
    return result


def details(result: EvalResult) -> Table:
    """One look: success and each further measure in per cent with 95 % intervals, by task type."""
    overall = result.overall
    title = f"Success on {result.split} tasks, %, at temperature {result.temperature:g}"
    shown = Table(title=title, pad_edge=False)
    shown.add_column("task type")
    for name in ("tasks", SUCCESS, *overall.measures, "valid", "turns"):
        shown.add_column(escape(name.replace("_", " ")), justify="right")
    for task_type, tally in result.types.items():
        estimates = [tally.estimate(name) for name in (SUCCESS, *overall.measures)]
        shown.add_row(escape(task_type), *_looks(tally, estimates))
    shown.add_section()
    estimates = [overall.estimate(name) for name in (SUCCESS, *overall.measures)]
    shown.add_row(SAMPLE, *_looks(overall, estimates), style="bold")
    estimates = [result.macro(name) for name in (SUCCESS, *overall.measures)]
    shown.add_row(MACRO, *_looks(overall, estimates)[:-2], style="bold")
    notes = []
    if overall.n > overall.tasks:
        notes.append(f"{overall.n} episodes; the intervals take the task as the unit")
    if overall.repeats:
        notes.append("tasks that repeat one another count less in the intervals")
    if overall.broken:
        notes.append(f"{overall.broken} episodes broke and do not count")
    shown.caption = "; ".join(notes) or None
    return shown


def _normal(mean: float, centre: float, variance: float) -> Estimate:
    half = NORMAL_95 * math.sqrt(variance)
    return Estimate(mean, centre - half, centre + half)


def _looks(tally: Tally, estimates: Sequence[Estimate]) -> list[str]:
    if not tally.n:
        return ["0", *("-" for _ in estimates), "-", "-"]
    return [
        str(tally.tasks),
        *(f"{100 * e.mean:.1f} ({100 * e.low:.1f}-{100 * e.high:.1f})" for e in estimates),
        f"{100 * tally.valid_action_frac:.1f}",
        f"{tally.turns_mean:.2f}",
    ]


def _episodes(tallies: Sequence[Tally]) -> str:
    """Broken ones do not count."""
    return "/".join(dict.fromkeys(str(tally.n) for tally in tallies))


def _cells(estimates: Sequence[Estimate | None]) -> list[str]:
    cells = []
    for e in estimates:
        cells += [f"{e.mean:.1%}", f"{100 * e.low:.1f} - {100 * e.high:.1f}"] if e else ["-", "-"]
    if len(estimates) == 2:
        before, after = estimates
        cells.append(f"{100 * (after.mean - before.mean):+.1f}" if before and after else "-")
    return cells
