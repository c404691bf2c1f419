import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipar.config.model_config import ModelConfig
from minipar.inference.request import Request, check_request, distribution
from minipar.model.sampling import choose
from tests.strategies import seeds

probabilities = (
    st.lists(st.integers(0, 9), min_size=1, max_size=6)
    .filter(any)
    .map(lambda weights: torch.tensor(weights, dtype=torch.float64) / sum(weights))
)


@given(logits=st.lists(st.integers(-3, 3), min_size=1, max_size=8), k=st.integers(1, 9), p=st.floats(0.01, 1))
def test_top_k_and_top_p_keep_the_fewest_likely_tokens(logits, k, p):
    """By the definition: go through the tokens, likeliest first, of equal ones the lower id; stop at k, or at p."""
    request = Request((0,), 1, temperature=0.7, top_k=k, top_p=p)
    plain = distribution(torch.tensor(logits).float(), Request((0,), 1, temperature=0.7)).tolist()
    weights = [math.exp(logit / 0.7) for logit in logits]
    assert plain == pytest.approx([w / sum(weights) for w in weights])
    kept, total = set(), 0.0
    for i in sorted(range(len(plain)), key=lambda i: -plain[i]):
        if len(kept) == k or total >= p - 1e-12:
            break
        kept.add(i)
        total += plain[i]
    got = distribution(torch.tensor(logits).float(), request).tolist()
    assert got == pytest.approx([x / total if i in kept else 0.0 for i, x in enumerate(plain)])


@given(p=probabilities, seed=seeds, position=st.integers(0, 99))
def test_a_choice_is_a_function_of_seed_and_position(p, seed, position):
    state = torch.get_rng_state()
    token = choose(p, seed, position)
    assert p[token] > 0
    assert choose(p, seed, position) == token
    assert torch.equal(torch.get_rng_state(), state)


def test_tokens_are_drawn_with_their_probabilities():
    p, n = torch.tensor([0.1, 0.0, 0.6, 0.3], dtype=torch.float64), 4000
    for key in (lambda i: (i, 7), lambda i: (7, i)):  # over seeds, and over positions
        counts = Counter(choose(p, *key(i)) for i in range(n))
        for token, probability in enumerate(p.tolist()):
            sigma = math.sqrt(n * probability * (1 - probability))
            assert abs(counts[token] - n * probability) <= 4 * sigma


def test_a_similar_distribution_mostly_chooses_the_same():
    """At total variation distance d, with probability at least (1 - d) / (1 + d)."""
    p, q = (torch.tensor(x, dtype=torch.float64) for x in ([0.5, 0.3, 0.2], [0.4, 0.3, 0.3]))
    same = sum(choose(p, 0, i) == choose(q, 0, i) for i in range(4000)) / 4000
    assert same > 0.9 / 1.1 - 0.02


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (dict(prompt=()), "prompt is empty"),
        (dict(prompt="text"), "prompt='text'; use a list of token ids"),
        (dict(prompt=(1, -1)), "prompt has -1; use token ids"),
        (dict(prompt=(1, True)), "prompt has True"),
        (dict(max_new_tokens=0), "max_new_tokens=0; use a whole number of 1 or more"),
        (dict(temperature=-0.1), r"temperature=-0\.1; use a finite number, 0 or more"),
        (dict(temperature=math.nan), "temperature=nan"),
        (dict(temperature="hot"), "temperature='hot'"),
        (dict(temperature=10**400), "temperature=10+; use a finite number, 0 or more"),
        (dict(top_k=0), "top_k=0; use a whole number of 1 or more"),
        (dict(top_p=0), "top_p=0; use a number above 0, and at most 1"),
        (dict(top_p=1.1), r"top_p=1\.1"),
        (dict(top_p=10**400), "top_p=10+; use a number above 0"),
        (dict(seed=1.5), r"seed=1\.5; use a whole number"),
        (dict(seed=True), "seed=True; use a whole number"),
        (dict(arrival_s=-1), "arrival_s=-1"),
        (dict(arrival_s=10**400), "arrival_s=10+; use a finite number"),
        (dict(end_tokens=7), "end_tokens=7; use a list of token ids"),
    ],
)
def test_what_is_out_of_range_is_named(wrong, says):
    with pytest.raises(ValueError, match=says):
        Request(**{"prompt": (1, 2), "max_new_tokens": 3, **wrong})


def test_a_whole_number_of_any_size_is_a_temperature():
    """A rank divides logits by it, and a tensor cannot be divided by an int beyond 64 bits."""
    request = Request((1,), 1, temperature=10**20, top_p=1, arrival_s=10**20)
    assert [type(x) for x in (request.temperature, request.top_p, request.arrival_s)] == [float] * 3
    assert distribution(torch.tensor([1.0, 2.0]), request).tolist() == pytest.approx([0.5, 0.5])


def test_a_request_longer_than_the_model_is_refused():
    config = ModelConfig(vocab_size=5, dim=8, num_layers=1, num_heads=1, max_seq_len=6)
    check_request(Request((1, 4), 4), config)
    with pytest.raises(ValueError, match="2 tokens of prompt and max_new_tokens=5 exceed max_seq_len=6"):
        check_request(Request((1, 4), 5), config)
    with pytest.raises(ValueError, match="prompt has token 5; vocab_size=5 allows 0 to 4"):
        check_request(Request((5,), 1), config)
