"""What a layer keeps for its backward, counted from the tensors autograd saves, is what the formula says."""

import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import minipar
from minipar.config.model_config import ModelConfig
from minipar.cost.activations import layer_activation_bytes, layer_bytes
from minipar.cost.models import ModelShape
from minipar.model import Transformer
from minipar.tensor_parallel import chunked, column, tensor_parallel
from tests.tensor_parallel.strategies import Case, bytes_kept, cases


def saved_bytes(world, case: Case, dtype: torch.dtype) -> int:
    """Bytes of the distinct storages that one layer's graph keeps, parameters apart."""
    whole = Transformer(case.config, case.seed, dtype=dtype)
    model = tensor_parallel(whole, world, case.sequence_parallel, case.chunked)
    tokens = case.length // (world.size if case.sequence_parallel else 1)
    x = torch.randn(case.batch, tokens, case.config.dim, dtype=dtype, requires_grad=True)
    return bytes_kept(model, x, case)


def has_formula(case: Case) -> bool:
    """No sequence parallelism of one rank, whose gathers copy; nor one head of latents, whose output o gets uncopied."""
    one_head = case.config.kv_latent_dim > 0 and case.config.num_heads == case.tp
    return not one_head and (case.tp > 1 or not case.sequence_parallel)


def predicted_bytes(case: Case, dtype: torch.dtype) -> int:
    """The planner's bytes; of a mixture, also the router's numbers per token, per choice and per sample."""
    config, e = case.config, dtype.itemsize
    scores = case.length if config.attention == "plain" else 0
    sizes = case.length, case.batch, case.tp, case.sequence_parallel
    parts = layer_activation_bytes(ModelShape.of(config), *sizes, e, scores, config.num_experts > 0)
    whole = layer_bytes(
        ModelShape.of(config), *sizes, "none", case.length, scores > 0, e, config.num_experts > 0
    )
    assert sum(parts.values()) == whole
    if not config.num_experts:
        return whole
    wide, k = max(4, e), config.top_k
    of_token = wide + 1 + e * k + (wide * (k + 1) if k > 1 else 0)
    return whole + case.batch * (case.length * of_token + wide * config.num_experts + 16)


ONE_TOKEN = ModelConfig(vocab_size=2, dim=2, num_layers=1, num_heads=1, hidden_dim=1, attention="plain")


@given(cases().filter(has_formula), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
@example(Case(ONE_TOKEN, 1, False, 1, 1, 0), torch.float32)  # a single query needs no causal mask
def test_a_layer_keeps_what_the_formula_says(case, dtype):
    kept = minipar.run(saved_bytes, case, dtype, world_size=case.tp)
    assert kept == [predicted_bytes(case, dtype)] * case.tp


@given(
    cases().filter(has_formula),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
)
def test_a_layer_of_experts_keeps_what_the_formula_says(case, dtype, top_k, more, shared):
    experts = dict(num_experts=top_k + more, top_k=top_k, moe_every=1, capacity_factor=None)
    config = replace(case.config, **experts, shared_dim=case.config.hidden_dim if shared else 0)
    case = case._replace(config=config)
    kept = minipar.run(saved_bytes, case, dtype, world_size=case.tp)
    assert kept == [predicted_bytes(case, dtype)] * case.tp


def test_in_round_numbers_a_layer_keeps_6_parts_whole_and_20_split():
    """D (6 + 20/tp) a token, and 26 D/tp with sequence parallelism, but for what is small beside D."""
    config = ModelConfig(dim=4096, num_layers=1, num_heads=32, hidden_dim=4 * 4096, vocab_size=8)
    for tp in (1, 2, 4, 8):
        for sequence_parallel, parts in ((False, 6 + 20 / tp), (True, 26 / tp)):
            kept = sum(layer_activation_bytes(ModelShape.of(config), 1024, 8, tp, sequence_parallel).values())
            assert abs(kept / (8 * 1024 * 4 * 4096) / parts - 1) < 0.005


def gathered_and_alive(world, in_chunks: bool) -> tuple[int, int]:
    """Of the tokens of other ranks that a forward gathered: how many storages there were, and how many are left."""
    gathered, tokens, chunks = [], column.start_gather_tokens, chunked.ring_all_gather_chunks

    def watched(storage):
        gathered.append(weakref.ref(storage))

    def watched_tokens(comm, x):
        finish = tokens(comm, x)

        def finish_watched():
            whole = finish()
            watched(whole.untyped_storage())
            return whole

        return finish_watched

    def watched_chunks(comm, x):
        for rank, chunk in chunks(comm, x):
            if rank != comm.rank:
                watched(chunk.untyped_storage())
            yield rank, chunk

    config = ModelConfig(vocab_size=8, dim=8, num_layers=1, num_heads=4, hidden_dim=8)
    model = tensor_parallel(Case(config, world.size, True, 2, 8, 0).model(), world, True, in_chunks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(column, "start_gather_tokens", watched_tokens)
        patch.setattr(chunked, "ring_all_gather_chunks", watched_chunks)
        x = torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)
        y = model.layers["0"](x, torch.arange(8), torch.arange(2))
        world.barrier()
        alive = sum(ref() is not None for ref in gathered)
    assert y.requires_grad
    return len(gathered), alive


@pytest.mark.parametrize("in_chunks", [False, True])
def test_gathered_tokens_are_let_go_when_they_are_multiplied(in_chunks):
    """Two gathers a layer, for q, k, v and for gate, up; the graph keeps this rank's tokens alone."""
    assert minipar.run(gathered_and_alive, in_chunks, world_size=2) == [(2, 0)] * 2
