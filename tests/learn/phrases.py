"""Where texts written by hand state a fact, found by its phrases, and what they say there. test_facts.py uses it."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from minipar.learn.facts import Fact

ROOT = Path(__file__).parents[2]
WRITTEN_BY_HAND = (
    "README.md", "CONTRIBUTING.md", "docs/*.md", "docs/guide/*.md", "lessons/README.md", "website/pages/*.md",
    "minipar/simple/README.md", "minipar/simple/*.py", "minipar/cost/*.py", "lessons/*.ipynb",
)  # fmt: skip
WORDS = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
)
NUMBER = rf"(?<![\w.,])(?:\d(?:[\d.,]*\d)?(?:e-?\d+)?|(?i:{'|'.join(WORDS)}))(?!\w)"
FORMULA = r"(?:[\w+\-*/^(). ]|, (?=\w+\)))+?"


def texts() -> dict[str, str]:
    """Return all texts by the place where they stand: a file, or "FILE, cell N"."""
    found = {}
    for path in sorted(path for pattern in WRITTEN_BY_HAND for path in ROOT.glob(pattern)):
        name, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            for number, cell in enumerate(json.loads(text)["cells"]):
                if cell["cell_type"] == "markdown":
                    found[f"{name}, cell {number}"] = readable("".join(cell["source"]))
        else:
            found[name] = readable(text)
    return found


def readable(text: str) -> str:
    """Return a text as it is read aloud: without marks of Markdown, on one line, in one spelling."""
    text = re.sub(r"`|(?<!\d)\*\*", "", text)
    text = re.sub(r"(?<=\d) ?(?:%|per cent\b)", "%", text)
    return re.sub(r"\s+", " ", text)


def stated(text: str, fact: Fact, phrase: str) -> Iterator[re.Match[str]]:
    """Yield each occurrence of a phrase; its group 1 is the number or formula."""
    slots = {"{}": f"({FORMULA if fact.letters else NUMBER})", "#": NUMBER}
    pieces = re.split(r"(\{\}|#)", phrase)
    if max(pieces, key=len) in text:
        yield from re.finditer("".join(slots.get(piece, re.escape(piece)) for piece in pieces), text)


def is_right(fact: Fact, said: str) -> bool:
    """Return whether what a text says is the fact's number, in one of its formats, or a formula that gives the same."""
    if fact.letters:
        return all(math.isclose(evaluated(said, fact, at), fact.computed(**at)) for at in fact.at)
    number = WORDS.index(said.lower()) if said.lower() in WORDS else float(said.replace(",", ""))
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


def faults(texts: Mapping[str, str], facts: Iterable[Fact]) -> list[str]:
    """Return what is wrong: texts that say something else than a fact, and phrases of no text."""
    found = []
    for fact in facts:
        for phrase in fact.phrases:
            ones = [(place, one) for place, text in texts.items() for one in stated(text, fact, phrase)]
            found += [
                f"{place}: {fact.name} is {fact.value if fact.letters else fact.quoted()}, and the text has {one[0]!r}"
                for place, one in ones
                if not is_right(fact, one[1])
            ]
            if not ones:
                found.append(f"{fact.name}: no text has {phrase!r}")
    return found
