"""What a layer keeps for its backward, counted from the tensors autograd saves, is what the formula says."""

import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.config.model_config import ModelConfig
from minipar.cost.activations import layer_activation_bytes, layer_bytes
from minipar.cost.models import ModelShape
from minipar.tensor_parallel import chunked, column, tensor_parallel
from tests.tensor_parallel.strategies import Case, bytes_kept, cases


def saved_bytes(world, case: Case, dtype: torch.dtype) -> int:
    """Bytes of the distinct storages that one layer's graph keeps, parameters apart."""
    model = tensor_parallel(case.model().to(dtype), world, case.sequence_parallel, case.chunked)
    tokens = case.length // (world.size if case.sequence_parallel else 1)
    x = torch.randn(case.batch, tokens, case.config.dim, dtype=dtype, requires_grad=True)
    return bytes_kept(model, x, case)


@given(cases(latent=st.just(False)), st.sampled_from([torch.float32, torch.float64]))
def test_a_layer_keeps_what_the_formula_says(case, dtype):
    scores = case.length if case.config.attention == "plain" else 0
    parts = layer_activation_bytes(
        ModelShape.of(case.config),
        case.length,
        case.batch,
        case.tp,
        case.sequence_parallel,
        dtype.itemsize,
        scores,
    )
    shape, sizes = ModelShape.of(case.config), (case.length, case.batch, case.tp, case.sequence_parallel)
    assert sum(parts.values()) == layer_bytes(
        shape, *sizes, "none", case.length, bool(scores), dtype.itemsize
    )
    kept = minipar.run(saved_bytes, case, dtype, world_size=case.tp)
    assert kept == [sum(parts.values())] * case.tp


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
