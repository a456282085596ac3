"""Success before and after training on the built-in world, over seeds: the table of the README.

python benchmarks/learning.py --algos grpo,rsipo --seeds 3
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev

from rich.console import Console
from rich.table import Table

T_975 = (0, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # by degrees of freedom


def interval(values: list[float]) -> str:
    """Mean and 95 % interval over seeds."""
    mean = fmean(values)
    if len(values) < 2:
        return f"{mean:.1f}"
    half = T_975[len(values) - 1] * stdev(values) / len(values) ** 0.5
    return f"{mean:.1f} [{mean - half:.1f}, {mean + half:.1f}]"


def run(algo: str, seed: int, root: Path, more: list[str]) -> dict[str, float]:
    """One run in a process of its own, or what it left if it is already there."""
    folder = root / f"{algo}-s{seed}"
    if not (folder / "policy").exists():
        command = [sys.executable, "-m", "rsipo_lightning", "--algo", algo, "--env", "search"]
        subprocess.run([*command, f"seed={seed}", f"run.dir={folder}", *more], check=True)
    record = json.loads((folder / "run.json").read_text())
    result = record["result"]
    return {
        "before": 100 * result["before"]["overall"]["success_frac"],
        "after": 100 * result["after"]["overall"]["success_frac"],
        "cpu_s": record["cpu_s"],
        "mib": result["peak_rss_mib"],
    }


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algos", default="grpo,rsipo")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--root", type=Path, default=Path("runs/learning"))
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    table = Table(
        title=f"held-out success (%), {args.seeds} seeds, mean [95 % interval over seeds]"
    )
    for name in ("algorithm", "before", "after", "change", "CPU s a run", "peak MiB"):
        table.add_column(name)
    for algo in args.algos.split(","):
        done = [run(algo, seed, args.root, args.overrides) for seed in range(args.seeds)]
        table.add_row(
            algo,
            interval([d["before"] for d in done]),
            interval([d["after"] for d in done]),
            interval([d["after"] - d["before"] for d in done]),
            f"{max(d['cpu_s'] for d in done):.0f} (max)",
            f"{max(d['mib'] for d in done):.0f} (max)",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
