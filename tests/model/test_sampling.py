import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipar.config.model_config import ModelConfig
from minipar.model import Transformer, generate
from minipar.model.sampling import NOT_FINITE, NotFinite, choose_rows
from tests.model.texts import ROUTED_ALONE, ROUTED_TOGETHER, configs, draw_tokens, loud_model
from tests.strategies import assert_equal_to, seeds

CONFIG = ModelConfig(vocab_size=13, dim=16, num_layers=2, num_heads=2, max_seq_len=8, dropout=0.3)


@pytest.fixture
def model():
    model = Transformer(CONFIG)
    with torch.no_grad():
        for p in model.parameters():
            p *= 20  # so that what it writes depends on every layer
    return model


def test_each_token_is_the_likeliest_after_the_last_window(model):
    tokens = generate(model, [1, 2, 3], 12)
    assert tokens[:3].tolist() == [1, 2, 3]
    assert tokens.shape == (15,)
    model.eval()
    for t in range(3, 15):
        assert tokens[t] == model(tokens[None, max(0, t - 8) : t])[0, -1].argmax()


@torch.no_grad()
def reading_all_anew(model, batch, num_tokens):
    """The text, and the logits from which each token of it was taken."""
    read = []
    for _ in range(num_tokens):
        read.append(model(batch[:, -model.config.max_seq_len :])[:, -1])
        batch = torch.cat((batch, read[-1].argmax(-1, keepdim=True)), dim=1)
    return batch, read


@given(
    config=configs(experts=({}, ROUTED_ALONE, *ROUTED_TOGETHER)),
    prompt=st.integers(1, 15),
    num_tokens=st.integers(0, 8),
    batch=st.integers(1, 3),
    seed=seeds,
)
def test_what_is_written_is_what_a_model_writes_that_reads_all_anew(config, prompt, num_tokens, batch, seed):
    model, tokens, read = loud_model(config, seed), draw_tokens(seed, batch, prompt), []
    hook = model.register_forward_hook(lambda module, x, logits: read.append(logits[:, -1]))
    text = generate(model, tokens, num_tokens)
    hook.remove()
    want, want_read = reading_all_anew(model, tokens, num_tokens)
    assert torch.equal(text, want)
    for logits, want_logits in zip(read, want_read, strict=True):
        assert_equal_to(logits, want_logits, rtol=1e-9)


def test_rows_of_a_batch_are_continued_alike(model):
    both = generate(model, torch.tensor([[1, 2], [5, 0]]), 6)
    assert both.shape == (2, 8)
    assert torch.equal(both[1], generate(model, torch.tensor([5, 0]), 6))


def test_sampling_repeats_by_seed_and_keeps_the_global_state(model):
    state = torch.get_rng_state()
    first, again, other = (generate(model, [1], 40, temperature=30.0, seed=s) for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_smallest_temperature_takes_the_most_likely_token():
    logits = torch.tensor([[1.0, 3.0, -2.0], [4.0, 3.0, -2.0]])
    assert choose_rows(logits, 1e-320, 0, 0).tolist() == [[1], [0]]


def test_a_row_has_the_text_of_its_prompt_alone_with_its_seed(model):
    both = generate(model, [[1, 2], [1, 2]], 20, temperature=30.0, seed=3)
    assert torch.equal(both[1], generate(model, [1, 2], 20, temperature=30.0, seed=4))
    assert not torch.equal(both[0], both[1])


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logits_that_are_not_finite_choose_no_token(model, wrong, temperature):
    logits = torch.tensor([[1.0, wrong, 3.0], [1.0, 2.0, 300.0]])
    assert choose_rows(logits, temperature, 0, 0).tolist() == [[NOT_FINITE], [2]]
    with torch.no_grad():
        model.head.weight[3, 0] = wrong
    with pytest.raises(NotFinite, match="use another checkpoint"):
        generate(model, [1], 2, temperature)


def test_generating_keeps_every_modules_training_mode(model):
    model.layers["1"].eval()
    modes = [m.training for m in model.modules()]
    generate(model, [1], 2)
    assert [m.training for m in model.modules()] == modes
    assert model.training
    assert not model.layers["1"].mlp.training


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda m: generate(m, [], 3), r"prompt_tokens has shape \(0,\)"),
        (lambda m: generate(m, torch.zeros(1, 1, 1), 3), "prompt_tokens has shape"),
        (lambda m: generate(m, [1], -1), "num_tokens=-1"),
        (lambda m: generate(m, [1], 1, temperature=-0.5), "temperature=-0.5"),
        (lambda m: generate(m, [13], 1), "prompt_tokens range from 13 to 13; vocab_size=13 allows 0 to 12"),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_refused(model, call, says):
    with pytest.raises(ValueError, match=says):
        call(model)
