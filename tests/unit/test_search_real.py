"""The real questions and passages of RSIPO_DATA (default ../shared/data beside the repository)."""

import os
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from rsipo_lightning.callbacks.rollouts import task_batch
from rsipo_lightning.environments.questions import FileQuestions, read_questions
from rsipo_lightning.environments.retriever import BM25Retriever
from rsipo_lightning.environments.search import SearchConfig, SearchSuite
from rsipo_lightning.types import Stop

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("RSIPO_DATA") or ROOT.parent / "shared" / "data") / "search"

pytestmark = pytest.mark.skipif(
    not (DATA / "corpus.jsonl").is_file(), reason=f"no real search data at {DATA} (RSIPO_DATA)"
)


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RSIPO_CACHE", str(tmp_path_factory.mktemp("cache")))
        questions = str(DATA / "questions" / "hotpotqa.jsonl")
        yield SearchSuite(SearchConfig(questions=questions, corpus=str(DATA / "corpus.jsonl")), 0)


def test_counts(suite):
    described = suite.describe()
    assert described["passages"] == 53_698
    rows = len((DATA / "questions" / "hotpotqa.jsonl").read_text("utf-8").splitlines())
    assert rows > 500
    assert described["tasks"]["train"] + described["tasks"]["test"] == rows
    assert 0.07 < described["tasks"]["test"] / rows < 0.13
    assert suite.types == ("hotpotqa",)


def test_every_question_file_loads():
    for path in sorted((DATA / "questions").glob("*.jsonl")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a gold '---' of nq is left out
            tasks = read_questions(path)
        rows = len(path.read_text("utf-8").splitlines())
        assert rows - 2 <= len(tasks) <= rows
        assert {task.type for task in tasks} == {path.stem}


def test_index_reloads_fast_and_memory_mapped(suite):
    start = time.process_time()
    again = BM25Retriever.from_file(DATA / "corpus.jsonl")
    assert time.process_time() - start < 2.0
    assert isinstance(again._index.scores["data"], np.memmap)
    assert again.search(["Jeff Porcaro drummer"], 3) == suite._retriever.search(
        ["Jeff Porcaro drummer"], 3
    )


def test_retrieval_is_sensible(suite):
    assert suite.retrieve(["Jeff Porcaro drummer of Toto"])[0][0].title == "Jeff Porcaro"
    tasks = suite.tasks("train")[:200]
    start = time.process_time()
    found = suite.retrieve([task.payload["question"] for task in tasks])
    assert (time.process_time() - start) / len(tasks) < 0.05
    hits = sum(
        any(gold.lower() in passage.text.lower() for passage in passages for gold in answers)
        for passages, answers in (
            (f, t.payload["answers"]) for f, t in zip(found, tasks, strict=True)
        )
    )
    assert hits / len(tasks) > 0.5


def test_an_episode(suite):
    task = next(t for t in suite.tasks("test") if t.payload["answers"][0] not in ("yes", "no"))
    episode = suite.make()
    episode.reset(task)
    result = episode.step(f"<think>x</think><search>{task.payload['question']}</search>")
    assert result.observation.count("\nDoc ") == 3
    assert len(result.observation) < 3 * 1200
    end = episode.step(f"<think>x</think><answer>{task.payload['answers'][0]}</answer>")
    assert (end.success, end.stop) == (True, Stop.DONE)


def test_a_mix_of_real_files(suite):
    """The paper trains on NQ and HotpotQA, here in equal parts although the files are not."""
    folder = DATA / "questions"
    mix = {str(folder / "nq.jsonl"): 1, str(folder / "hotpotqa.jsonl"): 1}
    with pytest.warns(UserWarning, match="left out"):
        questions = FileQuestions(mix, str(folder / "bamboogle.jsonl"))
    assert questions.types == ("bamboogle", "hotpotqa", "nq")
    sizes = [len(share.tasks) for share in questions.mixture()]
    assert sizes[0] > 2 * sizes[1]
    for update in range(50):
        batch = task_batch(questions.mixture(), 0, update, 16)
        assert sorted(task.type for task in batch) == ["hotpotqa"] * 8 + ["nq"] * 8
        assert len({task.id for task in batch}) == 16


def test_the_folder_has_no_id_twice_and_one_question_in_two_sets():
    folder = DATA / "questions"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        questions = FileQuestions(str(folder))
    assert len(questions.types) == 7
    assert len(questions.tasks("all")) > 6_000
    two = FileQuestions(str(folder / "popqa.jsonl"), str(folder / "triviaqa.jsonl"))
    with pytest.warns(UserWarning, match="^1 of 832 questions of val and test are also trained on"):
        two.mixture()
