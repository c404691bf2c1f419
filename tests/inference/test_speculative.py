"""Speculation is exact: the distribution of what is written is the model's, by enumeration of every random decision."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipar.config.model_config import ModelConfig
from minipar.inference import Engine, ModelDraft, NGramDraft, Options, Request, metrics_of, speculative
from minipar.inference.speculative import Guess, KeyedDice, accept_or_resample, expected_tokens, residual
from minipar.simple.speculative import accept_or_resample as of_the_floor
from tests.examples import examples
from tests.inference.texts import alone
from tests.model.texts import loud_model
from tests.strategies import seeds

V, G = 4, 2


class Enumeration:
    """Dice that take each branch in turn, with its probability: `for dice in Enumeration.all(): run with dice`."""

    def __init__(self, decisions):
        self.decisions, self.taken, self.probability = decisions, 0, 1.0

    def _branch(self, probabilities):
        if self.taken == len(self.decisions):
            self.decisions.append([0, len(probabilities)])
        branch = self.decisions[self.taken][0]
        self.taken += 1
        self.probability *= probabilities[branch]
        return branch

    def accepts(self, i, probability):
        return self._branch([probability, 1 - probability]) == 0

    def draw(self, i, probabilities):
        return self._branch(probabilities.nan_to_num(0.0).tolist())

    @classmethod
    def all(cls):
        decisions = []
        while True:
            yield cls(decisions)
            while decisions and decisions[-1][0] + 1 == decisions[-1][1]:
                decisions.pop()
            if not decisions:
                return
            decisions[-1][0] += 1


def random_model(seed):
    """A next-token distribution for each text of up to G tokens, some of it 0."""
    generator = torch.Generator().manual_seed(seed)
    texts = [text for n in range(G + 1) for text in itertools.product(range(V), repeat=n)]
    weights = torch.rand(len(texts), V, generator=generator, dtype=torch.float64).pow(3)
    weights[torch.rand(weights.shape, generator=generator) < 0.2] = 0.0
    weights[:, 0] += 1e-3
    return dict(zip(texts, weights / weights.sum(1, keepdim=True)))


def written_distribution(p, q, rule):
    """The distribution of the first G + 1 tokens, when one pass writes some of them and p draws the rest."""
    total = dict.fromkeys(itertools.product(range(V), repeat=G + 1), 0.0)
    for dice in Enumeration.all():
        guesses = []
        for i in range(G):
            text = tuple(g.token for g in guesses)
            guesses.append(Guess(dice.draw(i, q[text]), q[text]))
        text = tuple(g.token for g in guesses)
        if dice.probability == 0:
            continue  # a draft that q never guesses
        written = rule([p[text[:i]] for i in range(G + 1)], guesses, dice)
        while len(written) <= G:
            written.append(dice.draw(len(written), p[tuple(written)]))
        total[tuple(written)] += dice.probability
    return total


def assert_exact(seed, same_draft=False, rule=accept_or_resample):
    p, q = random_model(seed), random_model(seed if same_draft else seed + 1)
    for text, probability in written_distribution(p, q, rule).items():
        exact = torch.stack([p[text[:i]][text[i]] for i in range(G + 1)]).prod().item()
        assert abs(probability - exact) <= 1e-12


@given(seed=seeds, same_draft=st.booleans(), rule=st.sampled_from([accept_or_resample, of_the_floor]))
@examples(6)
def test_what_is_written_has_the_models_distribution(seed, same_draft, rule):
    assert_exact(seed, same_draft, rule)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("residual", lambda p, q: p),  # the residual is not resampled
        ("acceptance", lambda p, q, token: 1.0),
        ("acceptance", lambda p, q, token: p[token].item()),  # without the ratio
    ],
)
def test_a_wrong_rule_is_seen(monkeypatch, name, wrong):
    monkeypatch.setattr(speculative, name, wrong)
    with pytest.raises(AssertionError):
        assert_exact(seed=3)


def test_a_guess_is_accepted_unless_the_distributions_differ():
    """With probability 1 - d, d their total variation distance."""
    p, q = random_model(0)[()], random_model(1)[()]
    accepted = sum(q[x].item() * speculative.acceptance(p, q, x) for x in range(V) if q[x] > 0)
    assert accepted == pytest.approx(1 - (p - q).abs().sum().item() / 2, abs=1e-12)
    assert residual(p, q).sum() == pytest.approx(1)


@pytest.mark.parametrize("a", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("g", [0, 1, 4])
def test_tokens_a_pass_are_the_formulas(a, g):
    """By the definition: i guesses are right and the next is wrong, or all are right."""
    mean = sum((i + 1) * a**i * (1 - a) for i in range(g)) + (g + 1) * a**g
    assert expected_tokens(a, g) == pytest.approx(mean)


def test_four_drafts_at_acceptance_0_8_write_3_36_tokens_a_pass():
    assert round(expected_tokens(0.8, 4), 2) == 3.36


def test_an_n_gram_goes_on_as_the_text_did():
    guess = NGramDraft(2).guess
    request = Request((1,), 1)
    assert [g.token for g in guess([1, 2, 3, 4, 5, 1, 2], request, 2, "draft")] == [3, 4]
    assert [g.token for g in guess([1, 2, 3, 1, 2, 4, 1, 2], request, 1, "draft")] == [
        4
    ]  # the latest occurrence
    assert guess([1, 2, 3], request, 2, "draft") == []
    assert [g.token for g in guess([5, 5, 5], request, 3, "draft")] == [5]


CONFIG = ModelConfig(vocab_size=13, dim=16, num_layers=2, num_heads=2, max_seq_len=40)


def test_the_first_layers_guess_for_the_whole_model():
    model, request = loud_model(CONFIG), Request((1, 2, 3), 30, temperature=2.0)
    draft = ModelDraft(model.stage(range(1), first=True, last=True))
    engine = Engine(model, Options(draft=draft, num_drafts=3))
    assert engine.run([request])[0].tokens == alone(model, request)
    assert 0 < metrics_of(engine.events).acceptance_rate < 1


@pytest.mark.parametrize("rule", ["same text", "rejection"])
def test_a_draft_that_is_the_model_is_always_right(rule):
    model = loud_model(CONFIG)
    options = Options(draft=ModelDraft(model), num_drafts=3, rule=rule)
    engine = Engine(model, options)
    requests = [Request((1, 2, 3), 17, temperature=t) for t in (0.0, 9.0)]
    results = engine.run(requests)
    assert metrics_of(engine.events).acceptance_rate == 1
    assert [r.tokens for r in results[:1]] == [alone(model, requests[0])]
    assert len(engine.steps) == 5  # the prompt and its first token, then 16 tokens, 4 a pass
    if rule == "same text":
        assert results[1].tokens == alone(model, requests[1])


def test_a_draft_of_a_shorter_context_guesses_from_the_end():
    small = ModelConfig(vocab_size=16, dim=8, num_layers=1, num_heads=2, max_seq_len=4)
    draft, text = ModelDraft(loud_model(small)), [3, 1, 4, 1, 5, 9, 2]
    request = Request(tuple(text), 4)
    guesses = ([guess.token for guess in draft.guess(own, request, 3, "token")] for own in (text, text[-4:]))
    assert next(guesses) == next(guesses)


def test_accepting_a_guess_says_nothing_of_the_token_drawn():
    """With the same random number, all that is drawn after a rejection would be of one kind."""
    half = torch.full((2,), 0.5)
    drawn = [
        dice.draw(0, half)
        for seed in range(64)
        if not (dice := KeyedDice(seed, 0)).accepts(0, half[0].item())
    ]
    assert 4 < sum(drawn) < len(drawn) - 4
