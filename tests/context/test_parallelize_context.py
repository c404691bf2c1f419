"""The whole model on split sequences is the model of one process: loss, gradients, steps; with dp and tp beside it."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.config.context_limits import LAYOUTS
from minipar.config.mesh_rules import check_context_parallel
from minipar.config.model_config import ModelConfig
from minipar.context import context_parallel, local_batch, next_tokens
from minipar.mesh import placement_of
from minipar.model import IGNORE_INDEX, Transformer
from minipar.tensor_parallel import tensor_parallel
from tests.context.strategies import ATTENTIONS
from tests.examples import examples
from tests.strategies import assert_equal_to

CONFIG = dict(vocab_size=12, dim=32, num_layers=2, num_heads=8, num_kv_heads=4, hidden_dim=16, max_seq_len=64)


def batch(seed: int, seq_len: int = 16, samples: int = 4, documents: bool = False):
    """Tokens, targets of which a quarter is ignored, and positions."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(12, (samples, seq_len), generator=generator)
    ignored = torch.rand(tokens.shape, generator=generator) < 0.25
    positions = torch.arange(seq_len)
    if documents:
        starts = torch.rand(tokens.shape, generator=generator) < 0.2
        positions = positions - torch.where(starts, positions, 0).cummax(dim=1).values
    return (
        tokens,
        next_tokens(tokens, positions.expand(tokens.shape)).masked_fill(ignored, IGNORE_INDEX),
        positions,
    )


def train(model, feed, reduce, steps: int = 2) -> torch.Tensor:
    """Loss and gradients of each step are `reduce`d: summed over the ranks that hold parts of the batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        tokens, targets, positions, sample_ids, count = feed(step)
        loss = model.loss(tokens, targets, positions, sample_ids, step, count)
        loss.backward()
        for parameter in model.parameters():
            reduce(parameter.grad)
        losses.append(loss.detach())
        reduce(losses[-1])
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


def compare(world, sizes: dict, options: dict, config: ModelConfig, pad: bool = False) -> None:
    mesh = minipar.Mesh(world, **sizes)
    dp, cp, data = mesh.comm("dp"), mesh.comm("cp"), mesh.comm("dp", "cp")
    layout, ulysses_size = options.get("layout", "zigzag"), options.get("ulysses_size", 1)

    def whole(step):
        tokens, targets, positions = batch(step, 13 if pad else 16, documents=config.documents)
        return tokens, targets, positions, torch.arange(4) * 3 + 1, (targets != IGNORE_INDEX).sum()

    def mine(step):
        tokens, targets, positions, sample_ids, count = whole(step)
        rows = torch.arange(4).chunk(dp.size)[dp.rank]
        positions = positions if positions.dim() == 1 else positions[rows]
        split = cp.rank, cp.size, layout, positions if config.documents else None, pad, ulysses_size
        return *local_batch(tokens[rows], targets[rows], *split), sample_ids[rows], count

    model, oracle = Transformer(config, 1).double(), Transformer(config, 1).double()
    if mesh.sizes["tp"] > 1:
        tensor_parallel(model, mesh.comm("tp"))
    context_parallel(model, cp, **options)
    assert_equal_to(train(model, mine, data.all_reduce_), train(oracle, whole, lambda x: x), what="losses")
    want = dict(oracle.named_parameters())
    for name, parameter in model.named_parameters():
        exact = want[name] if mesh.sizes["tp"] == 1 else placement_of(parameter).slice_of(want[name])
        assert_equal_to(parameter.detach(), exact.detach(), what=name)


MESHES = [
    dict(cp=1),
    dict(cp=2),
    dict(cp=4),
    dict(cp=2, dp=2),
    dict(cp=4, dp=2),
    dict(cp=2, tp=2),
    dict(cp=2, dp=2, tp=2),
]


@examples(8)
@given(
    sizes=st.sampled_from(MESHES),
    layout=st.sampled_from(LAYOUTS),
    attention=st.sampled_from(ATTENTIONS),
    documents=st.booleans(),
    dropout=st.sampled_from([0.0, 0.2]),
    tie=st.booleans(),
)
def test_training_on_split_sequences_is_training_in_one_process(
    sizes, layout, attention, documents, dropout, tie
):
    options = dict(layout=layout, attention=attention)
    if attention == "usp":
        options["ulysses_size"] = min(2, sizes["cp"])
    config = ModelConfig(**CONFIG, documents=documents, dropout=dropout, tie_embeddings=tie)
    ranks = torch.tensor(list(sizes.values())).prod().item()
    minipar.run(compare, sizes, options, config, world_size=ranks)


@pytest.mark.parametrize("documents", [False, True])
def test_padding_an_indivisible_length_changes_nothing(documents):
    config = ModelConfig(**CONFIG, documents=documents)
    minipar.run(compare, dict(cp=4), {}, config, True, world_size=4)


def with_experts(world, documents: bool) -> None:
    options = dict(num_experts=4, group_tokens=2, balance_coef=0.0, z_coef=0.0, jitter=0.3, dropout=0.2)
    compare(world, dict(cp=4), {}, ModelConfig(**CONFIG, **options, documents=documents))


@pytest.mark.parametrize("documents", [False, True])
def test_routing_groups_that_no_layout_cuts_route_as_in_one_process(documents):
    """Groups are of a sample's tokens, whatever documents they are of."""
    minipar.run(with_experts, documents, world_size=4)


def without_positions(world) -> None:
    config = ModelConfig(**CONFIG)
    model = context_parallel(Transformer(config).double(), world)
    tokens, targets, _ = batch(0)
    local = local_batch(tokens, targets, world.rank, world.size)
    assert torch.equal(model(local.tokens), model(local.tokens, local.positions))
    with pytest.raises(ValueError, match="4 ranks with 20 tokens a sample exceed max_seq_len=64"):
        model(torch.zeros(1, 20, dtype=torch.int64))


def test_a_model_that_is_not_told_positions_takes_those_of_its_layout():
    minipar.run(without_positions, world_size=4)


def error_of_local_positions(world) -> float:
    """How far the logits of this rank's first token are from one process's, if every rank counts from zero."""
    config = ModelConfig(**CONFIG)
    model = context_parallel(Transformer(config).double(), world, layout="contiguous")
    tokens, targets, _ = batch(0)
    local = local_batch(tokens, targets, world.rank, world.size, "contiguous")
    right = Transformer(config).double()(tokens)[:, local.positions]
    assert_equal_to(model(local.tokens).detach(), right.detach())
    wrong = model(local.tokens, local.positions - local.positions[0])
    return ((wrong - right)[:, 0].abs().max() / right.abs().max()).item()


def test_local_positions_spoil_all_ranks_but_the_first():
    errors = minipar.run(error_of_local_positions, world_size=4)
    assert errors[0] < 1e-14
    assert min(errors[1:]) > 1e-4


def heads_left_after_tp(world) -> None:
    """Of 4 key/value heads, 2 are left on a rank."""
    mesh = minipar.Mesh(world, cp=2, tp=2)
    model = tensor_parallel(Transformer(ModelConfig(**CONFIG)), mesh.comm("tp"))
    with pytest.raises(ValueError, match="heads_at_once=4 does not divide key/value heads=2; use 1 or 2"):
        context_parallel(model, mesh.comm("cp"), attention="all_gather", heads_at_once=4)
    assert model.layers["0"].attention.overrides.core is None
    context_parallel(model, mesh.comm("cp"), attention="all_gather", heads_at_once=2)


def test_heads_are_counted_as_tensor_parallelism_left_them():
    minipar.run(heads_left_after_tp, world_size=4)


def test_a_stage_without_blocks_takes_its_ranks_tokens_too():
    stage = Transformer(ModelConfig(**CONFIG), 1)
    stage.layers.clear()
    context_parallel(stage, SimpleNamespace(rank=1, size=8), attention="ulysses", layout="contiguous")
    assert stage.overrides.default_positions(3, torch.device("cpu")).tolist() == [3, 4, 5]


def test_a_model_whose_heads_cannot_be_split_is_refused():
    model = Transformer(ModelConfig(**CONFIG), 1)
    with pytest.raises(ValueError, match="16 ranks do not divide num_heads=8"):
        context_parallel(model, SimpleNamespace(rank=1, size=16), attention="ulysses")


@pytest.mark.parametrize(
    ("change", "arguments", "line"),
    [
        ({}, dict(attention="sphere"), "attention='sphere' is unknown; use ring, ulysses, all_gather or usp"),
        ({}, dict(layout="spiral"), "layout='spiral' is unknown; use contiguous, zigzag or striped"),
        (
            {},
            dict(seq_len=20),
            "seq_len=20 is not a multiple of 8, as layout='zigzag' on 4 ranks needs; pad to 24",
        ),
        (
            {},
            dict(cp=16, attention="ulysses"),
            "16 ranks do not divide num_heads=8; use 1, 2, 4 or 8 ranks, pad to 16",
        ),
        (
            {},
            dict(tp=4, attention="ulysses"),
            "4 ranks do not divide num_heads=2; use 1 or 2 ranks, pad to 4 heads",
        ),
        ({}, dict(attention="usp", ulysses_size=3), "ulysses_size=3 does not divide cp=4; use 1, 2 or 4"),
        ({}, dict(ulysses_size=2), "ulysses_size=2 is for attention='usp', not 'ring'"),
        (
            {},
            dict(attention="all_gather", heads_at_once=3),
            "heads_at_once=3 does not divide key/value heads=4",
        ),
        (
            dict(num_experts=4),
            {},
            "group_tokens=None makes a sequence one routing group, which cp=4 would cut",
        ),
        (dict(num_experts=4, group_tokens=4), dict(seq_len=16), "group_tokens=4"),
    ],
)
def test_what_cannot_be_split_is_refused_before_any_rank_starts(change, arguments, line):
    with pytest.raises(ValueError) as error:
        check_context_parallel(ModelConfig(**CONFIG | change), **{"cp": 4, **arguments})
    assert line in str(error.value)
