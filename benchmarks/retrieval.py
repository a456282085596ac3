"""Recall and time of the retrievers over real passages: the tables of the README.

    python benchmarks/retrieval.py --data ../shared/data
    python benchmarks/retrieval.py --data ../shared/data --passages 1000000 --engines disk

The second one repeats the passages with other ids and five words of each changed, to show what
grows with the corpus. Recall@3: share of questions for which one of the three first passages holds
a gold answer, title included, both in the form of exact match (SQuAD's). Each engine runs in a
process of its own with an empty cache.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from pathlib import Path
from statistics import fmean
from threading import Event, Thread
from typing import Any

from rich.console import Console
from rich.table import Table

from rsipo_lightning.environments.answers import normalise
from rsipo_lightning.environments.http_retriever import HTTPRetriever
from rsipo_lightning.environments.questions import read_questions
from rsipo_lightning.environments.retriever import Passage, Retriever, read_passages
from rsipo_lightning.environments.retrievers import LOCAL, open_corpus
from rsipo_lightning.types import Task

# of environments.md: recall of bm25s with stemming; ms a query, single and in 64
THERE = {
    "nq": 78.6,
    "triviaqa": 72.8,
    "popqa": 60.2,
    "hotpotqa": 67.8,
    "2wikimultihopqa": 53.4,
    "musique": 26.8,
    "bamboogle": 18.5,
}
THERE_MACRO = {"bm25": "54.0", "disk": "54.2", "http": "-"}
THERE_MS = {"bm25": "1.4 / 1.1", "disk": "1.8 / 1.5", "http": "+.83 / +.17"}
ENGINES = (*LOCAL, "http")
K, BATCH, SINGLE = 3, 64, 1000  # passages; queries at once; queries that are timed one by one


class Clock:
    """Wall and CPU seconds of a block; CPU of this process and of a server's."""

    def __init__(self, server: int | None = None) -> None:
        self._server = server

    def _cpu(self) -> float:
        if self._server is None:
            return time.process_time()
        fields = Path(f"/proc/{self._server}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")

    def __enter__(self) -> Clock:
        self.wall, self.cpu = -time.perf_counter(), -self._cpu()
        return self

    def __exit__(self, *error: object) -> None:
        self.wall += time.perf_counter()
        self.cpu += self._cpu()

    def ms(self, queries: int) -> list[float]:
        """[wall, CPU] milliseconds a query."""
        return [1000 * self.wall / queries, 1000 * self.cpu / queries]


@contextmanager
def peak_memory() -> Iterator[Callable[[], float]]:
    """Yields a function that gives the peak MiB so far, without mapped files."""
    peak, done = 0, Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            found = re.search(r"RssAnon:\s*(\d+)", Path("/proc/self/status").read_text())
            peak = max(peak, int(found[1]) if found else 0)

    thread = Thread(target=watch, daemon=True)
    thread.start()
    yield lambda: peak / 1024
    done.set()
    thread.join()


@contextmanager
def served(corpus: str) -> Iterator[tuple[Retriever, int]]:
    """A client without cache of an ``rsipo-retriever``, and the process id of the latter."""
    command = [sys.executable, "-m", "rsipo_lightning.retriever_server", corpus, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        url = process.stdout.readline().split()[-1]
        try:
            yield HTTPRetriever(url, 30, 0, cache=0), process.pid
        finally:
            process.kill()


def holds(passages: Iterable[Passage], golds: Sequence[str]) -> bool:
    """Whether a passage holds one of the normalised golds."""
    texts = [normalise(f"{p.title}\n{p.text}") for p in passages]
    return any(gold in text for gold in golds for text in texts)


def golds(task: Task) -> list[str]:
    """The answers that are not empty once normalised."""
    return [gold for gold in map(normalise, task.payload["answers"]) if gold]


def questions(data: Path) -> list[Task]:
    """Those of the seven files, in the order of :data:`THERE`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an answer '---' of nq is left out
        files = [read_questions(data / "search" / "questions" / f"{name}.jsonl") for name in THERE]
    return [task for tasks in files for task in tasks]


def ask(retriever: Retriever, tasks: Sequence[Task], server: int | None = None) -> dict[str, Any]:
    """Times of the questions as queries, and recall in % by data set."""
    queries = [str(task.payload["question"]) for task in tasks]
    some = random.Random(0).sample(queries, min(SINGLE, len(queries)))
    retriever.search(queries[:BATCH], K)
    with Clock(server) as single:
        for query in some:
            retriever.search([query], K)
    found: list[list[Passage]] = []
    with Clock(server) as batch:
        for i in range(0, len(queries), BATCH):
            found += retriever.search(queries[i : i + BATCH], K)
    hits: dict[str, list[bool]] = {name: [] for name in THERE}
    for task, passages in zip(tasks, found, strict=True):
        hits[task.type].append(holds(passages, golds(task)))
    return {
        "single_ms": single.ms(len(some)),
        "batch_ms": batch.ms(len(queries)),
        "hits": hits,
    }


def measure(engine: str, corpus: str, tasks: Sequence[Task]) -> dict[str, Any]:
    """Everything about one engine, in this process, with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["RSIPO_CACHE"] = cache
        if engine == "http":
            open_corpus(corpus, "bm25")
            with served(corpus) as (client, server):
                return ask(client, tasks, server)
        with peak_memory() as peak, Clock() as build:
            open_corpus(corpus, engine)
            build_mib = peak()
        with Clock() as again:
            retriever = open_corpus(corpus, engine)
        size = sum(file.stat().st_size for file in Path(cache).rglob("*") if file.is_file())
        return {
            "passages": len(retriever),
            "build_s": [build.wall, build.cpu],
            "build_peak_mib": build_mib,
            "open_s": again.wall,
            "disk_mb": size / 1e6,
            **ask(retriever, tasks),
        }


def repeat(corpus: Path, count: int, to: Path) -> Path:
    """``count`` passages: the real ones again and again, five words of each changed."""
    real = [passage for _, passage in read_passages(corpus)]
    rng = random.Random(0)
    with to.open("w", encoding="utf-8") as file:
        for i in range(count):
            passage = real[i % len(real)]
            words = passage.text.split() or [""]
            for _ in range(5):
                words[rng.randrange(len(words))] = f"w{rng.randrange(300_000)}"
            row = {"id": str(i), "title": passage.title, "text": " ".join(words)}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return to


def recall_table(done: dict[str, Any], tasks: Sequence[Task], corpus: Path) -> Table:
    """Recall of all questions, and of those whose answer is in any passage and not yes or no."""
    table = Table(title=f"Recall@{K} by answer string (%)")
    for name in ("set", "questions", *done):
        table.add_column(name, justify="right")
    table.add_column("answerable", justify="right")
    for name in done:
        table.add_column(f"{name} of these", justify="right")
    table.add_column("environments.md", justify="right")
    everything = "\n".join(normalise(f"{p.title}\n{p.text}") for _, p in read_passages(corpus))
    macro: list[list[float]] = []
    for name, there in THERE.items():
        answers = [golds(task) for task in tasks if task.type == name]
        known = [
            not {"yes", "no"}.issuperset(of) and any(gold in everything for gold in of)
            for of in answers
        ]
        hits = [one["hits"][name] for one in done.values()]
        every = [100 * fmean(of) for of in hits]
        these = [100 * fmean(compress(of, known)) for of in hits]
        macro.append([*every, 100 * fmean(known), *these])
        shown = [f"{value:.1f}" for value in macro[-1]]
        table.add_row(
            name, str(len(answers)), *shown, f"{there:.1f}", end_section=name == "bamboogle"
        )
    mean = [f"{fmean(column):.1f}" for column in zip(*macro, strict=True)]
    there_macro = ", ".join(f"{name} {THERE_MACRO[name]}" for name in done if name != "http")
    table.add_row("macro", str(len(tasks)), *mean, there_macro)
    return table


def speed_table(done: dict[str, Any]) -> Table:
    """Build and query times."""
    table = Table(title=f"Time and size (wall; CPU in brackets; queries single / in {BATCH})")
    for name in (
        "engine",
        "passages",
        "build s",
        "build MiB",
        "MB on disk",
        "open s",
        "ms a query",
    ):
        table.add_column(name, justify="right")
    table.add_column("environments.md", justify="right")
    for name, one in done.items():
        (single, single_cpu), (batch, batch_cpu) = one["single_ms"], one["batch_ms"]
        queries = f"{single:.2f} ({single_cpu:.2f}) / {batch:.2f} ({batch_cpu:.2f})"
        built = ["-"] * 5
        if "build_s" in one:
            wall, cpu = one["build_s"]
            built = [
                f"{one['passages']:,}",
                f"{wall:.1f} ({cpu:.1f})",
                f"{one['build_peak_mib']:.0f}",
                f"{one['disk_mb']:.1f}",
                f"{one['open_s']:.2f}",
            ]
        table.add_row(name, *built, queries, THERE_MS[name])
    return table


def main() -> None:
    """Measure each engine and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--passages", type=int, help="size of a corpus made of the real passages")
    parser.add_argument("--out", type=Path, default=Path("runs/retrieval.json"))
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # what a process of its own does
    parser.add_argument("--corpus", help=argparse.SUPPRESS)
    args = parser.parse_args()
    tasks = questions(args.data)
    if args.measure:
        print(json.dumps(measure(args.measure, args.corpus, tasks)))
        return
    corpus = args.data / "search" / "corpus.jsonl"
    done: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        used = repeat(corpus, args.passages, Path(folder) / "c.jsonl") if args.passages else corpus
        for engine in args.engines.split(","):
            command = [sys.executable, __file__, "--measure", engine, "--corpus", str(used)]
            result = subprocess.run(
                [*command, "--data", str(args.data)], stdout=subprocess.PIPE, check=True
            )
            done[engine] = json.loads(result.stdout)
    console = Console(width=150)
    if not args.passages:
        console.print(recall_table(done, tasks, corpus))
    console.print(speed_table(done))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(done, indent=2) + "\n")


if __name__ == "__main__":
    main()
