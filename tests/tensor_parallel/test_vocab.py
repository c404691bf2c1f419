"""The embedding and the loss over a split vocabulary are those over the whole one, without ever making it."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import minipar
from minipar.config.model_config import ModelConfig
from minipar.mesh import placement_of
from minipar.model import Transformer, WeightGradients, cross_entropy_sum, defer_weight_gradients
from minipar.tensor_parallel import VocabParallelEmbedding, tensor_parallel, vocab_parallel_cross_entropy
from minipar.tensor_parallel.vocab import VocabParallelTiedHead, vocab_bounds
from tests.strategies import assert_equal_to, seeds, world_sizes


def embed(world, vocab: int, dim: int, batch: int, length: int, sequence_parallel: bool, seed: int) -> None:
    torch.manual_seed(seed)
    whole = nn.Embedding(vocab, dim, dtype=torch.float64)
    tokens = torch.randint(vocab, (batch, length))
    dy = torch.randn(batch, length, dim, dtype=torch.float64)
    y = whole(tokens)
    y.backward(dy)
    cut = VocabParallelEmbedding.from_embedding(whole, world, sequence_parallel, uneven=True)
    mine = slice(world.rank * length // world.size, (world.rank + 1) * length // world.size)
    mine = mine if sequence_parallel else slice(None)
    out = cut(tokens)
    assert torch.equal(out, y[:, mine])  # one rank adds the row and the others zeros
    out.backward(dy[:, mine])
    assert_equal_to(cut.weight.grad, placement_of(cut.weight).slice_of(whole.weight.grad), what="dw")


@given(st.data(), world_sizes)
def test_the_split_embedding_is_the_embedding(data, tp):
    vocab = data.draw(st.integers(1, 3)) * tp - data.draw(st.integers(0, 1)) * (tp > 2)
    if 0 in [b - a for a, b in zip(vocab_bounds(vocab, tp), vocab_bounds(vocab, tp)[1:])]:
        vocab = tp
    draws = [data.draw(st.integers(1, 4)), data.draw(st.integers(1, 2)), tp * data.draw(st.integers(1, 3))]
    minipar.run(embed, vocab, *draws, data.draw(st.booleans()), data.draw(seeds), world_size=tp)


def lose(
    world, vocab: int, shape, ignored: float, smoothing: float, reduction: str, scale: float, seed: int
) -> None:
    torch.manual_seed(seed)
    logits = (torch.randn(*shape, vocab, dtype=torch.float64) * scale).requires_grad_()
    targets = torch.randint(vocab, shape)
    targets[torch.rand(shape) < ignored] = -100
    flat = logits.flatten(0, -2), targets.flatten()
    want = F.cross_entropy(*flat, label_smoothing=smoothing, reduction=reduction)
    want = want.view(shape) if reduction == "none" else want
    weights = torch.randn_like(want)
    (want * weights).sum().backward()
    edges = vocab_bounds(vocab, world.size)
    mine = logits.detach()[..., edges[world.rank] : edges[world.rank + 1]].requires_grad_()
    loss = vocab_parallel_cross_entropy(
        world, mine, targets, label_smoothing=smoothing, reduction=reduction, vocab_size=vocab
    )
    assert torch.equal(loss.isnan(), want.isnan())
    assert_equal_to(loss.detach().nan_to_num(), want.detach().nan_to_num(), what="loss")
    (loss * weights).sum().backward()
    want_gradient = logits.grad[..., edges[world.rank] : edges[world.rank + 1]]
    assert_equal_to(mine.grad.nan_to_num(), want_gradient.nan_to_num(), what="dlogits")


@given(st.data(), world_sizes)
def test_the_split_loss_is_torch_s(data, tp):
    vocab = data.draw(st.integers(1, 4)) * tp + (1 if tp == 2 else 0)
    minipar.run(
        lose,
        vocab,
        data.draw(st.sampled_from([(5,), (2, 3), (1, 1)])),
        data.draw(st.sampled_from([0.0, 0.4, 1.0])),
        data.draw(st.sampled_from([0.0, 0.1, 1.0])),
        data.draw(st.sampled_from(["mean", "sum", "none"])),
        data.draw(
            st.sampled_from([1.0, 300.0])
        ),  # exponentials that overflow unless the maximum is subtracted
        data.draw(seeds),
        world_size=tp,
    )


def long_rows(world) -> None:
    """More logits than are turned into probabilities at a time."""
    lose(world, 1 << 16, (2, 40), 0.2, 0.1, "mean", 1.0, 0)


def test_many_logits_are_worked_off_in_blocks():
    minipar.run(long_rows, world_size=2)


def half_precision(world) -> tuple:
    torch.manual_seed(0)
    logits = torch.randn(6, 64, dtype=torch.bfloat16)
    targets = torch.randint(64, (6,))
    mine = logits.chunk(world.size, 1)[world.rank].requires_grad_()
    loss = vocab_parallel_cross_entropy(world, mine, targets)
    loss.backward()
    return loss.detach(), F.cross_entropy(logits.float(), targets), mine.grad.dtype


def gradient_of_bf16_logits(world, at_target: float) -> tuple[torch.Tensor, torch.Tensor]:
    """All ranks' columns of dlogits, and those of one process, for targets of probability 0.01 ... 0.9998."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 256, generator=generator).bfloat16()
    targets = torch.randint(256, (64,), generator=generator)
    logits[torch.arange(64), targets] = at_target
    whole = logits.clone().requires_grad_()
    cross_entropy_sum(whole, targets).backward()
    mine = logits.chunk(world.size, 1)[world.rank].clone().requires_grad_()
    vocab_parallel_cross_entropy(world, mine, targets, reduction="sum").backward()
    return world.all_gather(mine.grad.t().contiguous()).t(), whole.grad


@pytest.mark.parametrize("at_target", [1.0, 8.0, 11.0, 14.0])
def test_bf16_logit_gradients_match_one_process_however_sure(at_target):
    """To one rounding of bf16: p - 1 is rounded, not p and then the difference."""
    found, want = minipar.run(gradient_of_bf16_logits, at_target, world_size=2)[0]
    assert want.any(1).all()
    assert ((found.double() - want.double()).abs() / want.double().abs()).max() <= 2**-7


def test_half_precision_logits_are_summed_in_single():
    loss, want, dtype = minipar.run(half_precision, world_size=4)[0]
    assert loss.dtype == torch.float32
    assert dtype == torch.bfloat16
    assert_equal_to(loss, want, rtol=1e-6, what="loss")


def deferred_head(world):
    """The number of products that a tied head defers, and its weight's gradient until they have run."""
    head, weight, queue = VocabParallelTiedHead(world), nn.Parameter(torch.ones(4, 2)), WeightGradients()
    defer_weight_gradients(head, queue)
    head(torch.ones(1, 2, requires_grad=True), weight).sum().backward()
    return len(queue), weight.grad


def test_a_split_tied_head_defers_its_weights_gradient():
    assert minipar.run(deferred_head, world_size=1) == [(1, None)]


def test_unless_told_an_embedding_gives_every_rank_all_tokens():
    def rows(world):
        weight = nn.Parameter(torch.full((1, 1), world.rank + 1.0))
        return VocabParallelEmbedding(weight, 2, world)(torch.tensor([[0, 1]])).tolist()

    assert minipar.run(rows, world_size=2) == [[[[1.0], [2.0]]]] * 2


def refuse(world) -> list[str]:
    lines = []
    for attempt in (
        lambda: vocab_parallel_cross_entropy(
            world, torch.zeros(1, 2), torch.zeros(1).long(), reduction="max"
        ),
        lambda: VocabParallelEmbedding.from_embedding(nn.Embedding(9, 2), world),
    ):
        with pytest.raises(ValueError) as error:
            attempt()
        lines.append(str(error.value))
    return lines


def test_bad_requests_are_refused_with_what_would_work():
    assert minipar.run(refuse, world_size=2)[0] == [
        "reduction='max' is unknown; use mean, sum or none",
        "tp=2 does not divide num_embeddings=9; use 1, 3 or 9",
    ]


OUTSIDE = [
    ("tokens", 300, "tokens range from 3 to 300; vocab_size=256 allows 0 to 255"),
    ("tokens", -7, "tokens range from -7 to 9; vocab_size=256 allows 0 to 255"),
    (
        "targets",
        300,
        "targets range from 3 to 300; vocab_size=256 allows 0 to 255, and -100 for one that does not count",
    ),
    (
        "targets",
        -7,
        "targets range from -7 to 9; vocab_size=256 allows 0 to 255, and -100 for one that does not count",
    ),
]


def refusals_of_what_is_outside(world) -> list[str]:
    """By the model of one process, the split model, and the split embedding or loss alone."""
    config = ModelConfig(vocab_size=256, dim=16, num_layers=1, num_heads=2, max_seq_len=16)
    split = tensor_parallel(Transformer(config), world)
    lines = []
    for name, value, _ in OUTSIDE:
        batch = {"tokens": torch.tensor([[3, 9, 4, 8]]), "targets": torch.tensor([[9, -100, 8, 3]])}
        batch[name][0, 2] = value
        alone = (
            partial(split.embedding, batch["tokens"])
            if name == "tokens"
            else partial(vocab_parallel_cross_entropy, world, torch.zeros(1, 4, 128), batch["targets"])
        )
        for attempt in (
            partial(Transformer(config).loss, *batch.values()),
            partial(split.loss, *batch.values()),
            alone,
        ):
            with pytest.raises(ValueError) as error:
                attempt()
            lines.append(str(error.value))
    return lines


def test_out_of_vocabulary_ids_are_refused_as_in_one_process():
    want = [line for _, _, line in OUTSIDE for _ in range(3)]
    assert minipar.run(refusals_of_what_is_outside, world_size=2) == [want] * 2


def sent_by_the_loss(world, smoothing: float) -> tuple[int, int]:
    comm = world.using("ring")
    logits = torch.randn(24, 8, dtype=torch.float64, requires_grad=True)
    comm.traffic.reset()
    loss = vocab_parallel_cross_entropy(comm, logits, torch.randint(8, (24,)), label_smoothing=smoothing)
    loss.backward()
    return comm.traffic.sent_bytes


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("smoothing", "numbers"), [(0.0, 3), (0.1, 4)])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_the_loss_sends_three_numbers_a_target(tp, smoothing, numbers):
    want = 2 * (tp - 1) * numbers * 24 * 8 // tp
    assert minipar.run(sent_by_the_loss, smoothing, world_size=tp) == [want] * tp
