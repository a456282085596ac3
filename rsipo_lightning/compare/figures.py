"""The figures, drawn from what compare.json holds. Matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isnan, nan
from pathlib import Path
from statistics import fmean
from typing import Any

from rsipo_lightning import keys
from rsipo_lightning.compare.statistics import estimate, moving_average

AXES = {
    "updates": "updates",
    "env_steps": "environment steps, replays included",
    "cpu_s": "CPU seconds of rollouts, replays and updates",
}
WIDTH = 10  # updates of the moving average
Arms = Sequence[Mapping[str, Any]]


def draw(report: Mapping[str, Any], folder: Path) -> list[tuple[str, str]]:
    """Write the PNG files for which there is data; (file name, what it shows) of each. Others of
    these names are removed.
    """
    import matplotlib

    matplotlib.use("Agg")
    done = []
    for name, (caption, painter) in FIGURES.items():
        figure = painter(report["arms"])
        if figure is not None:
            figure.savefig(folder / name, dpi=120)
            done.append((name, caption))
        else:
            (folder / name).unlink(missing_ok=True)  # of other arms
    return done


def curves(kind: str) -> Callable[[Arms], Any]:
    """Success on the validation tasks: mean over seeds with its 95 % band."""

    def paint(arms: Arms) -> Any:
        if not any(_points(arm, kind) for arm in arms):
            return None
        figure, (axis,) = _panels(1)
        for arm, colour in _coloured(arms):
            points = _points(arm, kind)
            if not points:
                continue
            x, y = [p[0] for p in points], [100 * p[1].mean for p in points]
            if not arm["trains"]:  # its only look
                axis.axhline(y[-1], color=colour, linestyle="--", label=arm["name"])
                continue
            axis.plot(x, y, color=colour, marker="o", markersize=3, label=arm["name"])
            if all(p[1].low is not None for p in points):
                low, high = [100 * p[1].low for p in points], [100 * p[1].high for p in points]
                axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        axis.set_xlabel(AXES[kind])
        axis.xaxis.get_major_locator().set_params(integer=kind == "updates")
        axis.set_ylabel("success on validation tasks, %")
        axis.set_ylim(0, 100)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
        return figure

    return paint


def trust(arms: Arms) -> Any:
    """Trust over updates: moving average of each arm, mean over seeds, and its 95 % band."""
    having = [(arm, colour) for arm, colour in _coloured(arms) if _series(arm, keys.TRUST)]
    if not having:
        return None
    figure, (axis,) = _panels(1)
    for arm, colour in having:
        raw = _series(arm, keys.TRUST)
        smooth = [moving_average(series, WIDTH) for series in raw]
        _line(axis, raw, color=colour, alpha=0.25, linewidth=0.8)
        mean = _line(axis, smooth, color=colour, label=arm["name"])
        x = [i for i, found in enumerate(mean, start=1) if found and found.low is not None]
        low, high = [mean[i - 1].low for i in x], [mean[i - 1].high for i in x]
        axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    axis.axhline(1, color="grey", linewidth=0.8)
    axis.set_xlabel("updates")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_ylabel("trust (1: as without execution check)")
    axis.legend(fontsize=8)
    return figure


def categories(arms: Arms) -> Any:
    """Shares of the skill categories over updates, a panel per arm."""
    having = [arm for arm in arms if _series(arm, keys.category(keys.CATEGORIES[0]))]
    if not having:
        return None
    figure, axes = _panels(len(having))
    for axis, arm in zip(axes, having, strict=True):
        for name in keys.CATEGORIES:
            percent = [[100 * v for v in s] for s in _series(arm, keys.category(name))]
            _line(axis, [moving_average(s, WIDTH) for s in percent], label=name)
        axis.set_title(arm["name"], fontsize=10)
        axis.set_xlabel("updates")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set_ylim(0, 100)
    axes[0].set_ylabel("share of valid skills, %")
    axes[0].legend(fontsize=8)
    return figure


def gains(arms: Arms) -> Any:
    """Mean replay gain of each category: mean over seeds and 95 % interval, with skill counts."""
    having = [arm for arm in arms if any(run["skills"]["gain"] for run in arm["runs"].values())]
    if not having:
        return None
    figure, axes = _panels(len(having))
    for axis, arm in zip(axes, having, strict=True):
        tables = [run["skills"]["gain"] for run in arm["runs"].values()]
        names = [name for name in keys.CATEGORIES if any(name in table for table in tables)]
        for place, name in enumerate(names):
            entries = [table[name] for table in tables if name in table]
            found = estimate([mean for _, mean in entries])
            assert found is not None
            error = None if found.high is None else found.high - found.mean
            axis.bar(place, found.mean, yerr=error, capsize=3)
        counts = [sum(table[n][0] for table in tables if n in table) for n in names]
        labels = [f"{n}\n{count} skills" for n, count in zip(names, counts, strict=True)]
        axis.set_xticks(range(len(names)), labels, fontsize=8)
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set_title(arm["name"], fontsize=10)
    axes[0].set_ylabel("replay gain")
    return figure


def teacher(arms: Arms) -> Any:
    """How often replays succeed more, or less, often than controls; all seeds together."""
    having = [arm for arm in arms if any(run["skills"]["teacher"] for run in arm["runs"].values())]
    if not having:
        return None
    figure, axes = _panels(len(having))
    for axis, arm in zip(axes, having, strict=True):
        total: dict[int, list[int]] = {}
        for run in arm["runs"].values():
            for bucket, counts in run["skills"]["teacher"].items():
                sums = total.setdefault(int(bucket), [0, 0, 0])
                total[int(bucket)] = [a + b for a, b in zip(sums, counts, strict=True)]
        buckets = sorted(total)
        for shift, index, name in ((-0.2, 1, "teacher better"), (0.2, 2, "teacher worse")):
            shares = [100 * total[b][index] / total[b][0] for b in buckets]
            axis.bar([b + shift for b in buckets], shares, width=0.4, label=name)
        axis.set_xticks(buckets, [f"{b}\nn={total[b][0]}" for b in buckets], fontsize=8)
        axis.set_xlabel("student successes (evidence rollouts)")
        axis.set_title(arm["name"], fontsize=10)
    axes[0].set_ylabel("tasks, %")
    axes[0].legend(fontsize=8)
    return figure


FIGURES: dict[str, tuple[str, Callable[[Arms], Any]]] = {
    "success-updates.png": ("Validation success against updates", curves("updates")),
    "success-env-steps.png": ("Validation success against environment steps", curves("env_steps")),
    "success-cpu-s.png": ("Validation success against CPU seconds", curves("cpu_s")),
    "trust.png": (f"Trust ω, moving average of {WIDTH} updates", trust),
    "skill-categories.png": (f"Skill categories, moving average of {WIDTH} updates", categories),
    "replay-gain.png": ("Replay gain by skill category, all updates", gains),
    "teacher.png": (
        "Success of replays against that of controls, by successes of the evidence rollouts",
        teacher,
    ),
}


def _panels(n: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 if n == 1 else 3.6 * n + 0.6, 4.2), layout="constrained")
    return figure, list(figure.subplots(1, n, sharey=True, squeeze=False)[0])


def _coloured(arms: Arms) -> Iterator[tuple[Mapping[str, Any], Any]]:
    """An arm has the same colour in each figure."""
    from matplotlib import colormaps

    colours = colormaps["tab10" if len(arms) <= 10 else "tab20"].colors  # type: ignore[attr-defined]
    for i, arm in enumerate(arms):
        yield arm, colours[i % len(colours)]


def _points(arm: Mapping[str, Any], kind: str) -> list[tuple[float, Any]]:
    """(mean x, Estimate of y) of each look: seeds look after the same updates."""
    all_curves = [run["curve"] for run in arm["runs"].values()]
    found = []
    for update in sorted({u for curve in all_curves for u in curve["updates"]}):
        having = [(c, c["updates"].index(update)) for c in all_curves if update in c["updates"]]
        x = fmean(curve[kind][i] for curve, i in having)
        found.append((x, estimate([curve["success_frac"][i] for curve, i in having])))
    return found


def _series(arm: Mapping[str, Any], key: str) -> list[list[float]]:
    """One list per seed, one value per update; where there was none (an update without skills), the
    one before, NaN before the first.
    """
    found = []
    for run in arm["runs"].values():
        filled: list[float] = []
        for value in run["series"].get(key, []):
            filled.append((filled or [nan])[-1] if value is None else value)
        if filled:
            found.append(filled)
    return found


def _line(axis: Any, series: Sequence[Sequence[float]], **style: Any) -> list[Any]:
    """Mean over the seeds that have a value; returns the Estimate of each update, None of none."""
    found = [estimate([v for v in values if not isnan(v)]) for values in zip(*series, strict=True)]
    axis.plot(range(1, len(found) + 1), [f.mean if f else nan for f in found], **style)
    return found
