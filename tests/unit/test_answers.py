"""The strict measure (rewarded) and the lenient one (logged)."""

import pytest

from rsipo_lightning.environments.answers import exact_match, lenient_match, normalise


@pytest.mark.parametrize(
    ("prediction", "gold", "same"),
    [
        ("The Beatles", "beatles", True),
        ("an  Apple\n pie!", "apple pie", True),
        ("U.S.A.", "USA", True),
        ("theatre", "atre", False),  # articles are whole words
        ("Paris, France", "Paris", False),  # equality, not containment
        ("18 May 2018", "May 18, 2018", False),
        ("well-known", "wellknown", True),  # ASCII punctuation is dropped, not replaced
        ("well\u2013known", "wellknown", False),  # a dash that is not ASCII stays
        ("", "", False),
        ("the", "---", False),  # two empty forms are no match
        ("7", "seven", False),
    ],
)
def test_exact_match_is_squad_equality(prediction, gold, same):
    assert exact_match(prediction, ["something else", gold]) is same


def test_normalise_is_idempotent():
    for text in ("The  A. An-the 1,000", "Ünïcode\u2019s", ""):
        assert normalise(normalise(text)) == normalise(text)


@pytest.mark.parametrize(
    ("prediction", "gold"),
    [
        ("May 18, 2018", "18 May 2018"),
        ("1914\u20131918", "1914-1918"),
        ("seven", "7"),
        ("\uff30aris", "Paris"),
    ],
)
def test_lenient_match_forgives_only_form(prediction, gold):
    assert lenient_match(prediction, [gold])
    assert not exact_match(prediction, [gold])
    assert not lenient_match(prediction, ["Berlin"])
