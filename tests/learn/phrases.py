"""Where texts state a fact, found by its phrases, and what they say there. test_facts.py uses it."""

import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from minipar.learn.facts import Fact, quote, written

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md", "CONTRIBUTING.md", "docs/**/*.md", "lessons/*.md", "lessons/interview/*.md", "lessons/exercises/*.md",
    "website/pages/*.md", "minipar/simple/README.md",
)  # fmt: skip
# Data of which no page is kept here; and sources, whose docstrings and comments are read.
DATA = ("minipar/learn/museum/gallery.toml", "minipar/learn/exercises/exercises.toml")
SOURCES = ("minipar/cost/*.py", "minipar/simple/*.py")

COUNTED = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
WORDS: dict[str, float] = {word: number for number, word in enumerate(COUNTED)}
WORDS |= {"half": 1 / 2, "third": 1 / 3, "quarter": 1 / 4, "eighth": 1 / 8}
TOKEN = r"(?<![\w.,])(\d(?:[\d.,]*\d)?(?:e-?\d+)?(?:/\d+)?(?!\d)|[A-Za-z]+\b)"  # a number, or a word that may be one
FORMULA = r"(?:[\w+\-*/^(). ]|, (?=\w+\)))+?"


# Texts --------------------------------------------------------------------------------------------------------------


def texts() -> dict[str, str]:
    """Return all texts by the place where they stand: a file, or "FILE, cell N"."""
    found = dict(files_like(PAGES)) | {name: quote(text) for name, text in files_like(DATA)}
    for name, text in files_like(SOURCES):
        told = re.findall(r'"""(.*?)"""|# ([^\n]*)', text, re.DOTALL)
        found[name] = "\n".join(docstring or comment for docstring, comment in told)
    for name, text in files_like(("lessons/*.ipynb", "lessons/museum/*.ipynb")):
        for number, cell in enumerate(json.loads(text)["cells"]):
            found[f"{name}, cell {number}"] = text_of(cell)
    return found


def files_like(patterns: Iterable[str]) -> Iterator[tuple[str, str]]:
    for path in sorted(path for pattern in patterns for path in ROOT.glob(pattern)):
        yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def text_of(cell: Mapping) -> str:
    """Return what a reader of a notebook reads in a cell: its words or, of code, what it has printed."""
    if cell["cell_type"] == "markdown":
        return "".join(cell["source"])
    shown = (out.get("text") or out.get("data", {}).get("text/markdown", "") for out in cell["outputs"])
    return "\n".join("".join(lines) for lines in shown)


def readable(text: str) -> str:
    """Return a text as it is read aloud: without marks of Markdown and TOML, on one line, in one spelling."""
    text = re.sub(r"\]\([^)\s]*\)", "]", text)  # targets of links
    text = re.sub(r"`|(?<!\d)\*\*|\*\*(?!\d)|\\\n|(?<![\w)*])\*(?=\w)|(?<=[\w.,?!:])\*(?![\w(*])", "", text)
    text = re.sub(r"(?<=\d) ?(?:%|per cent\b|percent\b)", "%", text).replace("µs", "microseconds")
    return re.sub(r"\s+", " ", text.replace("²", "^2").replace("·", "*")).strip()


class Corpus:
    """All texts in one string, to be searched quickly, with the place of each part."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.places = list(texts)
        parts = [readable(text) + "\0" for text in texts.values()]
        self.text = "".join(parts)
        self.lower = self.text.lower()
        self.starts = list(accumulate(map(len, parts), initial=0))
        assert len(self.text) == len(self.lower)

    def place(self, at: int) -> str:
        return self.places[bisect_right(self.starts, at) - 1]

    def changed(self, one: "Stated", said: str) -> "Corpus":
        """Return a copy in which one text says something else, of the same length."""
        assert len(said) == len(one.said)
        other = copy(self)
        other.text = self.text[: one.begin] + said + self.text[one.begin + len(said) :]
        other.lower = self.lower[: one.begin] + said.lower() + self.lower[one.begin + len(said) :]
        return other


# Phrases ------------------------------------------------------------------------------------------------------------


class Stated(NamedTuple):
    """What a text says of a fact: the number or formula, as it is written there, and the words around it."""

    place: str
    said: str
    around: str
    begin: int

    @property
    def file(self) -> str:
        return self.place.partition(",")[0]


class Pattern(NamedTuple):
    """A phrase to be found: its longest part without a number, the whole, and its slots in order."""

    literal: str
    whole: re.Pattern[str]
    slots: list[str]


@cache
def pattern_of(phrase: str, of_formula: bool) -> Pattern:
    pieces = [piece for piece in re.split(r"(\{\}|#)", phrase.lower().replace("$", "\0")) if piece]
    kinds = {"{}": f"({FORMULA})" if of_formula else TOKEN, "#": TOKEN}
    literal = max((piece for piece in pieces if piece not in kinds), key=len)
    body = "".join(kinds.get(piece, re.escape(piece)) for piece in pieces)
    before, after = r"(?<!\w)" if phrase[0].isalnum() else "", r"(?![\w/])" if phrase[-1].isalnum() else ""
    whole = re.compile(before + body + after, re.IGNORECASE)
    return Pattern(literal, whole, [piece for piece in pieces if piece in kinds])


def stated(corpus: Corpus, fact: Fact, phrase: str) -> Iterator[Stated]:
    """Yield each occurrence of a phrase."""
    literal, whole, slots = pattern_of(phrase, bool(fact.letters))
    here, reach, seen = slots.index("{}") + 1, 80 + len(phrase), set()
    at = corpus.lower.find(literal)
    while at >= 0:
        for found in whole.finditer(corpus.text, max(0, at - reach), at + reach):
            said, begin = found[here], found.start(here)
            others = [group for group, slot in zip(found.groups(), slots, strict=True) if slot == "#"]
            is_one = is_formula(said) if fact.letters else is_number(said)
            if is_one and begin not in seen and all(map(is_number, others)):
                seen.add(begin)
                around = corpus.text[max(0, found.start() - 30) : found.end() + 30].replace("\0", " ")
                yield Stated(corpus.place(begin), said, around.strip(), begin)
        at = corpus.lower.find(literal, at + 1)


def is_number(token: str) -> bool:
    return token[0].isdigit() or token.lower() in WORDS


def is_formula(text: str) -> bool:
    return bool(re.search(r"\w.*[-+*/(]|^\d+ \w", text))


def is_right(fact: Fact, said: str) -> bool:
    """Return whether what a text says is the fact's number, in one of its formats, or a formula that gives the same."""
    if fact.letters:
        return all(math.isclose(evaluated(said, fact, at), fact.computed(**at)) for at in fact.at)
    if said.lower() in WORDS:
        return any(written(WORDS[said.lower()], form) == fact.quoted(form) for form in fact.forms)
    if "/" in said:
        above, _, below = said.partition("/")
        return math.isclose(fact.computed(), float(above) / float(below))
    number = float(said.replace(",", ""))
    return any(math.isclose(number, float(fact.quoted(form).replace(",", ""))) for form in fact.forms)


def evaluated(formula: str, fact: Fact, at: Mapping[str, float]) -> float:
    """Return the value of a formula as texts write it: 2(p-1)/p is 2 * (p - 1) / p. Not a number if it can't be read."""
    called = {name: at[letter] for letter, names in fact.letters.items() for name in names.split()}
    names = "|".join(sorted(called, key=len, reverse=True))
    tokens = re.findall(rf"min(?=\()|\d+(?:\.\d+)?|{names}|[-+*/^(),]|\S", formula)
    code = ""
    for token in tokens:
        value = f"{called[token]!r}" if token in called else token
        if code and re.match(r"[\w(]", value) and re.match(r"[\w.)]", code[-1]) and not code.endswith("min"):
            code += "*"
        code += value
    try:
        return float(eval(code.replace("^", "**"), {"min": min, "__builtins__": {}}))
    except (SyntaxError, NameError, TypeError, ZeroDivisionError):
        return math.nan


# Findings -----------------------------------------------------------------------------------------------------------


def faults(corpus: Corpus, facts: Iterable[Fact]) -> list[str]:
    """Return what is wrong: texts that say something else than a fact, phrases of no text, and facts of one text only."""
    found = []
    for fact in facts:
        by_phrase = {phrase: list(stated(corpus, fact, phrase)) for phrase in fact.phrases}
        for one in {one.begin: one for ones in by_phrase.values() for one in ones}.values():
            if not is_right(fact, one.said):
                right = fact.value if fact.letters else fact.quoted()
                found.append(
                    f"{one.place}: {fact.name} is {right}, and the text has {one.said}: {one.around!r}"
                )
        found += [f"{fact.name}: no text has {phrase!r}" for phrase, ones in by_phrase.items() if not ones]
        files = {one.file for ones in by_phrase.values() for one in ones}
        if len(files) < 2:
            found.append(
                f"{fact.name} stands in {' and '.join(files) or 'no text'}: what one text says is no fact"
            )
    return found
