"""The tiny policy's tokenizer and what it is taught."""

from __future__ import annotations

import re
from functools import cache
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from rsipo_lightning.codec import Codec
from rsipo_lightning.composing import compose
from rsipo_lightning.config import SHIPPED, RunConfig
from rsipo_lightning.demonstrations import CHOICE, MIXTURES, Demonstrations, Lessons
from rsipo_lightning.environments import world
from rsipo_lightning.imitation import sample
from rsipo_lightning.module import lr_factor
from rsipo_lightning.policy import MODELS, TINY, Policy
from rsipo_lightning.skills import read_skill
from rsipo_lightning.tiny import (
    JSON,
    NUMBERS,
    TAGS,
    YEARS,
    build_tokenizer,
    new_model,
    vocabulary,
)

FIXTURES = {"tiny": "demonstrations", "tiny_hard": "hard"}
HASHES = {  # of the first rows of each mixture
    "tiny": "b1c0ddcc911d5620b839b6ed9b298f548d61eb00f269220e797e9128731a6c0b",
    "tiny_hard": "d54066218f09c26ddfe181dcb0e6ba46a7419eee7e03e709b984d846fe13d704",
}


@pytest.fixture(scope="module")
def made() -> PreTrainedTokenizerBase:
    return build_tokenizer()


@pytest.fixture(scope="module")
def shipped() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def demonstrations(shipped: PreTrainedTokenizerBase) -> Demonstrations:
    return Demonstrations(Codec(shipped), seed=1)


def test_words_tags_and_years_are_one_token(made: PreTrainedTokenizerBase) -> None:
    wanted = [*vocabulary(), *TAGS, *JSON, *YEARS]
    assert len(wanted) > 500
    assert [w for w in wanted if len(made.encode(w, add_special_tokens=False)) != 1] == []


@pytest.mark.parametrize("name", SHIPPED)
@given(text=st.text(max_size=60) | st.text("0123456789 -.,a", max_size=20))
@settings(max_examples=200, deadline=None)
def test_the_shipped_tokenizers_read_any_text(name: str, text: str) -> None:
    """Lossless but for Unicode's composed form, which Qwen2 takes."""
    import unicodedata

    tokenizer = _loaded(name)
    if any("\ud800" <= c <= "\udfff" for c in text):
        return
    ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)


_loaded = cache(lambda name: AutoTokenizer.from_pretrained(MODELS / name))


def test_the_policies_for_search_have_one_tokenizer() -> None:
    one, other = ((MODELS / n / "tokenizer.json").read_text() for n in ("tiny", "tiny_hard"))
    assert one == other


def test_numbers_of_things_are_one_token_for_alfworld() -> None:
    tokenizer, made = _loaded("tiny_alfworld"), build_tokenizer(NUMBERS)
    seen = "You open the drawer 12. In it, you see a mug 1, a cd 30, and a safe 7."
    for text in (seen, "go to cabinet 1 2 15, bed 1", "born in 1985", "mug 123"):
        ids = tokenizer.encode(text)
        assert ids == made.encode(text)
        assert tokenizer.decode(ids) == text
    words = re.findall(r"\w+|[,.]", seen)
    assert len(tokenizer.encode(seen)) == len(words)
    assert {len(tokenizer.encode(year)) for year in YEARS} == {1}  # not " 19" and two digits


def test_auto_tokenizer_gives_the_same_ids_back(
    made: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """AutoTokenizer takes another class for qwen2 than the folder names, unless it is Qwen2's."""
    made.save_pretrained(tmp_path)
    new_model(made, 0).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    texts = [p.text for p in world.World(3).passages[:200]] + ["<search> Amber Fountain</search>"]
    texts += [
        "Ünïcode 漢字 🙂",
        '{"episode_summary": "x", "episode_skill": "1. Search. 2. Answer"}',
    ]
    assert [loaded.encode(t) for t in texts] == [made.encode(t) for t in texts]


def test_the_shipped_tokenizer_is_what_the_recipe_makes(
    made: PreTrainedTokenizerBase, shipped: PreTrainedTokenizerBase
) -> None:
    """For the names, tags and templates; English merges depend on Python's help texts."""
    texts = [*vocabulary(), *TAGS, *JSON, *YEARS]
    assert all(len(shipped.encode(t)) == len(made.encode(t)) == 1 for t in texts)
    assert shipped.chat_template == made.chat_template


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_model_is_a_small_qwen2_with_wide_heads(name: str) -> None:
    folder = MODELS / name
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert model.config.hidden_size // model.config.num_attention_heads == 32
    assert model.config.max_position_embeddings == 4096
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    assert sum(f.stat().st_size for f in folder.iterdir()) < 5 * 2**20
    Policy(model)


@pytest.fixture(scope="module")
def hard(shipped: PreTrainedTokenizerBase) -> Demonstrations:
    env = compose(algo="grpo", env="search_hard").env
    return Demonstrations(Codec(shipped), 1, MIXTURES["tiny_hard"], env)


@pytest.mark.parametrize(
    ("mixture", "kind"),
    [(name, kind) for name in MIXTURES for kind in (*MIXTURES[name].rows, "mixed")],
)
def test_rows_are_a_function_of_the_key_and_hide_the_test_names(
    mixture: str, kind: str, request: pytest.FixtureRequest, shipped: PreTrainedTokenizerBase
) -> None:
    demonstrations = request.getfixturevalue(FIXTURES[mixture])
    rows = [demonstrations.row(kind, i) for i in range(150)]
    assert rows[:20] == [demonstrations.row(kind, i) for i in range(20)]
    assert len({row.ids for row in rows}) > 100
    unseen = {pair for split in ("val", "test") for pair in world.name_pairs(split)}
    for row in rows:
        assert len(row.ids) == len(row.weights)
        assert max(row.weights) in (1.0, CHOICE)
        words = shipped.decode(list(row.ids)).replace("<", " <").replace(",", " ,").split()
        assert not unseen & set(pairwise(words))


@pytest.mark.parametrize("mixture", MIXTURES)
def test_lessons_are_those_that_the_shipped_policies_were_given(
    mixture: str, request: pytest.FixtureRequest
) -> None:
    lessons = request.getfixturevalue(FIXTURES[mixture])
    rows = [lessons.row("mixed", 0, i) for i in range(200)]
    assert sha256("".join(map(repr, rows)).encode()).hexdigest() == HASHES[mixture]


def test_an_order_drill_goes_on_with_the_page_of_the_earlier(
    hard: Demonstrations, shipped: PreTrainedTokenizerBase
) -> None:
    """Read from the row alone, whatever its names are."""
    for i in range(50):
        row = hard.row("ordering", i)
        *_, one, other = re.findall(r"<information>\n(.*)\n", shipped.decode(list(row.ids)))
        years = [int(re.search(r"\d{4}", page).group()) for page in (one, other)]  # type: ignore[union-attr]
        said = shipped.decode([t for t, w in zip(row.ids, row.weights, strict=True) if w])
        name = said.removeprefix("<search> ").partition("</search>")[0]
        assert years[0] != years[1]
        assert name in (one if years[0] < years[1] else other)


def test_written_skills_parse(
    demonstrations: Demonstrations, shipped: PreTrainedTokenizerBase
) -> None:
    for i in range(50):
        row = demonstrations.row("writing", i)
        said = [t for t, w in zip(row.ids, row.weights, strict=True) if w]
        assert read_skill(shipped.decode(said, skip_special_tokens=True))[1] == ""
        assert said[-1] == shipped.eos_token_id


def test_a_row_is_trained_where_it_has_weight(demonstrations: Demonstrations) -> None:
    row = demonstrations.row("plain", 0)
    s = sample(row)
    assert s.ids.tolist() == list(row.ids)
    expected = [w for w in row.weights[1:] if w > 0]
    assert s.credits["imitate"].weight.tolist() == pytest.approx(expected)
    assert int(s.mask.sum()) == s.n == len(expected)


def test_batches_are_a_function_of_the_update(demonstrations: Demonstrations) -> None:
    one, other = Lessons(demonstrations), Lessons(demonstrations)

    def ids(lessons: Lessons, update: int) -> list[list[int]]:
        return [row.ids.tolist() for row in lessons.batch(update)]

    assert ids(one, Lessons.POOL) == ids(other, Lessons.POOL)
    assert ids(one, 1) == ids(other, 1)  # back to an earlier pool
    assert ids(one, 0) != ids(one, 1)


def test_heads_of_the_first_layer_start_by_looking_back(made: PreTrainedTokenizerBase) -> None:
    model = new_model(made, 0).eval()
    model.set_attn_implementation("eager")
    ids = torch.randint(0, 2000, (1, 300), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        weights = model(input_ids=ids, output_attentions=True).attentions[0][0]
    for head, back in enumerate((1, 2, 3)):  # equally so wherever the token stands
        assert weights[head].diagonal(-back)[back:].min() > 0.8


def test_learning_rate_schedules() -> None:
    assert [lr_factor("constant", 0, 10, s) for s in (0, 9)] == [1.0, 1.0]
    assert lr_factor("linear", 2, 10, 0) == 0.5
    assert lr_factor("linear", 2, 10, 6) == 0.5
    assert lr_factor("cosine", 0, 10, 5) == pytest.approx(0.5)
    assert lr_factor("cosine", 0, 10, 0) == 1.0
    assert lr_factor("cosine", 0, 10, 10) == pytest.approx(0.0)
    assert torch.tensor([lr_factor("cosine", 0, 10, s) for s in range(11)]).diff().max() <= 0
    assert RunConfig().optim.schedule == "constant"
