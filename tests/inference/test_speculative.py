"""Drafts, and the rules by which guesses are kept; that their law is the model's, minipar.spec.speculation judges."""

import pytest
import torch

from minipar.config.model_config import ModelConfig
from minipar.inference import Engine, ModelDraft, NGramDraft, Options, Request, metrics_of, speculative
from minipar.inference.speculative import KeyedDice, expected_tokens, residual
from tests.inference.texts import alone, tokens_of
from tests.model.texts import loud_model


def test_a_guess_is_accepted_unless_the_distributions_differ():
    """With probability 1 - d, d their total variation distance."""
    p, q = torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.6, 0.0]], dtype=torch.float64)
    accepted = sum(q[x].item() * speculative.acceptance(p, q, x) for x in range(2))
    assert accepted == pytest.approx(1 - (p - q).abs().sum().item() / 2, abs=1e-12)
    assert residual(p, q).sum() == pytest.approx(1)


@pytest.mark.parametrize("a", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("g", [0, 1, 4])
def test_tokens_a_pass_are_the_formulas(a, g):
    """By the definition: i guesses are right and the next is wrong, or all are right."""
    mean = sum((i + 1) * a**i * (1 - a) for i in range(g)) + (g + 1) * a**g
    assert expected_tokens(a, g) == pytest.approx(mean)


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
    assert tokens_of(results[:1]) == [alone(model, requests[0])]
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
