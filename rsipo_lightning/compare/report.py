"""compare.md: the tables in words that claim no more than was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rsipo_lightning.compare.figures import AXES
from rsipo_lightning.compare.summary import label


def markdown(report: Mapping[str, Any], figures: Sequence[tuple[str, str]]) -> str:
    """The whole page; links are relative to the folder that it lies in."""
    return "\n".join(_page(report, figures)) + "\n"


def _page(report: Mapping[str, Any], figures: Sequence[tuple[str, str]]) -> Iterator[str]:
    rows, reference = report["results"], report["reference"]
    yield f"# Comparison on {report['env']}"
    if report["missing"]:
        yield "\n**Incomplete.** Runs without a result (the same command goes on with them):\n"
        for run in report["missing"]:
            yield f"- {run['arm']}, seed {run['seed']}: {run['why'] or 'not finished'}"
    yield (
        f"\nSuccess (%) on the same {report['test_tasks']} test tasks, each once, at temperature "
        f"{report['temperature']}, sample average; mean [95 % interval over "
        f"{len(report['seeds'])} seeds, Student's t, cut at 0 and 100]. Change: after less before. "
        "Differences are paired by seed (same training tasks, same noise) and not corrected for "
        "their number. Environment steps and CPU seconds: training alone, mean of a run; replays "
        "count, evaluations do not. MiB: largest run. All runs together, with evaluations but "
        f"without the start of their processes: {_minutes(report)} CPU minutes.\n"
    )
    yield from _table(
        ("arm", "after", "change", f"difference to {reference}", "env steps", "CPU s", "peak MiB",
         "runs"),
        (
            (
                label(row),
                _percent(row["success"]),
                _percent(row["change"], sign=True),
                _difference(row["difference"]),
                _count(row["env_steps"]),
                _count(row["cpu_s"]),
                _count(row["peak_rss_mib"]),
                _links(row["runs"]),
            )
            for row in rows
        ),
    )  # fmt: skip
    for note in report["notes"]:
        yield f"\nNote: {note}"
    yield from _arms(report)
    if report["budget"]["kind"] != "updates":
        yield from _budget(report)
    types = list(dict.fromkeys(name for row in rows for name in row["types"]))
    yield "\n## By task type\n"
    yield from _table(
        ("arm", *types, "runs"),
        (
            (label(row), *(_percent(row["types"].get(t)) for t in types), _links(row["runs"]))
            for row in rows
        ),
    )
    if figures:
        yield "\n## Figures"
    for name, caption in figures:
        yield f"\n{caption}\n\n![{caption}]({name})"
    yield from _provenance(report)


def _arms(report: Mapping[str, Any]) -> Iterator[str]:
    yield "\n## Arms\n"
    yield from _table(
        ("arm", "algorithm", "keys of its own", "rollouts of a task", "and replays, at most"),
        (
            (
                arm["name"],
                arm["algo"],
                " ".join(f"`{item}`" for item in arm["overrides"]) or "-",
                str(arm["group"]) if arm["trains"] else "- (nothing is trained)",
                str(arm["extra_episodes"]),
            )
            for arm in report["arms"]
        ),
    )
    yield f"\nKeys of all arms: {' '.join(f'`{item}`' for item in report['overrides']) or '-'}"


def _budget(report: Mapping[str, Any]) -> Iterator[str]:
    kind, value = report["budget"]["kind"], report["budget"]["value"]
    yield "\n## At the same budget\n"
    if value is None:
        yield "No run has a curve: set eval.every to at most trainer.updates."
        return
    yield (
        f"Validation success (%) at {value:,.0f} {AXES[kind]}: the largest number that every run "
        "reached, linear between two looks.\n"
    )
    yield from _table(
        ("arm", "success", f"difference to {report['reference']}", "runs"),
        (
            (r["arm"], _percent(r["success"]), _difference(r["difference"]), _links(r["runs"]))
            for r in report["at_budget"]
        ),
    )


def _provenance(report: Mapping[str, Any]) -> Iterator[str]:
    runs = [run for arm in report["arms"] for run in arm["runs"].values()]
    yield "\n## Where it comes from\n"
    yield f"    {report['command']}\n"
    commits = {_commit(run["commit"]) for run in runs}
    yield f"- code: {', '.join(sorted(commits)) or '-'}"
    if len(commits) > 1:
        yield "- **the runs are not of the same code**: compare.json says which is of which"
    if len({str(run["data"]) for run in runs}) > 1:
        yield "- **the runs did not read the same data**: compare.json says which read what"
    versions = {f"{name} {v}" for run in runs for name, v in run["versions"].items()}
    yield f"- versions: {', '.join(sorted(versions)) or '-'}"
    model = report["model"]
    yield f"- policy: {model['path']}, sha256 of its weights {model['sha256'] or 'unknown (hub)'}"
    yield "- each row's figures are those of the runs that it links; compare.json has all numbers"


def _minutes(report: Mapping[str, Any]) -> str:
    runs = (run for arm in report["arms"] for run in arm["runs"].values())
    return f"{sum(run['cpu_s_all'] for run in runs) / 60:,.1f}"


def _commit(git: Mapping[str, Any] | None) -> str:
    if not git:
        return "installed package"
    return f"{git['commit'][:12]}{' with local changes' if git['dirty'] else ''}"


def _table(head: Sequence[str], rows: Any) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _percent(value: Mapping[str, Any] | None, sign: bool = False) -> str:
    if not value:
        return "-"
    form = "+.1f" if sign else ".1f"
    mean, low, high = (value[k] and 100 * value[k] for k in ("mean", "low", "high"))
    if not sign and low is not None:  # a rate, not a difference
        low, high = max(low, 0.0), min(high, 100.0)
    interval = "" if low is None else f" [{low:{form}}, {high:{form}}]"
    return f"{mean:{form}}{interval}"


def _difference(value: Mapping[str, Any] | None) -> str:
    text = _percent(value, sign=True)
    if value and value["low"] is not None and value["low"] <= 0 <= value["high"]:
        return f"{text}, includes 0"
    return text


def _count(value: float | None) -> str:
    return "-" if not value else f"{value:,.0f}"


def _links(runs: Mapping[str, str]) -> str:
    return " ".join(f"[s{seed}]({folder}/)" for seed, folder in runs.items()) or "-"
