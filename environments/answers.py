"""When two answers are the same: a strict measure for rewards and a lenient one for the logs."""

from __future__ import annotations

import calendar
import re
import string
import unicodedata
from collections.abc import Iterable

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_DASHES = re.compile("[\u2010-\u2015\u2212\\-]")
_APOSTROPHES = str.maketrans("\u2018\u2019\u201c\u201d", "''\"\"")
_NUMERALS = {
    word: str(number)
    for number, word in enumerate(
        ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    )
}
_MONTHS = frozenset(calendar.month_name[i].lower() for i in range(1, 13))


def normalise(text: str) -> str:
    """The usual SQuAD form: lower case, no ASCII punctuation, no a/an/the, single spaces."""
    text = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def exact_match(prediction: str, golds: Iterable[str]) -> bool:
    """Whether the prediction equals any gold after :func:`normalise`; an empty form never does."""
    form = normalise(prediction)
    return bool(form) and any(form == normalise(gold) for gold in golds)


def plain_words(text: str) -> str:
    """Words alone, for finding one text in another: "Ann Lee's_x" is "ann lee x".

    Blind to case, Unicode form, invisible characters, possessives and all that is no letter or
    digit, whichever way it joins words.
    """
    text = unicodedata.normalize("NFKC", text).translate(_APOSTROPHES)
    text = "".join(c for c in text if unicodedata.category(c) != "Cf")
    text = re.sub(r"'s\b", "", text)
    return " ".join(_ARTICLES.sub(" ", re.sub(r"[\W_]+", " ", text).lower()).split())


def _loose(text: str) -> str:
    text = unicodedata.normalize("NFKC", text).translate(_APOSTROPHES)
    words = normalise(_DASHES.sub(" ", text)).split()
    words = [_NUMERALS.get(word, word) for word in words]
    for i in range(len(words) - 1):  # "May 18" -> "18 may"
        if words[i] in _MONTHS and words[i + 1].isdigit() and len(words[i + 1]) <= 2:
            words[i], words[i + 1] = words[i + 1], words[i]
    return " ".join(words)


def lenient_match(prediction: str, golds: Iterable[str]) -> bool:
    """As :func:`exact_match`, but blind to Unicode form, dashes, numerals and day-month order.

    For a metric only; rewards stay comparable with published numbers by using the strict measure.
    """
    form = _loose(prediction)
    return bool(form) and any(form == _loose(gold) for gold in golds)
