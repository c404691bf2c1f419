"""Bytes sent, counted by the ledger, are those of the formulas: per layer, per step, with recomputation."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import minipar
from minipar.config.model_config import ModelConfig
from minipar.model import Transformer
from minipar.tensor_parallel import tensor_parallel
from tests.examples import examples
from tests.tensor_parallel.strategies import Case, cases

FLOAT64 = 8


def layer_bytes(world, case: Case, recompute: str) -> int:
    """What one layer sends in one forward and backward."""
    model = Transformer(case.config, case.seed).double()
    tensor_parallel(model, world, case.sequence_parallel, case.chunked, algorithm="ring")
    comm, block = model.overrides.output.comm, model.layers["0"]
    tokens = case.length // (world.size if case.sequence_parallel else 1)
    x = torch.randn(case.batch, tokens, case.config.dim, dtype=torch.float64, requires_grad=True)
    arguments = (x, torch.arange(case.length), torch.arange(case.batch))
    before = comm.traffic.sent_bytes
    if recompute == "none":
        y = block(*arguments)
    else:
        with set_checkpoint_early_stop(recompute == "stops early"):
            y = checkpoint(block, *arguments, use_reentrant=False)
    y.sum().backward()
    return comm.traffic.sent_bytes - before


def ring_bytes(elems: int, ranks: int) -> int:
    """A ring all-reduce of elements that the ranks divide."""
    assert elems % ranks == 0
    return 2 * (ranks - 1) * elems // ranks * FLOAT64


def shared_heads_bytes(case: Case) -> int:
    """The gradients of k and v, each summed over the ranks that share a head, and those of the norms of q and k."""
    config, holders = case.config, max(1, case.tp // case.config.num_kv_heads)
    shared = 2 * ring_bytes(config.head_dim * config.dim, holders) if holders > 1 else 0
    if config.qkv_bias and holders > 1:
        shared += 2 * ring_bytes(config.head_dim, holders)
    return shared + (2 * ring_bytes(config.head_dim, case.tp) if config.qk_norm else 0)


# A layer sums B*T*D elements so many times; a gather or a scatter is half a sum. With sequence parallelism the inputs of
# the column-parallel matrices are gathered once more. A recomputed forward that stops early skips its last sum.
# A parallel block sums, gathers and scatters half as often; of a recomputed forward, its only sum is the last one.
TIMES = {
    (False, "none"): 4,
    (False, "stops early"): 5,
    (False, "whole"): 6,
    (True, "none"): 5,
    (True, "stops early"): 6.5,
    (True, "whole"): 7,
}
TIMES_PARALLEL = {
    (False, "none"): 2,
    (False, "stops early"): 2,
    (False, "whole"): 3,
    (True, "none"): 2.5,
    (True, "stops early"): 3,
    (True, "whole"): 3.5,
}


@examples(12)
@given(cases(latent=st.just(False)))
def test_a_layer_sends_what_the_formula_says(case):
    config, whole = case.config, case.batch * case.length * case.config.dim
    for recompute in ("none", "stops early", "whole"):
        # A dropout mask is kept after the last sum, so nothing stops before it.
        reached = "whole" if recompute == "stops early" and config.dropout else recompute
        times = TIMES_PARALLEL if config.parallel_block else TIMES
        halves = int(2 * times[case.sequence_parallel, reached])
        want = halves * ring_bytes(whole, case.tp) // 2 + shared_heads_bytes(case)
        if case.sequence_parallel:
            want += (1 if config.parallel_block else 2) * ring_bytes(config.dim, case.tp)
        assert minipar.run(layer_bytes, case, recompute, world_size=case.tp) == [want] * case.tp


def step_bytes(world, case: Case) -> int:
    model = tensor_parallel(case.model(), world, case.sequence_parallel, case.chunked, algorithm="ring")
    comm = model.overrides.output.comm
    before = comm.traffic.sent_bytes
    model.loss(*case.tokens()).backward()
    return comm.traffic.sent_bytes - before


@examples(12)
@given(cases(latent=st.just(False)))
def test_a_step_sends_its_layers_its_ends_and_its_loss(case):
    config, tp, targets = case.config, case.tp, case.batch * case.length
    sums = ring_bytes(targets * config.dim, tp)
    halves = 1 if config.parallel_block else 2
    layers = config.num_layers * (2 * halves * sums + shared_heads_bytes(case))
    ends = 2 * sums  # the embedding forward, the head backward
    loss = ring_bytes(targets, tp) + ring_bytes(2 * targets, tp)
    regathers = norms = 0
    if case.sequence_parallel:
        # Each all-reduce is now two halves in two places; the head's input, too, is gathered again.
        regathers = (halves * config.num_layers + 1) * sums // 2
        norms = (halves * config.num_layers + 1) * ring_bytes(config.dim, tp)
    want = layers + ends + loss + regathers + norms
    assert minipar.run(step_bytes, case, world_size=tp) == [want] * tp


def test_a_model_uses_the_given_algorithm_or_its_comms_own():
    case = Case(
        ModelConfig(vocab_size=8, dim=8, num_layers=1, num_heads=2, hidden_dim=8), 2, False, 1, 2, seed=0
    )

    def algorithms(world):
        models = [
            tensor_parallel(case.model(), world),
            tensor_parallel(case.model(), world, algorithm="ring"),
            tensor_parallel(case.model(), world.using("tree")),
        ]
        return [model.overrides.output.comm.default_algorithm for model in models]

    assert minipar.run(algorithms, world_size=2) == [[None, "ring", "tree"]] * 2


@pytest.mark.parametrize("tp", [2, 4])
def test_a_copy_operator_per_matrix_would_send_more(tp):
    """One sum for q, k and v, one for gate and up: with one each, 2 sums become 5 and the ledger shows it."""
    config = ModelConfig(vocab_size=8, dim=8 * tp, num_layers=1, num_heads=tp, hidden_dim=tp)
    case = Case(config, tp, False, 1, tp, seed=0)
    sums = ring_bytes(tp * config.dim, tp)

    def with_three_copies(world) -> int:
        model = tensor_parallel(case.model(), world, algorithm="ring")
        for block in model.layers.values():
            # each layer by itself
            block.attention.overrides.project_qkv = block.mlp.overrides.project_gate_up = None
        x = torch.randn(1, tp, config.dim, dtype=torch.float64, requires_grad=True)
        comm = model.overrides.output.comm
        before = comm.traffic.sent_bytes
        model.layers["0"](x, torch.arange(tp), torch.arange(1)).sum().backward()
        return comm.traffic.sent_bytes - before

    assert minipar.run(with_three_copies, world_size=tp) == [7 * sums] * tp


@pytest.mark.parametrize("shared", [True, False])
def test_a_parallel_block_that_shared_no_sum_would_send_twice_as_much(shared):
    config = ModelConfig(
        vocab_size=8, dim=16, num_layers=1, num_heads=2, hidden_dim=8, parallel_block=True, num_kv_heads=2
    )
    case = Case(config, 2, False, 1, 2, seed=0)

    def sent(world) -> int:
        model = tensor_parallel(case.model(), world, algorithm="ring")
        comm, block = model.overrides.output.comm, model.layers["0"]
        if not shared:
            block.overrides.attention_and_mlp = None
        x = torch.randn(1, 2, config.dim, dtype=torch.float64, requires_grad=True)
        before = comm.traffic.sent_bytes
        block(x, torch.arange(2), torch.arange(1)).sum().backward()
        return comm.traffic.sent_bytes - before

    sums = ring_bytes(2 * config.dim, 2)
    assert minipar.run(sent, world_size=2) == [(2 if shared else 4) * sums] * 2
