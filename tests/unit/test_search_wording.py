"""Templates of the search environment: the shipped ones and a user's file."""

from pathlib import Path

import pytest

from rsipo_lightning.environments.search import SearchConfig, SearchSuite
from rsipo_lightning.environments.templates import STYLES
from rsipo_lightning.environments.wording import Wording
from rsipo_lightning.errors import ConfigError
from rsipo_lightning.types import Task

TASK = Task("t", "search", "single", {"question": "Who {leads} Oz?", "answers": ["Ada"]})


def _file(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_parts_of_a_file_replace_those_of_the_style_and_no_others(tmp_path):
    file = _file(
        tmp_path,
        "opening: 'Your question: {question} In {max_steps} turns, please.'\n"
        "next: '{observation} ({taken}/{max_steps})'\n"
        "invalid: 'Why {why}? {{sic}}'\n"
        "last: over {{sic}}\n"
        "empty: nothing {{sic}}\n",
    )
    suite = SearchSuite(SearchConfig(prompt="full", template=file, max_steps=2), 0)
    episode = suite.make()
    # no thought is asked for, so none is needed; braces of data are data
    assert episode.reset(TASK) == "Your question: Who {leads} Oz? In 2 turns, please."
    assert episode.step("Ada").observation == "Why no complete action? {sic} (1/2)"
    last = episode.step("<search>Oz</search>")
    assert (last.observation, last.valid) == ("over {sic}", True)
    episode.reset(TASK)
    assert "\nDoc 1(Title: " in episode.step("<search>Amber Fountain</search>").observation
    episode.reset(TASK)
    assert "\nnothing {sic}\n" in episode.step("<search>xylophone</search>").observation
    assert Wording.read("full", file).window == Wording.read("full").window
    described = suite.describe()["template"]
    assert (described["path"], len(described["sha256"])) == (file, 64)


def test_search_r1_shows_the_block_alone_and_a_corrective_sentence():
    for style in STYLES:
        suite = SearchSuite(SearchConfig(prompt=style, template="search_r1"), 0)
        episode = suite.make()
        assert episode.reset(TASK) == SearchSuite(SearchConfig(prompt=style), 0).make().reset(TASK)
        thought = "<think>x</think>" if style == "full" else ""
        seen = episode.step(f"{thought}<search>xylophone</search>").observation
        assert seen == "\n\n<information>\nNo passage was found.\n</information>\n\n"
        wrong = episode.step("Ada").observation
        assert wrong.startswith("\n\nThat was not a valid action (no complete action).")
        assert "<search>query</search>" in wrong


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("openning: x", "no part 'openning'; did you mean 'opening'?"),
        ("opening: 3", "part 'opening' must be text"),
        ("opening: 'Your question: what?'", "part 'opening' lacks {question}"),
        (
            "opening: 'Your question: {question} {history}'",
            "unknown placeholder {history} (h",
        ),
        ("opening: 'Your question: {question.x}'", "unknown placeholder {question.x}"),
        ("opening: 'Your question: {question!r}'", "unknown placeholder {question!r}"),
        ("opening: 'Your question: {question:>9}'", "unknown placeholder {question:>9}"),
        ("opening: 'Your question: {question} {}'", "unknown placeholder {}"),
        ("opening: 'Your question: {question} {'", "part 'opening' is no template"),
        ("opening: 'Asked: {question}'", "part 'opening' needs the line 'Your question: {q"),
        ('opening: "Your question:\\n{question}"', "part 'opening' needs the line"),
        ('opening: "Your task is: answer.\\nYour question: {question}"', "before all that looks"),
        ('window: "{history}\\nYour question: {question}"', "part 'window' needs the line"),
        ("window: 'Your question: {question}'", "part 'window' lacks {history}"),
        ("step: '{action}'", "part 'step' lacks {observation}"),
        ("next: 'more'", "part 'next' lacks {observation}"),
        ("last: '{why}'", "part 'last' has an unknown placeholder {why} (have: none)"),
        ("- opening", "must hold parts"),
        ("", "must hold parts"),
        ("opening: [", "not YAML"),
        ("[" * 5000, "not YAML"),
        ('last: "\\ud800"', "part 'last' holds half a character"),
    ],
)
def test_mistakes_name_the_file_and_the_part(tmp_path, text, says):
    file = _file(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        SearchSuite(SearchConfig(template=file), 0)
    message = str(caught.value)
    assert message.startswith(f"env.template={file}: ")
    assert says in message
    assert "\n" not in message


def test_a_missing_file_and_one_that_is_no_text(tmp_path):
    with pytest.raises(ConfigError, match=r"env\.template=nope\.yaml: cannot be read"):
        Wording.read("full", "nope.yaml")
    binary = tmp_path / "x.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not YAML"):
        Wording.read("full", str(binary))
