"""``env.questions`` and ``env.eval_questions``: what they may name, and what is drawn from it."""

import json
import warnings

import pytest

from rsipo_lightning.callbacks.rollouts import task_batch
from rsipo_lightning.cli import fit_main
from rsipo_lightning.environments.questions import FileQuestions
from rsipo_lightning.errors import ConfigError, DataError


@pytest.fixture
def write(tmp_path):
    """write(name, n) -> path of a file of n questions with ids of their own."""

    def make(name, n, first=0):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        rows = [
            {"id": f"{path.stem}{i}", "question": f"Who is {path.stem} {i}?", "answers": ["Al"]}
            for i in range(first, first + n)
        ]
        path.write_text("\n".join(map(json.dumps, rows)))
        return str(path)

    return make


def ids(tasks):
    return [task.id for task in tasks]


def test_a_file_a_folder_and_a_list(write, tmp_path):
    b, a = write("in/b.jsonl", 2), write("in/a.jsonl", 2)
    (tmp_path / "in" / "notes.txt").write_text("not read")
    other = write("other.jsonl", 1)
    folder = str(tmp_path / "in")
    for given, expected in [
        (b, ["b0", "b1"]),
        (folder, ["a0", "a1", "b0", "b1"]),
        ([b, a], ["b0", "b1", "a0", "a1"]),
        ([other, folder], ["other0", "a0", "a1", "b0", "b1"]),
    ]:
        questions = FileQuestions(given, write("held.jsonl", 1))
        assert ids(questions.tasks("train")) == ids(questions.tasks("all")) == expected
        (share,) = questions.mixture()  # without weights all tasks are alike
        assert ids(share.tasks) == expected
    assert FileQuestions(b, [other, a]).tasks("val") == FileQuestions(b, [other, a]).tasks("test")
    assert ids(FileQuestions(b, [other, a]).tasks("test")) == ["other0", "a0", "a1"]


def test_weights_say_how_often_a_path_is_drawn(write, tmp_path):
    write("in/a.jsonl", 30)
    write("in/b.jsonl", 30)
    folder, few = str(tmp_path / "in"), write("few.jsonl", 12)
    questions = FileQuestions({folder: 1, few: 3}, write("held.jsonl", 1))
    assert [(s.weight, s.name, len(s.tasks)) for s in questions.mixture()] == [
        (1, folder, 60),
        (3, few, 12),
    ]
    for update in range(30):
        batch = task_batch(questions.mixture(), 5, update, 8)
        assert sum(t.type == "few" for t in batch) == 6
        assert len(set(ids(batch))) == 8
    described = questions.describe()["files"]
    assert [len(described[key]) for key in ("questions", "eval_questions")] == [3, 1]


def test_a_held_out_tenth_is_drawn_by_no_weight(write):
    a, b = write("a.jsonl", 200), write("b.jsonl", 50)
    questions = FileQuestions({a: 1, b: 1})
    held = set(ids(questions.tasks("test")))
    assert {ident[0] for ident in held} == {"a", "b"}
    trained = [task.id for share in questions.mixture() for task in share.tasks]
    assert sorted(trained) == sorted(ids(questions.tasks("train")))
    assert not held & set(trained)
    assert len(held) + len(trained) == 250


def test_an_id_in_two_files_names_both_places(write, tmp_path):
    a = write("a.jsonl", 3)
    again = tmp_path / "again.jsonl"
    again.write_text("\n" + json.dumps({"id": "a1", "question": "?", "answers": ["x"]}))
    with pytest.raises(DataError) as caught:
        FileQuestions({a: 1, str(again): 2})
    assert f"{again}:2: id 'a1' is also at {a}:2" in str(caught.value)
    with pytest.raises(DataError, match=r"a\.jsonl:1: id 'a0' is also at .*a\.jsonl:1"):
        FileQuestions([a, a])
    FileQuestions(a, str(again))  # what is tested is another set


def test_a_question_that_trains_and_tests_is_told_and_counted(write, tmp_path):
    a, b = write("a.jsonl", 5), write("b.jsonl", 3)
    copy = tmp_path / "copy.jsonl"
    rows = [{"question": f"  who is A {i} ?", "golden_answers": ["Al"]} for i in (1, 4, 9)]
    copy.write_text("\n".join(map(json.dumps, rows)))
    with pytest.warns(UserWarning, match=r"^2 of 3 questions of val and test are also trained on"):
        FileQuestions(a, str(copy)).mixture()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FileQuestions(a, b).mixture()
        FileQuestions(a, a).tasks("all")  # an evaluation trains on nothing


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], "names no file"),
        ({}, "names no file"),
        ("", "must be a path"),
        (3, "must be a path"),
        (["a.jsonl", 3], "must be a path"),
        ([{"a.jsonl": 1}], "must be a path"),
        ({"a.jsonl": 0}, r"weight of a\.jsonl=0: must be above 0"),
        ({"a.jsonl": float("nan")}, "must be above 0"),
        ({"a.jsonl": "much"}, r"the weight of a\.jsonl must be a number, not 'much'"),
        ({"a.jsonl": True}, "must be a number"),
        ({"nq": {"jsonl": 2}}, "must be a number"),  # of env.questions.nq.jsonl=2
    ],
)
def test_values_that_make_no_sense(given, says):
    with pytest.raises(ConfigError, match=says) as caught:
        FileQuestions(given)
    assert str(caught.value).startswith("env.questions")


def test_paths_without_questions(tmp_path, write):
    with pytest.raises(DataError, match=r"holds no \*\.jsonl"):
        FileQuestions(str(tmp_path))
    with pytest.raises(ConfigError, match=r"env\.eval_questions takes no weights"):
        FileQuestions(write("a.jsonl", 3), {write("b.jsonl", 3): 2})


def test_from_the_command_line(write, tmp_path, capsys, monkeypatch):
    """A share that is too small for an update, said with the file before anything is written."""
    monkeypatch.setenv("RSIPO_CACHE", str(tmp_path / "cache"))
    a, b = write("a.jsonl", 40), write("b.jsonl", 3)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"id": "1", "title": "Al", "text": "Al is nobody."}))
    files = [f"env.corpus={corpus}", f"env.eval_questions={write('held.jsonl', 1)}"]
    mix = f"env.questions={{{a}: 1, {b}: 1}}"
    argv = ["--algo", "grpo", "--env", "search", *files, mix, f"run.dir={tmp_path / 'run'}"]
    assert fit_main(argv) == 2
    said = f"rollout.tasks=16: there are only 3 training tasks in {b}, of which 8 are drawn"
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_rows_without_an_id_in_files_of_the_same_name(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "test.jsonl").write_text('{"question": "Who?", "answers": ["Al"]}')
    with pytest.raises(DataError) as caught:
        FileQuestions([str(tmp_path / "a"), str(tmp_path / "b")])
    assert "b/test.jsonl:1: id 'test-1' is also at " in str(caught.value)
    assert "made of the file's name and the line: add a field 'id', or rename" in str(caught.value)
