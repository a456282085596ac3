"""Skill banks: what is shown, for which type, and what is said about mistakes."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rsipo_lightning.bank import BankConfig, SkillBank
from rsipo_lightning.callbacks.best_skills import bank as best_skills
from rsipo_lightning.environments import experts
from rsipo_lightning.environments.world import ALL_TYPES, TYPES
from rsipo_lightning.errors import ConfigError, DataError

ROOT = Path(__file__).parents[2]
REAL = Path(os.environ.get("RSIPO_DATA") or ROOT.parent / "shared" / "data") / "skill_banks"
SETS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")


def skills(*titles: str) -> list[dict[str, str]]:
    return [{"title": t, "principle": f"do {t}", "when_to_apply": "always"} for t in titles]


MISTAKE = {"description": "late", "why_it_happens": "slow", "how_to_avoid": "hurry"}
GOOD: dict[str, Any] = {
    "general_skills": skills("A", "B"),
    "task_specific_skills": {"one": skills("C", "D"), "two": skills("E")},
    "common_mistakes": [MISTAKE],
    "task_types": {"hotpotqa": "two"},
}


def write(folder: Path, data: Any) -> Path:
    path = folder / "bank.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return path


def test_general_skills_come_before_those_of_the_type(tmp_path: Path) -> None:
    bank = SkillBank.load(write(tmp_path, GOOD))
    assert bank.text("one") == (
        "General skills:\n- A: do A (When: always)\n- B: do B (When: always)\n\n"
        "Skills for one:\n- C: do C (When: always)\n- D: do D (When: always)"
    )
    assert bank.text("hotpotqa") == bank.text("two")
    assert "E: do E" in bank.text("two")
    assert "C: do C" not in bank.text("two")


def test_what_a_run_found_best_is_a_bank(tmp_path: Path) -> None:
    """``best_skills.json`` has no general skills."""
    row = {"type": "one", "text": "1. search\n2. answer", "category": "procedural", "gain": 0.5}
    bank = SkillBank.load(write(tmp_path, best_skills({"one": [row]})))
    when = "(When: tasks of type one)"
    assert bank.text("one") == f"Skills for one:\n- procedural: 1. search\n2. answer {when}"


def test_top_shows_the_first_of_each_list(tmp_path: Path) -> None:
    text = SkillBank.load(write(tmp_path, GOOD), top=1).text("one")
    assert [line[:3] for line in text.splitlines() if line.startswith("-")] == ["- A", "- C"]


def test_given_types_win_over_those_of_the_file(tmp_path: Path) -> None:
    bank = SkillBank.load(write(tmp_path, GOOD), {"hotpotqa": "one", "nq": "two"})
    assert bank.text("hotpotqa") == bank.text("one")
    assert bank.text("nq") == bank.text("two")


def test_an_unknown_type_is_an_error_not_the_general_skills(tmp_path: Path) -> None:
    bank = SkillBank.load(write(tmp_path, GOOD))
    with pytest.raises(DataError, match=r"'nq' \(have: one, two\); choose: algo.bank_types.nq="):
        bank.text("nq")
    with pytest.raises(DataError, match="no skills 'three' for task type 'nq'"):
        SkillBank.load(write(tmp_path, GOOD), {"nq": "three"})


def without(key: str) -> dict[str, Any]:
    return {k: v for k, v in GOOD.items() if k != key}


def no_principle() -> dict[str, Any]:
    bad = copy.deepcopy(GOOD)
    bad["task_specific_skills"]["one"][1]["principle"] = " "
    return bad


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ("{", "cannot be read"),
        ([], "must be a JSON object"),
        (without("general_skills"), "general_skills must be a list"),
        (without("task_specific_skills"), "task_specific_skills must be an object"),
        (without("common_mistakes"), "common_mistakes must be a list"),
        ({**GOOD, "task_specific_skills": {"one": None}}, "_skills.one must be a list"),
        ({**GOOD, "task_specific_skills": {"one": []}}, "_skills.one is empty"),
        ({**GOOD, "general_skills": ["x"]}, r"general_skills\[0\] needs a text 'title'"),
        ({**GOOD, "common_mistakes": [{}]}, r"common_mistakes\[0\] needs a text 'description'"),
        ({**GOOD, "task_types": {"nq": "three"}}, "no skills 'three' for task type 'nq'"),
        ({**GOOD, "task_types": {"nq": ["one"]}}, "no skills .* for task type 'nq'"),
        ({**GOOD, "task_types": ["nq"]}, "task_types must be an object"),
        ({**GOOD, "general_skills": skills("half \ud800")}, "'title' of general_skills.0. is not"),
        (no_principle(), r"task_specific_skills.one\[1\] needs a text 'principle'"),
    ],
)
def test_a_broken_file_says_where_and_what(tmp_path: Path, data: Any, what: str) -> None:
    with pytest.raises(DataError, match=rf"bank\.json.*{what}"):
        SkillBank.load(write(tmp_path, data))


def test_a_missing_bank_names_ours() -> None:
    with pytest.raises(DataError, match=r"no skill bank 'serch'.*did you mean 'search'"):
        SkillBank.load("serch")
    with pytest.raises(ConfigError, match=r"'toy' has no skill bank.*algo.bank=FILE"):
        SkillBank.of(BankConfig(), "toy", (), "full")
    with pytest.raises(ConfigError, match=r"algo\.bank_top=-1"):
        BankConfig(bank_top=-1)


def test_our_search_bank_knows_the_world_and_the_seven_sets() -> None:
    bank = SkillBank.of(BankConfig(), "search", (*ALL_TYPES, *SETS), "full")
    assert len({bank.text(kind) for kind in (*ALL_TYPES, *SETS)}) == 4
    assert "Skills for comparison:" in bank.text("compare")
    assert bank.text("bridge2") == bank.text("bridge3") == bank.text("musique")


def test_the_compact_bank_speaks_the_words_of_the_tiny_policys_lessons() -> None:
    bank = SkillBank.of(BankConfig(), "search", (*ALL_TYPES, *SETS), "compact")
    for kind in ALL_TYPES:
        assert bank.text(kind) in [s.text for s in experts.skills(kind, "procedural")]
    assert bank.text("hotpotqa") == bank.text("bridge2")
    asked = SkillBank.of(BankConfig(bank="search"), "search", TYPES, "compact")
    assert asked.text("compare").startswith("End each turn with exactly one search or one answer")
    assert "Skills for" not in asked.text("compare")


def test_all_types_are_checked_at_once() -> None:
    with pytest.raises(DataError, match="task type 'squad'"):
        SkillBank.of(BankConfig(), "search", ("nq", "squad"), "full")
    known = BankConfig(bank_types={"squad": "direct_retrieval"})
    assert SkillBank.of(known, "search", ("squad",), "full").text("squad")


@pytest.mark.parametrize(
    ("name", "general", "lists", "kind", "words"),
    [
        ("alfworld", 12, 6, "heat", "Secure Exact Target First"),
        ("search", 10, 4, "comparison", "Decompose & Isolate"),
        ("webshop", 15, 7, "footwear", "Load Search Constraints"),
    ],
)
def test_the_published_banks(name: str, general: int, lists: int, kind: str, words: str) -> None:
    if not REAL.is_dir():
        pytest.skip(f"no skill banks at {REAL} (RSIPO_DATA)")
    bank = SkillBank.load(REAL / f"{name}.json", {"mine": kind})
    assert (len(bank.general), len(bank.specific)) == (general, lists)
    assert len({bank.text(each) for each in bank.specific}) == lists  # pitfall 16
    assert words in bank.text("mine")
    assert not any(words in bank.text(each) for each in bank.specific if each != kind)
