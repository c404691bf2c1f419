"""What pages, docstrings and lessons state of a fact is what it computes."""

import re
import tomllib
from inspect import signature

import pytest

from minipar.config.train_config import TrainConfig
from minipar.data_parallel import DDP
from minipar.inference import Options
from minipar.learn import facts as home
from minipar.learn.facts import facts, quote
from tests.learn.phrases import ROOT, faults, is_right, stated, texts

FACTS = facts()
TEXTS = texts()
SAID_BY_HAND = [name for name, fact in FACTS.items() if fact.phrases]


def test_every_text_states_what_is_computed():
    found = faults(TEXTS, FACTS.values())
    assert not found, "\n".join(found)


def test_facts_stand_once_and_each_is_used():
    texts = [path for room in ("minipar/learn", "benchmarks/guide") for path in (ROOT / room).rglob("*.toml")]
    data = "".join(path.read_text(encoding="utf-8") for path in texts)
    assert len(FACTS) == len(tomllib.loads((ROOT / "minipar/learn/facts.toml").read_text())["fact"])
    assert set(FACTS) - set(SAID_BY_HAND) <= set(re.findall(r"\{fact:(\w+)", data))
    phrases = [phrase for fact in FACTS.values() for phrase in fact.phrases]
    assert len(set(phrases)) == len(phrases)


# Faults ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAID_BY_HAND)
def test_a_changed_number_in_a_text_is_found(name):
    fact = FACTS[name]
    place, text, one = next(
        (place, text, one) for place, text in TEXTS.items() for one in stated(text, fact, fact.phrases[0])
    )
    wrong = re.sub(r"\d(?=\D*$)", lambda digit: str((int(digit[0]) + 1) % 10), one[1])
    if wrong == one[1]:
        wrong = "eleven"
    (found,) = faults({**TEXTS, place: text[: one.start(1)] + wrong + text[one.end(1) :]}, [fact])
    assert found.startswith(f"{place}: {name} is ")
    assert wrong in found


def test_a_changed_function_is_found(monkeypatch):
    monkeypatch.setitem(home.NAMES, "model_state_bytes", lambda *sizes, **kinds: 15.0)
    (found,) = faults(TEXTS, [FACTS["adam_bytes"]])
    assert "adam_bytes is 15, and the text has " in found


def test_a_phrase_of_no_text_is_found():
    nowhere = FACTS["prefill_ms"]._replace(phrases=("a prompt of {} elephants",))
    assert faults(TEXTS, [nowhere]) == ["prefill_ms: no text has 'a prompt of {} elephants'"]


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
