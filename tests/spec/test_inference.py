"""The judges of inference: nothing that is right is called wrong, and every branch of the dice is taken once."""

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from minipar.simple import generate, paged, speculative
from minipar.spec import batching, check, kv_cache, speculation
from minipar.spec import paged as paged_spec
from minipar.spec.question import ALONE, ask
from tests.examples import examples
from tests.spec.library import LIBRARY
from tests.spec.wrong.inference import pages, scheduler
from tests.spec.wrong.tables import RIGHT
from tests.strategies import seeds

SCHEDULERS = {
    "floor": scheduler(),
    "library": LIBRARY["scheduler_step"],
    **RIGHT["scheduler_step"],
}


# A prompt takes the blocks of a text behind it when it is too late for another, which waited with nothing free.
TOO_LATE = batching.Case(
    [(1, 15, 12), (2, 14, 2), (3, 4, 12), (3, 12, 5), (4, 2, 12), (5, 1, 6), (5, 10, 12), (6, 5, 8)], 8, 4, 14
)


@st.composite
def cases(draw):
    requests = st.tuples(st.integers(0, 6), st.integers(1, 12), st.integers(1, 9))
    several = sorted(draw(st.lists(requests, max_size=8)))
    size = draw(st.integers(1, 5))
    longest = max((-(-(prompt + new) // size) for _, prompt, new in several), default=1)
    return batching.Case(several, longest + draw(st.integers(0, 4)), size, draw(st.integers(1, 14)))


@pytest.mark.parametrize("manner", SCHEDULERS)
@given(case=cases())
@example(case=TOO_LATE)
@examples(30)
def test_no_right_scheduler_is_called_wrong(manner, case):
    assert batching._served(SCHEDULERS[manner], case) is None


@given(uses=st.lists(st.integers(0, 6), min_size=1, max_size=6), seed=st.integers(0, 5))
@examples(20)
def test_no_right_cache_is_called_wrong(uses, seed):
    question = replace(kv_cache.CACHE, draw=lambda size, seed, kind: kv_cache.draw([uses], seed, kind))
    assert ask(ALONE, generate.Cache, question, seed) is None


@given(
    size=st.integers(1, 5),
    texts=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), min_size=1, max_size=4),
    seed=st.integers(0, 5),
    spare=st.integers(0, 1),
)
@examples(20)
def test_no_right_paged_attention_is_called_wrong(size, texts, seed, spare):
    texts = [(begin, new if begin else max(1, new)) for begin, new in texts]
    seed += paged_spec.SPARE * spare
    question = replace(
        paged_spec.ATTENTION, draw=lambda _, seed, kind: paged_spec.draw((size, texts), seed, kind)
    )
    assert ask(ALONE, pages(paged.paged_attention), question, seed) is None


@given(
    vocab_size=st.integers(1, 4),
    num_guesses=st.integers(0, 3),
    seed=seeds,
    sharp=st.sampled_from(["", "equal", "certain"]),
)
@examples(20)
def test_the_probabilities_of_all_branches_add_up_to_one(vocab_size, num_guesses, seed, sharp):
    case = speculation.Case(vocab_size, num_guesses, seed % 1000, sharp=sharp)
    q = [case.q((0,) * i) for i in range(num_guesses)]
    p = torch.stack([case.p((0,) * i) for i in range(num_guesses + 1)])
    guessed = tuple(int(x.argmax()) for x in q)
    branches = list(speculation._texts(speculative.accept_or_resample, p, q, guessed, case))
    assert sum(weight for _, weight in branches) == pytest.approx(1, abs=1e-12)
    assert speculation._right(speculative.accept_or_resample, case) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ((0,), r"p = \[.*\], q = \[.*\]: token 0 comes first with"),
        ((1, 0), r"2 guesses: token 0 comes as number 1 after \[1\] with"),
        ((1, 0, 0), r"2 guesses: token 0 comes as number 2 after \[1, 0\] with"),
    ],
)
def test_the_words_name_a_wrong_token_after_the_shortest_prefix(text, says):
    case = speculation.Case(2, 2, 0)
    found = case.law(()).clone()
    *prefix, token = text
    found[(*prefix, token)] *= 0.5  # and the other token after this prefix takes what is lost
    found[(*prefix, 1 - token)] += found[(*prefix, token)]
    said = speculation._difference(found, case, 1e-12)
    assert re.search(says, said), said


def test_the_words_name_a_cause_that_the_first_token_shows():
    case = speculation.Case(3, 1, 2)
    always_kept = case.law(()) * (case.q(()) / case.p(()))[:, None]
    said = speculation._difference(always_kept, case, 1e-12)
    assert said.endswith(": the guess is kept whatever the model says"), said


def test_a_pool_is_asked_wherever_attention_is():
    for stage in ("runs", "drawn"):
        assert not check("paged_attention", pages(pool=int), [stage]).ok
