"""The floor's inference writes the floor model's text, and computes what the library's computes."""

import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.inference import speculative as library
from minipar.inference.blocks import BlockMemory, BlockPool, Pass, Rows
from minipar.inference.paged_model import PagedCore
from minipar.model import plain_attention
from minipar.simple.continuous import serve
from minipar.simple.generate import generate
from minipar.simple.paged import paged_attention
from minipar.simple.speculative import Dice, accept_or_resample, speculate
from minipar.simple.transformer import Groups, transformer
from tests.examples import examples
from tests.strategies import assert_equal_to, seeds


class Alone:
    """A group of one rank."""

    rank, size = 0, 1

    def all_reduce(self, x, op="sum"):
        return x

    def all_gather(self, x):
        return x


GROUPS = Groups(Alone(), Alone(), Alone())


def loud_model(groups):
    """The floor's model, with attention that matters."""
    model = transformer(groups)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter *= 3
    return model


MODEL = loud_model(GROUPS)
REQUESTS = [(b"def f(x):", 12), (b"import", 20), (b"r" * 17, 3), (b"ab", 9)]


@torch.no_grad()
def alone(prompt, num_tokens):
    """The plain loop: the whole text is read for each token."""
    text = list(prompt)
    for _ in range(num_tokens):
        text.append(int(MODEL(torch.tensor([text]))[0, -1].argmax()))
    return text[len(prompt) :]


def test_with_a_cache_the_text_is_the_same():
    for request in REQUESTS:
        want = alone(*request)
        assert generate(GROUPS, MODEL, *request) == want
        assert len(set(want)) > 1


@given(
    num_blocks=st.integers(26, 60),
    block_size=st.integers(1, 5),
    budget=st.sampled_from([1, 3, 8, 64]),
    seed=seeds,
)
@examples(9)
def test_served_together_each_gets_the_text_it_gets_alone(num_blocks, block_size, budget, seed):
    requests = [REQUESTS[i] for i in torch.randperm(4, generator=torch.Generator().manual_seed(seed))]
    num_blocks = -(-num_blocks // block_size)  # 26 to 60 tokens: enough for the longest, too few for all
    texts, steps = serve(GROUPS, MODEL, requests, num_blocks, block_size, budget)
    assert texts == [alone(*request) for request in requests]
    assert max(steps) <= budget


def test_speculation_writes_the_same_text_in_fewer_passes():
    requests = [*REQUESTS, (b"ab", 40)]  # the last text repeats itself
    runs = [speculate(GROUPS, MODEL, *request) for request in requests]
    assert [text for text, _ in runs] == [alone(*request) for request in requests]
    assert sum(num_passes for _, num_passes in runs) < sum(len(text) for text, _ in runs)
    assert speculate(GROUPS, MODEL, b"ab", 30, temperature=2.0)[0] != alone(b"ab", 30)


def on_ranks(world):
    tp, one = world, world.subgroup([world.rank], "one")
    groups = Groups(tp, one, one)
    model = loud_model(groups)
    served, _ = serve(groups, model, REQUESTS, 9, 4, 8)
    return (
        [generate(groups, model, *r) for r in REQUESTS],
        served,
        [speculate(groups, model, *r)[0] for r in REQUESTS],
    )


def test_tp_ranks_write_what_one_process_writes():
    want = [alone(*request) for request in REQUESTS]
    for texts in minipar.run(on_ranks, world_size=2):
        assert texts == (want, want, want)


def test_paged_attention_is_that_of_the_library():
    draw = torch.Generator().manual_seed(0)
    randn = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)  # noqa: E731
    memory, q, k, v = randn(2, 9, 3, 2, 4), randn(6, 2, 1, 4), randn(6, 2, 1, 4), randn(6, 2, 1, 4)
    pieces = [([1, 1], 4, [7, 2]), ([1], 0, [5]), ([1, 1, 1], 1, [0, 8])]
    theirs = BlockMemory(BlockPool(9, 3), 2, 4, torch.float64, torch.device("cpu"))
    theirs.data.copy_(memory)
    core = PagedCore(plain_attention, theirs, Pass.of([Rows(*p) for p in pieces], 3, torch.device("cpu")))
    assert_equal_to(paged_attention(memory, 3, pieces, q, k, v), core(q, k, v))


@given(seed=seeds)
def test_what_is_accepted_is_what_the_library_accepts(seed):
    draw = torch.Generator().manual_seed(seed)
    p, q = torch.rand(2, 3, 5, generator=draw, dtype=torch.float64).softmax(-1)
    guesses = [(int(torch.multinomial(q[i], 1, generator=draw)), q[i]) for i in range(2)]
    theirs = [library.Guess(*guess) for guess in guesses]
    assert accept_or_resample(p, guesses, Dice(seed)) == library.accept_or_resample(p, theirs, Dice(seed))
