"""``rsipo-eval`` on several sets at once: its files, its tables, and what must change nothing."""

from __future__ import annotations

import json
import os
import resource
from collections import Counter
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from rsipo_lightning.cli import eval_main
from rsipo_lightning.environments.retriever import BM25Retriever
from rsipo_lightning.environments.search import SearchSuite
from rsipo_lightning.environments.world import World
from rsipo_lightning.errors import CheckpointError
from rsipo_lightning.eval_report import EvalReport

ROOT = Path(__file__).parents[2]
TINY = ROOT / "rsipo_lightning" / "models" / "tiny"
DATA = Path(os.environ.get("RSIPO_DATA") or ROOT.parent / "shared" / "data") / "search"
SETS = ("2wikimultihopqa", "bamboogle", "hotpotqa", "musique", "nq", "popqa", "triviaqa")
PUBLISHED = (
    "model,method,nq,triviaqa,popqa,hotpotqa,2wiki,musique,bamboogle,search_avg,source\n"
    "Small,GRPO,11.1,12.2,13.3,14.4,15.5,16.6,17.7,18.8,Table 1\n"
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions that the tiny policy can answer, as files: 125 "bamboogle" and 20 "nq"."""
    folder = tmp_path_factory.mktemp("world")
    facts = World(0)
    sources = [*["bamboogle", "nq"] * 20, *["bamboogle"] * 105]
    questions = [
        {"id": q.id, "question": q.text, "answers": list(q.answers), "source": source}
        for q, source in zip(facts.questions("test"), sources, strict=False)
    ]
    passages = [{"id": p.id, "title": p.title, "text": p.text} for p in facts.passages]
    for name, rows in (
        ("questions", questions),
        ("reversed", questions[::-1]),
        ("corpus", passages),
    ):
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "published.csv").write_text(PUBLISHED)
    return folder


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: Any) -> None:
    if "world" in request.fixturenames:
        monkeypatch.setenv("RSIPO_CACHE", str(tmp_path / "cache"))


def evaluate(world: Path, *argv: str, questions: str = "questions") -> int:
    files = [f"env.{key}={world / name}.jsonl" for key, name in
             (("questions", questions), ("corpus", "corpus"))]  # fmt: skip
    return eval_main([str(TINY), "--env", "search", "--model", "tiny", *files, *argv])


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.open(encoding="utf-8")]


def test_a_set_in_full_and_one_in_part(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    published = ["--published", str(world / "published.csv"), "--published-model", "Small"]
    assert evaluate(world, *published, "--out", str(out)) == 0
    text = capsys.readouterr().out
    assert "17.7" in text  # bamboogle, 125 of 125
    assert "20 of 3610" in text
    assert not {"11.1", "18.8"} & set(text.split())  # nq, and the average of all seven

    record = json.loads(out.read_text(encoding="utf-8"))
    episodes = rows(out.with_suffix(".jsonl"))
    assert {p.name for p in tmp_path.iterdir()} == {"result.json", "result.jsonl", "cache"}
    assert Counter(row["type"] for row in episodes) == {"bamboogle": 125, "nq": 20}
    for name, tally in record["types"].items():
        of_type = [row for row in episodes if row["type"] == name]
        assert tally["n"] == tally["tasks"] == len(of_type)
        won = sum(row["success"] for row in of_type)
        assert tally["success_frac"] == pytest.approx(won / len(of_type))
        lenient = sum(row["measures"]["lenient_match"] for row in of_type)
        assert tally["measures"]["lenient_match"]["mean"] == pytest.approx(lenient / len(of_type))
        assert tally["turns"] == sum(row["turns"] for row in of_type)
    wins = sum(row["success"] for row in episodes)
    assert 0 < wins < 145
    assert record["overall"]["success_frac"] == pytest.approx(wins / 145)
    fracs = [tally["success_frac"] for tally in record["types"].values()]
    assert record["macro"]["success_frac"] == pytest.approx(sum(fracs) / 2)
    assert all(row["action"].startswith("<answer>") for row in episodes if row["success"])

    assert record["model"] == str(TINY.resolve())
    assert record["command"].startswith("rsipo-eval ")
    assert record["data"]["files"]["questions"][0]["sha256"]
    assert record["config"]["eval"]["temperature"] == record["temperature"] == 1.0
    assert [row["published"] for row in record["published"]["rows"] if row["in_full"]] == [
        {"GRPO": 17.7}
    ]


def test_neither_batches_nor_order_change_an_episode(world: Path, tmp_path: Path) -> None:
    """Which tasks are drawn, and what the policy does in each sample, hangs on their ids alone."""
    how = ["--per-type", "9", "--samples", "2"]
    assert evaluate(world, *how, "--out", str(tmp_path / "a.json")) == 0
    more = ["rollout.live=5", "--out", str(tmp_path / "b.json")]
    assert evaluate(world, *how, *more, questions="reversed") == 0

    def keyed(name: str) -> dict[tuple[str, int], dict[str, Any]]:
        return {(row["task"], row["sample"]): row for row in rows(tmp_path / name)}

    first, second = keyed("a.jsonl"), keyed("b.jsonl")
    assert len(first) == 36
    assert list(first) != list(second)
    assert first == second
    a, b = (json.loads((tmp_path / name).read_text()) for name in ("a.json", "b.json"))
    assert a["types"] == b["types"]
    # the samples of a task are different episodes
    assert any(first[task, 0] != {**first[task, 1], "sample": 0} for task, _ in first)
    # and the first one is what a single sample would have been
    assert evaluate(world, "--per-type", "9", "--out", str(tmp_path / "c.json")) == 0
    assert keyed("c.jsonl") == {key: row for key, row in first.items() if key[1] == 0}


class TestAfterTheStart:
    """A retriever that dies, a full disk, Ctrl-C: 75 or 130, and what was played is kept."""

    @pytest.fixture
    def closed(self, monkeypatch: pytest.MonkeyPatch) -> list[SearchSuite]:
        found: list[SearchSuite] = []
        monkeypatch.setattr(SearchSuite, "close", lambda suite: found.append(suite))
        return found

    def after(self, monkeypatch: pytest.MonkeyPatch, calls: int, error: BaseException) -> None:
        """The retriever answers so many times and then raises."""
        search, done = BM25Retriever.search, iter(range(calls))

        def dies(self: BM25Retriever, queries: Any, k: int) -> Any:
            if next(done, None) is None:
                raise error
            return search(self, queries, k)

        monkeypatch.setattr(BM25Retriever, "search", dies)

    @pytest.mark.parametrize(
        ("error", "code", "says"),
        [
            (OSError("gone"), 75, "error: search: the retriever failed (OSError('gone'))"),
            (KeyboardInterrupt(), 130, "stopped by Ctrl-C"),
        ],
    )
    def test_what_was_played_is_kept(
        self, error: BaseException, code: int, says: str, closed: Any, world: Path, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        self.after(monkeypatch, 6, error)
        out = tmp_path / "r.json"
        assert evaluate(world, "rollout.live=5", "--out", str(out)) == code
        part = tmp_path / "r.jsonl.part"
        (line,) = capsys.readouterr().err.splitlines()
        assert line == f"rsipo-eval: {says}; {len(rows(part))} episodes are in {part}"
        assert len(rows(part)) >= 5
        assert not out.exists()
        assert len(closed) == 1

    def test_without_files(
        self, closed: Any, world: Path,
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        self.after(monkeypatch, 0, OSError("gone"))
        assert evaluate(world) == 75
        assert "nothing is kept; --out FILE.json keeps the episodes" in capsys.readouterr().err

    def test_a_full_disk(
        self, world: Path, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        before, add = resource.getrlimit(resource.RLIMIT_FSIZE), EvalReport.add

        def fills(self: EvalReport, groups: Any) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, before[1]))
            add(self, groups)

        monkeypatch.setattr(EvalReport, "add", fills)
        out = tmp_path / "r.json"
        try:
            assert evaluate(world, "--episodes", "3", "--out", str(out)) == 75
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert f"cannot write to {out}: File too large; make room" in capsys.readouterr().err


def test_a_result_that_cannot_be_written_leaves_the_name_free(tmp_path: Path) -> None:
    out = EvalReport(tmp_path / "r.json")
    out.start()
    blocked = tmp_path / "r.json.part"
    blocked.mkdir()
    with pytest.raises(CheckpointError):
        out.finish({})
    assert not {"r.json", "r.jsonl"} & {path.name for path in tmp_path.iterdir()}
    assert out.kept() == f"0 episodes are in {tmp_path}/r.jsonl.part"
    blocked.rmdir()
    again = EvalReport(tmp_path / "r.json")
    again.start()
    again.finish({})
    assert {path.name for path in tmp_path.iterdir()} == {"r.json", "r.jsonl"}


def test_no_tasks_are_no_result(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that was made without evaluations says 0."""
    assert evaluate(world, "eval.episodes=0", "--split", "test") == 2
    says = "eval.episodes=0: how many tasks? Give --episodes N or --per-type N"
    assert says in capsys.readouterr().err
    assert evaluate(world, "eval.episodes=0", "--split", "test", "--episodes", "2") == 0


def test_nothing_is_written_where_no_task_is_a_published_set(
    tmp_path: Path, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--published", str(world / "published.csv"), "--published-model", "Small"]
    argv += ["--out", str(tmp_path / "result.json"), "--model", "tiny"]
    assert eval_main([str(TINY), "--env", "search", *argv]) == 2
    assert "the tasks here are bridge2, bridge3, compare, single" in capsys.readouterr().err
    assert list(tmp_path.glob("result*")) == []


@pytest.mark.slow
@pytest.mark.skipif(
    not (DATA / "corpus.jsonl").is_file(), reason=f"no real search data at {DATA} (RSIPO_DATA)"
)
def test_the_seven_real_sets_in_one_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seven = tmp_path / "seven.jsonl"
    seven.write_text(
        "".join((DATA / "questions" / f"{name}.jsonl").read_text("utf-8") for name in SETS), "utf-8"
    )
    files = [f"env.questions={seven}", f"env.corpus={DATA / 'corpus.jsonl'}"]
    published = ["--published", str(tmp_path / "published.csv"), "--published-model", "Small"]
    (tmp_path / "published.csv").write_text(PUBLISHED)
    argv = [str(TINY), "--env", "search", "--model", "tiny", *files, *published]
    assert eval_main([*argv, "--per-type", "3", "--out", str(tmp_path / "r.json")]) == 0
    record = json.loads((tmp_path / "r.json").read_text())
    assert {name: tally["tasks"] for name, tally in record["types"].items()} == dict(
        zip(SETS, cycle([3]), strict=False)
    )
    text = capsys.readouterr().out
    assert "macro average" in text
    assert "No set was run in full" in text
