"""What an evaluation found: counts by task type, as JSON, as log keys and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from rsipo_lightning import keys
from rsipo_lightning.metrics import wilson


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of episodes that did not break, and of those that did."""

    n: int = 0
    successes: int = 0
    turns: int = 0
    valid_turns: int = 0
    broken: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.n + other.n,
            self.successes + other.successes,
            self.turns + other.turns,
            self.valid_turns + other.valid_turns,
            self.broken + other.broken,
        )

    @property
    def success_frac(self) -> float:
        return self.successes / self.n if self.n else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the success rate."""
        return wilson(self.successes, self.n)

    @property
    def valid_action_frac(self) -> float:
        return self.valid_turns / self.turns if self.turns else 0.0

    @property
    def turns_mean(self) -> float:
        return self.turns / self.n if self.n else 0.0


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
        return sum(self.types.values(), Tally())

    def row(self, area: str) -> dict[str, float]:
        """Log keys: ``<area>/success_frac`` and ``<area>/<env>/<type>/success_frac``."""
        row = {
            keys.by_type(area, self.env, t): c.success_frac for t, c in self.types.items() if c.n
        }
        return {f"{area}/success_frac": self.overall.success_frac, **row} if self.overall.n else row

    def to_json(self) -> dict[str, Any]:
        """Plain containers, with what a reader would otherwise compute."""
        return {
            "env": self.env,
            "split": self.split,
            "temperature": self.temperature,
            "seconds": self.seconds,
            "types": {name: asdict(tally) for name, tally in self.types.items()},
            "overall": asdict(self.overall)
            | {
                "success_frac": self.overall.success_frac,
                "interval": list(self.overall.interval),
                "valid_action_frac": self.overall.valid_action_frac,
                "turns_mean": self.overall.turns_mean,
            },
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> EvalResult:
        """The inverse of ``to_json``."""
        types = {name: Tally(**counts) for name, counts in data["types"].items()}
        return cls(data["env"], data["split"], data["temperature"], types, data["seconds"])


def table(before: EvalResult | None, after: EvalResult | None) -> Table:
    """Success before and after by task type, with 95 % intervals and numbers of episodes."""
    looks = [result for result in (before, after) if result is not None]
    split = looks[0].split if looks else "test"
    title = f"Success on the same {split} tasks" if len(looks) == 2 else f"Success on {split} tasks"
    result = Table(title=title)
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
        result.add_row(escape(task_type), *_cells(tallies))  # data may hold markup
    result.add_section()
    result.add_row("all", *_cells([look.overall for look in looks]), style="bold")
    return result


def _cells(tallies: Sequence[Tally]) -> list[str]:
    cells = ["/".join(dict.fromkeys(str(tally.n) for tally in tallies))]  # broken ones do not count
    for tally in tallies:
        low, high = tally.interval
        cells += (
            [f"{tally.success_frac:.1%}", f"{100 * low:.1f} - {100 * high:.1f}"]
            if tally.n
            else ["-", "-"]
        )
    if len(tallies) == 2:
        known = all(tally.n for tally in tallies)
        change = tallies[1].success_frac - tallies[0].success_frac
        cells.append(f"{100 * change:+.1f}" if known else "-")
    return cells
