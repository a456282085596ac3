"""A procedurally made encyclopedia: films, people, cities and countries, and questions about them.

Source: the embedded default of the project's specification. Every name is two words and every word
comes from a closed list of its kind, so that a small tokenizer can give each word one token. The
splits share the words but no full name and no fact: words i and j of a kind make a name of split
``(i + j) % 3``, and an entity has facts about entities of its own split only. A policy that answers
test questions has therefore learned to search and to read, not to remember.

    world = World(seed=0)
    world.passages                    # one passage for each entity of all splits: one corpus
    world.questions("test")           # Question(id, type, text, answers, hops, path)
    world.questions("test", ["bridge4", "compare_bridge"])    # of these types, in turn
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product

from rsipo_lightning.environments.retriever import Passage
from rsipo_lightning.errors import DataError

SPLITS = ("train", "val", "test")
TYPES = ("single", "bridge2", "bridge3", "compare")  # asked unless others are chosen
ALL_TYPES = (*TYPES, "bridge4", "compare_bridge")

_WORDS = {  # kind: (first words, second words); lists have lengths divisible by 3
    "person": (
        "Ada Boris Clara David Elena Felix Greta Hugo Irene Jonas Karin Leon Maria Nikolai Olga "
        "Pablo Rosa Simon Tessa Viktor Wanda Xavier Yusuf Zoe Amir Bella Carlos Dora Emil Fiona",
        "Abbott Baxter Carver Dalton Egan Fletcher Garcia Hansen Ibsen Jensen Keller Lindqvist "
        "Moreau Novak Okafor Petrov Quinn Ramirez Schmidt Tanaka Ueda Varga Weber Yilmaz Zapata "
        "Almeida Bianchi Cohen Dubois Eriksen",
    ),
    "film": (
        "Amber Broken Crimson Distant Empty Frozen Golden Hidden Iron Jade Lonely Midnight Neon "
        "Orange Purple Quiet Restless Silent Twisted Velvet Wild Yellow Ancient Bitter Crystal "
        "Electric Fading Gentle Hollow Ivory",
        "Anchor Bell Candle Dagger Engine Feather Guitar Hammer Island Jewel Kite Lantern Mirror "
        "Needle Orchard Piano Rocket Shadow Tiger Umbrella Violin Whistle Zebra Arrow Balloon "
        "Compass Drum Fountain Glacier Horizon",
    ),
    "city": (
        "Port Saint Fort Mount Lake Glen Castle Cape Old North South East West Little High Long "
        "Stone Oak",
        "Arden Belmont Corvin Dorset Elmira Farley Grafton Hollis Kenton Lorne Merrow Norwell "
        "Orland Preston Ripley Selby Tilden Wexford",
    ),
    "country": (
        "Upper Lower Free Royal Great Inner Outer United Federal Holy Central Sovereign",
        "Astoria Brevia Caldara Drovia Estovia Fennmark Gallia Hestria Illyra Jorvia Kestonia "
        "Lusatia",
    ),
}
_COUNTS = {  # entities of a split; train has all of its class, so that it holds every word
    "train": {"film": 300, "person": 300, "city": 108, "country": 48},
    "val": {"film": 200, "person": 200, "city": 48, "country": 16},
    "test": {"film": 200, "person": 200, "city": 48, "country": 16},
}
_PER_TYPE = {"train": 800, "val": 400, "test": 400}  # questions of each type
YEARS = tuple(str(1920 + 8 * i) for i in range(12))  # few, so that their order can be learned
BIRTH_YEARS, FILM_YEARS = YEARS[:6], YEARS[6:]  # nobody makes a film before being born
FEW_YEARS = YEARS[::2]  # three of each kind

_SENTENCES = {
    "film": (
        "{name} is a film of {released} directed by {director} and starring {star}.",
        "{name} came out in {released}; its director is {director} and its star is {star}.",
        "Directed by {director} and starring {star}, the film {name} came out in {released}.",
    ),
    "person": (
        "{name} was born in {city} in {born}.",
        "{name} was born in {born} in the city of {city}.",
        "Born in {born}, {name} comes from {city}.",
    ),
    "city": (
        "{name} is a city in {country}.",
        "The city of {name} lies in {country}.",
        "{name} is one of the cities of {country}.",
    ),
    "country": (
        "{name} is a country led by {leader}.",
        "The leader of {name} is {leader}.",
        "The country {name} has {leader} as its leader.",
    ),
}


@dataclass(frozen=True, slots=True)
class _Form:
    """One kind of question: start at an entity of ``kind`` and follow ``path``."""

    type: str
    kind: str
    path: tuple[str, ...]
    texts: tuple[str, ...]
    years: tuple[str, ...] = YEARS  # that are compared


_FORMS = (
    _Form(
        "single",
        "film",
        ("director",),
        ("Who directed the film {0}?", "Who is the director of {0}?"),
    ),
    _Form("single", "film", ("star",), ("Who is the star of the film {0}?", "Who stars in {0}?")),
    _Form(
        "single",
        "film",
        ("released",),
        ("In which year did the film {0} come out?", "When did {0} come out?"),
    ),
    _Form(
        "single",
        "person",
        ("city",),
        ("In which city was {0} born?", "What is the birth city of {0}?"),
    ),
    _Form(
        "single",
        "person",
        ("born",),
        ("In which year was {0} born?", "What is the birth year of {0}?"),
    ),
    _Form("single", "city", ("country",), ("In which country is the city {0}?",)),
    _Form("single", "country", ("leader",), ("Who leads the country {0}?",)),
    _Form(
        "bridge2",
        "film",
        ("director", "city"),
        (
            "In which city was the director of {0} born?",
            "What is the birth city of the director of {0}?",
        ),
    ),
    _Form(
        "bridge2",
        "film",
        ("star", "city"),
        ("In which city was the star of {0} born?", "What is the birth city of the star of {0}?"),
    ),
    _Form(
        "bridge2",
        "film",
        ("director", "born"),
        (
            "In which year was the director of {0} born?",
            "What is the birth year of the director of {0}?",
        ),
    ),
    _Form(
        "bridge2",
        "film",
        ("star", "born"),
        ("In which year was the star of {0} born?", "What is the birth year of the star of {0}?"),
    ),
    _Form(
        "bridge2",
        "person",
        ("city", "country"),
        ("In which country was {0} born?", "In which country is the birth city of {0}?"),
    ),
    _Form("bridge2", "city", ("country", "leader"), ("Who leads the country of the city {0}?",)),
    _Form(
        "bridge3",
        "film",
        ("director", "city", "country"),
        (
            "In which country was the director of {0} born?",
            "In which country is the birth city of the director of {0}?",
        ),
    ),
    _Form(
        "bridge3",
        "film",
        ("star", "city", "country"),
        (
            "In which country was the star of {0} born?",
            "In which country is the birth city of the star of {0}?",
        ),
    ),
    _Form(
        "bridge3",
        "person",
        ("city", "country", "leader"),
        (
            "Who leads the country in which {0} was born?",
            "Who is the leader of the country in which {0} was born?",
        ),
    ),
    _Form(
        "bridge4",
        "film",
        ("director", "city", "country", "leader"),
        (
            "Who leads the country in which the director of {0} was born?",
            "Who is the leader of the country in which the director of {0} was born?",
        ),
    ),
    _Form(
        "bridge4",
        "film",
        ("star", "city", "country", "leader"),
        (
            "Who leads the country in which the star of {0} was born?",
            "Who is the leader of the country in which the star of {0} was born?",
        ),
    ),
    _Form(
        "bridge4",
        "person",
        ("city", "country", "leader", "city"),
        ("What is the birth city of the leader of the country in which {0} was born?",),
    ),
    _Form(
        "bridge4",
        "city",
        ("country", "leader", "city", "country"),
        ("In which country was the leader of the country of the city {0} born?",),
    ),
)
# In a "compare_bridge" the first relation is compared and the others lead on from the earlier one:
# no name in the question is the answer.
_COMPARE = (
    _Form(
        "compare",
        "film",
        ("released",),
        (
            "Which film came out first, {0} or {1}?",
            "Which of the films {0} and {1} came out first?",
        ),
    ),
    _Form(
        "compare",
        "person",
        ("born",),
        ("Who was born first, {0} or {1}?", "Which of {0} and {1} was born first?"),
    ),
    _Form(
        "compare_bridge",
        "film",
        ("released", "director", "city"),
        (
            "Which film came out first, {0} or {1}, and in which city was its director born?",
            "In which city was the director of the film born that came out first, {0} or {1}?",
        ),
        FEW_YEARS,
    ),
    _Form(
        "compare_bridge",
        "person",
        ("born", "city", "country"),
        (
            "Who was born first, {0} or {1}, and in which country?",
            "In which country was the one born that was born first, {0} or {1}?",
        ),
        FEW_YEARS,
    ),
)


@dataclass(frozen=True, slots=True)
class Question:
    """A question and the way to its answer."""

    id: str
    type: str  # one of ALL_TYPES
    text: str
    answers: tuple[str, ...]
    hops: tuple[str, ...]  # entities to search, in order: (first,), (first, second), ...
    # relation read on the page of each hop; of both pages of a compare the one that is compared,
    # and in a compare_bridge first that one, then where the earlier page leads
    path: tuple[str, ...]


class World:
    """All facts of one seed. The same seed gives the same world in every process."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.names: dict[str, dict[str, list[str]]] = {}  # split: {kind: names}
        self.facts: dict[str, dict[str, str]] = {}  # name: {relation: value}
        self._kinds: dict[str, str] = {}
        for split in SPLITS:
            self._fill(split)

    def _rng(self, *key: object) -> random.Random:
        return random.Random("/".join(map(str, ("world", self.seed, *key))))

    def _fill(self, split: str) -> None:
        rng = self._rng(split, "facts")
        names = {
            kind: _draw_names(kind, SPLITS.index(split), count, rng)
            for kind, count in _COUNTS[split].items()
        }
        self.names[split] = names
        for kind, members in names.items():
            self._kinds.update(dict.fromkeys(members, kind))
        for film in names["film"]:
            director, star = rng.sample(names["person"], 2)
            year = rng.choice(FILM_YEARS)
            self.facts[film] = {"director": director, "star": star, "released": year}
        for person in names["person"]:
            self.facts[person] = {
                "city": rng.choice(names["city"]),
                "born": rng.choice(BIRTH_YEARS),
            }
        for city in names["city"]:
            self.facts[city] = {"country": rng.choice(names["country"])}
        for country in names["country"]:
            self.facts[country] = {"leader": rng.choice(names["person"])}

    @cached_property
    def passages(self) -> list[Passage]:
        """One sentence for each entity of all splits; the title is the entity."""
        rng = self._rng("passages")
        return [
            Passage(
                str(i), name, rng.choice(_SENTENCES[self._kinds[name]]).format(name=name, **fact)
            )
            for i, (name, fact) in enumerate(self.facts.items())
        ]

    def questions(self, split: str, types: Sequence[str] = TYPES) -> list[Question]:
        """All questions of a split, types (of ALL_TYPES) in turn. Unknown split: DataError."""
        if split not in SPLITS:
            raise DataError(f"no split '{split}' (have: {', '.join(SPLITS)})")
        columns = []
        for type_ in types:
            rng = self._rng(split, type_)
            make = self._comparisons if type_.startswith("compare") else self._chains
            columns.append(make(split, type_, rng)[: _PER_TYPE[split]])
        return [question for row in zip(*columns, strict=True) for question in row]

    def _chains(self, split: str, type_: str, rng: random.Random) -> list[Question]:
        pairs = [
            (form, name)
            for form in _FORMS
            if form.type == type_
            for name in self.names[split][form.kind]
        ]
        rng.shuffle(pairs)
        questions: list[Question] = []
        for form, start in pairs:
            *hops, answer = way = self._follow(start, form.path)
            if len(set(way)) < len(way):  # a leader's own country
                continue
            text = rng.choice(form.texts).format(start)
            ident = self._id(split, type_, len(questions))
            questions.append(Question(ident, type_, text, (answer,), tuple(hops), form.path))
        return questions

    def _comparisons(self, split: str, type_: str, rng: random.Random) -> list[Question]:
        seen: set[frozenset[str]] = set()
        questions: list[Question] = []
        forms = [form for form in _COMPARE if form.type == type_]
        members = {
            form: [
                name
                for name in self.names[split][form.kind]
                if self.facts[name][form.path[0]] in form.years
            ]
            for form in forms
        }
        while len(questions) < _PER_TYPE[split]:
            form = forms[len(questions) % len(forms)]
            pair = rng.sample(members[form], 2)
            years = [self.facts[name][form.path[0]] for name in pair]
            ways = [self._follow(name, form.path[1:]) for name in pair]
            same = years[0] == years[1] or ways[0][-1] == ways[1][-1]
            if same or frozenset(pair) in seen:
                continue
            seen.add(frozenset(pair))
            text = rng.choice(form.texts).format(*pair)
            way = ways[0] if years[0] < years[1] else ways[1]
            ident = self._id(split, type_, len(questions))
            hops = (*pair, *way[1:-1])
            questions.append(Question(ident, type_, text, (way[-1],), hops, form.path))
        return questions

    def _follow(self, start: str, path: Sequence[str]) -> list[str]:
        """``start`` and what each relation of the path leads to."""
        way = [start]
        for relation in path:
            way.append(self.facts[way[-1]][relation])
        return way

    def _id(self, split: str, type_: str, i: int) -> str:
        return f"world{self.seed}-{split}-{type_}-{i:04d}"


def _draw_names(kind: str, residue: int, count: int, rng: random.Random) -> list[str]:
    first, second = (words.split() for words in _WORDS[kind])
    pairs = product(enumerate(first), enumerate(second))
    names = [f"{a} {b}" for (i, a), (j, b) in pairs if (i + j) % len(SPLITS) == residue]
    return rng.sample(names, count)


_NAME = re.compile(r"\b[A-Z][a-z]+ [A-Z][a-z]+\b")
_YEAR = re.compile(r"\b(?:" + "|".join(YEARS) + r")\b")


def entities(text: str) -> list[str]:
    """Names of the world that a text shows, without repeats, in order of appearance."""
    known = _known_names()
    return list(dict.fromkeys(name for name in _NAME.findall(text) if name in known))


def years(text: str) -> list[str]:
    """Years of the world that a text shows, without repeats, in order of appearance."""
    return list(dict.fromkeys(_YEAR.findall(text)))


@cache
def _known_names() -> frozenset[str]:
    return frozenset(
        f"{a} {b}"
        for first, second in _WORDS.values()
        for a, b in product(first.split(), second.split())
    )


def name_words() -> list[str]:
    """Every word that a name can hold, without repeats, in order."""
    words = [word for pair in _WORDS.values() for text in pair for word in text.split()]
    return list(dict.fromkeys(words))


def name_pairs(split: str) -> Iterator[tuple[str, str]]:
    """(first, second) word of every name that any seed can give to a split."""
    for first, second in _WORDS.values():
        for (i, a), (j, b) in product(enumerate(first.split()), enumerate(second.split())):
            if (i + j) % len(SPLITS) == SPLITS.index(split):
                yield a, b


def pieces(text: str) -> list[str]:
    """Words and single punctuation marks of a text, the units that :func:`vocabulary` counts."""
    return re.findall(r"\w+|[^\w\s]", text)


def vocabulary() -> list[str]:
    """Every word and punctuation mark that passages and questions of any seed can hold, sorted."""
    texts = [words for pair in _WORDS.values() for words in pair]
    texts += [" ".join(YEARS)]
    texts += [re.sub(r"{\w+}", "", s) for group in _SENTENCES.values() for s in group]
    texts += [re.sub(r"{\w+}", "", t) for form in _FORMS + _COMPARE for t in form.texts]
    return sorted({piece for text in texts for piece in pieces(text)})
