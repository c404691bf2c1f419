from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar import DDP
from minipar.config.model_config import ModelConfig
from minipar.context import (
    document_cost,
    document_positions,
    next_tokens,
    pack_documents,
    share_documents,
)
from minipar.cost.model_table import MODELS
from minipar.cost.models import ModelShape
from minipar.model import IGNORE_INDEX, Transformer
from minipar.pipeline.partition import layer_costs
from tests.strategies import assert_equal_to


def test_positions_count_from_0_in_every_document():
    assert document_positions([3, 2, 1]).tolist() == [0, 1, 2, 0, 1, 0]
    assert document_positions([]).shape == (0,)


def test_the_last_token_of_a_document_predicts_nothing():
    targets = next_tokens(torch.tensor([5, 6, 7, 8, 9]), torch.tensor([0, 1, 2, 0, 1]))
    assert targets.tolist() == [6, 7, IGNORE_INDEX, 9, IGNORE_INDEX]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 8))
def test_packing_keeps_all_tokens_and_never_crosses_documents(lengths, seq_len):
    starts = [100 * i for i in range(len(lengths))]
    documents = [torch.arange(start, start + length) for start, length in zip(starts, lengths)]
    tokens, targets, positions = pack_documents(documents, seq_len)
    total = sum(lengths)
    assert tokens.flatten()[:total].equal(torch.cat(documents))
    assert tokens.shape == targets.shape == positions.shape == (-(-total // seq_len), seq_len)
    for row in range(len(tokens)):
        for t in range(seq_len):
            real, follows = row * seq_len + t < total, t + 1 < seq_len and row * seq_len + t + 1 < total
            same_document = real and follows and tokens[row, t + 1] == tokens[row, t] + 1
            assert targets[row, t] == (tokens[row, t + 1] if same_document else IGNORE_INDEX)
            begins = t == 0 or not real or tokens[row, t] != tokens[row, t - 1] + 1
            if real:
                assert positions[row, t] == (0 if begins else positions[row, t - 1] + 1)


# Documents dealt out to ranks ------------------------------------------------------------------------------------------


def last_s(costs, shares, speeds) -> float:
    return max(sum(costs[i] for i in share) / speed for share, speed in zip(shares, speeds))


@given(st.lists(st.integers(0, 20), max_size=7), st.integers(1, 3))
def test_the_last_rank_takes_at_most_four_thirds_of_the_least_time(costs, p):
    shares = share_documents(costs, [1] * p)
    assert sorted(i for share in shares for i in share) == list(range(len(costs)))
    best = min(
        last_s(costs, [[i for i in range(len(costs)) if to[i] == r] for r in range(p)], [1] * p)
        for to in product(range(p), repeat=len(costs))
    )
    assert last_s(costs, shares, [1] * p) <= (4 / 3 - 1 / (3 * p)) * best + 1e-9


def test_a_documents_cost_is_that_of_layers_at_its_length():
    for length in (1, 7, 64):
        config = ModelConfig(dim=32, num_layers=3, num_heads=4, vocab_size=64, max_seq_len=length + 1)
        matrices_and_attention = sum(layer_costs(Transformer(config, device="meta"))) - config.dim
        assert document_cost(ModelShape.of(config), length) == length * matrices_and_attention


def test_equal_tokens_are_not_equal_work():
    """Planted fault: to count tokens. A document of 64k costs more than twice as much as 32 of 2k."""
    shape, lengths = MODELS["llama-7b"], [65536] + [2048] * 32
    costs = [document_cost(shape, n) for n in lengths]
    assert 2 < costs[0] / sum(costs[1:]) < 2.3
    by_tokens, by_cost = (share_documents(work, [2, 1]) for work in (lengths, costs))
    assert by_cost[0] == [0]  # the faster machine gets the long document, and no other
    assert last_s(costs, by_tokens, [2, 1]) > 1.1 * last_s(costs, by_cost, [2, 1])


def test_what_cannot_be_shared_is_refused():
    with pytest.raises(ValueError, match="use costs of 0 or more, speeds above 0"):
        share_documents([1, -1], [1, 1])
    with pytest.raises(ValueError, match="speeds above 0"):
        share_documents([1], [0])


CONFIG = ModelConfig(
    vocab_size=16, dim=16, num_layers=2, num_heads=2, max_seq_len=8, documents=True, dropout=0.0
)


def drawn_documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(16, (n,), generator=generator) for n in (8, 3, 5, 2, 7, 2, 4)]


def of_rank(world, mean_of_means: bool):
    """(this rank's samples, gradients), each rank with the documents that its share of the work gives it."""
    documents = drawn_documents()
    costs = [document_cost(ModelShape.of(CONFIG), len(d)) for d in documents]
    own = share_documents(costs, [2, 1, 1])[world.rank]
    packed = pack_documents([documents[i] for i in own], CONFIG.max_seq_len)
    model = DDP(Transformer(CONFIG, dtype=torch.float64), world, reduce="mean" if mean_of_means else "sum")
    counted = (packed.targets != IGNORE_INDEX).sum()
    count = counted if mean_of_means else world.all_reduce(counted)
    model(packed.tokens, packed.positions, targets=packed.targets).div(count).backward()
    return packed, {name: p.grad for name, p in model.module.named_parameters()}


@pytest.mark.parametrize("mean_of_means", [False, True])
def test_unequal_documents_give_the_gradients_of_one_process(mean_of_means):
    """Planted fault: each rank divides by its own targets, and gradients are averaged."""
    found = minipar.run(of_rank, mean_of_means, world_size=3)
    assert len({len(packed.tokens) for packed, _ in found}) > 1
    one = Transformer(CONFIG, dtype=torch.float64)
    samples = [torch.cat(parts) for parts in zip(*(packed for packed, _ in found))]
    one.loss(*samples).backward()
    wanted = {name: p.grad for name, p in one.named_parameters()}
    for _, gradients in found:
        if mean_of_means:
            assert not torch.allclose(gradients["norm.weight"], wanted["norm.weight"], rtol=1e-3)
            continue
        for name, gradient in gradients.items():
            assert_equal_to(gradient, wanted[name], what=name)
