"""What several texts state is the same in all of them: lessons, book, museum, docs, README, docstrings."""

import tomllib
from inspect import signature

import pytest

from minipar.config.train_config import TrainConfig
from minipar.data_parallel import DDP
from minipar.inference import Options
from minipar.learn import facts as home
from minipar.learn.facts import Fact, facts, quote
from tests.learn.phrases import DATA, ROOT, Corpus, faults, is_formula, is_right, stated, texts

FACTS = facts()
CORPUS = Corpus(texts())
# Data of which pages are made. In claims.toml, `said` has other people's figures.
QUOTING = (
    "quiz/book.toml", "quiz/designs.toml", "quiz/walkthroughs.toml", "claims.toml", "guide/strategies.toml",
    "guide/workloads.toml", "guide/tuning.toml", "museum/gallery.toml",
)  # fmt: skip
MADE = (
    "docs/generated/claims.md",
    "docs/generated/strategies.md",
    "docs/generated/workloads.md",
    "docs/generated/tuning.md",
    "docs/generated/routing.md",
    "lessons/interview/",
    DATA[0],
)


def test_every_text_states_the_same_figures():
    found = faults(CORPUS, FACTS.values())
    assert not found, "\n".join(found)


def test_facts_stand_once():
    entries = tomllib.loads((ROOT / "minipar/learn/facts.toml").read_text(encoding="utf-8"))["fact"]
    assert len(FACTS) == len(entries) >= 100
    phrases = [phrase for fact in FACTS.values() for phrase in fact.phrases]
    assert len(set(phrases)) == len(phrases)


def places(fact: Fact):
    return [one for phrase in fact.phrases for one in stated(CORPUS, fact, phrase)]


def test_data_quotes_by_name_what_several_pages_state():
    raw = {name: (ROOT / "minipar/learn" / name).read_text(encoding="utf-8") for name in QUOTING}
    raw["claims.toml"] = "\n".join(x for x in raw["claims.toml"].splitlines() if not x.startswith("said"))
    data = Corpus(raw)
    for fact in FACTS.values():
        pages = {one.file for one in places(fact) if one.place.startswith(MADE)}
        if len(pages) > 1 and not fact.letters:
            literal = [one for phrase in fact.phrases for one in stated(data, fact, phrase)]
            assert not [
                one for one in literal if one.said[0].isdigit() and one.said in map(fact.quoted, fact.forms)
            ]


# Faults ---------------------------------------------------------------------------------------------------------------


def other(number: str) -> str:
    """Return the number or formula with its last digit changed."""
    at = max(at for at, letter in enumerate(number) if letter.isdigit())
    return number[:at] + str((int(number[at]) + 1) % 10) + number[at + 1 :]


def check_a_changed_text_is_found(fact: Fact) -> None:
    for one in places(fact)[-1:]:
        if any(map(str.isdigit, one.said)):
            found = faults(CORPUS.changed(one, other(one.said)), [fact])
            assert any(
                line.startswith(f"{one.place}: {fact.name} is ") and other(one.said) in line for line in found
            )


@pytest.mark.parametrize("name", list(FACTS)[::12])
def test_a_changed_number_in_a_text_is_found(name):
    check_a_changed_text_is_found(FACTS[name])


@pytest.mark.thorough
def test_a_changed_number_in_a_text_is_found_for_every_fact():
    for fact in FACTS.values():
        check_a_changed_text_is_found(fact)


def test_a_changed_function_is_found(monkeypatch):
    monkeypatch.setitem(home.NAMES, "model_state_bytes", lambda *sizes, **kinds: 15.0)
    found = faults(CORPUS, [FACTS["adam_bytes"]])
    assert len(found) > 10
    assert all("adam_bytes is 15, and the text has " in line for line in found)


def test_a_fact_of_one_text_or_none_is_found():
    nowhere = FACTS["prefill_ms"]._replace(phrases=("a prompt of {} elephants",))
    assert faults(CORPUS, [nowhere]) == [
        "prefill_ms: no text has 'a prompt of {} elephants'",
        "prefill_ms stands in no text: what one text says is no fact",
    ]
    once = FACTS["prefill_ms"]._replace(phrases=("this model about {} ms",))
    (found,) = faults(CORPUS, [once])
    assert "stands in lessons/interview/inference.md: " in found


# Reading and quoting --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said", "right"),
    [
        ("bubble_of_the_time", "(p-1)/(m+p-1)", True),
        ("bubble_of_the_time", "(p-1)/m", False),
        ("bubble_of_the_time", "(p-1)/(", False),
        ("ring_attention", "2 N h_kv (P-1)/P", True),
        ("ring_attention", "2 (p-1)/p N h", True),
        ("live_1f1b", "min(p - rank, m)", True),
        ("tp_all_reduces", "four", True),
        ("tp_all_reduces", "2", False),
        ("zigzag_gain", "4/7", True),
        ("ring_tokens_h100_network", "1,236", True),
        ("ring_tokens_h100_network", "1,240", True),
        ("ring_tokens_h100_network", "1,200", False),
        ("zero1_7b5_over_64", "31.41", True),
        ("zero1_7b5_over_64", "31.44", False),
        ("fp16_smallest", "6e-8", True),
    ],
)
def test_numbers_and_formulas_are_read_as_people_write_them(name, said, right):
    assert is_right(FACTS[name], said) == right
    assert is_formula(said) or not FACTS[name].letters


def test_a_text_quotes_a_fact_by_name():
    assert quote("{fact:prefill_ms} ms") == "43 ms"
    assert quote({"a": ["{fact:prefill_ms:.1f}", 1], "b": "{batch} {x}"}) == {
        "a": ["43.4", 1],
        "b": "{batch} {x}",
    }
    assert quote("{fact:ring_tokens_h100_network}") == "1,240"
    with pytest.raises(ValueError, match="fact=prefil_ms is not in facts.toml; use prefill_ms, "):
        quote("{fact:prefil_ms} ms")


def test_written_values_are_the_librarys():
    """What minipar.cost has no function for is written into facts.toml, and declared elsewhere in the library."""
    assert signature(DDP).parameters["bucket_mb"].default == FACTS["bucket_mb"].computed()
    assert TrainConfig.__dataclass_fields__["bucket_mb"].default == FACTS["bucket_mb"].computed()
    assert Options().block_size == FACTS["block_tokens"].computed()
    about_loss_scale = TrainConfig.__dataclass_fields__["loss_scale"].metadata["help"]
    assert f"after {FACTS['loss_scale_steps'].computed():.0f} good steps" in about_loss_scale
