"""Experts spread over ep and cut over tp, in one mesh: still the model of one process."""

import torch
from hypothesis import Phase, given
from hypothesis import strategies as st

import minipar
from minipar.config.model_config import ModelConfig
from minipar.expert import expert_parallel, gradient_comm
from minipar.mesh import Mesh, gather, placement_of
from minipar.model import IGNORE_INDEX, Transformer, set_num_groups
from minipar.tensor_parallel import tensor_parallel
from tests.examples import examples
from tests.strategies import assert_equal_to, seeds

TOKENS = 8


def gradients(world, config, sizes, seed, sequence_parallel, experts_first):
    """(placement, gradient) of every parameter, and this rank's part of the loss."""
    mesh = Mesh(world, **sizes)
    model = Transformer(config, seed).double()
    steps = [
        lambda: expert_parallel(model, mesh.comm("ep")),
        lambda: tensor_parallel(model, mesh.comm("tp"), sequence_parallel),
    ]
    for step in steps if experts_first else reversed(steps):
        step()
    tokens, targets = batch(config, seed)
    set_num_groups(model, config.num_groups(4, TOKENS))
    rows = torch.arange(4).chunk(sizes["dp"])[mesh.coordinates.dp]
    count = int((targets != IGNORE_INDEX).sum())
    loss = model.loss(tokens[rows], targets[rows], sample_ids=rows, count=count)
    loss.backward()
    comm_of = gradient_comm(mesh)
    for p in model.parameters():
        comm_of(p).all_reduce_(p.grad)
    return [(placement_of(p), p.grad) for p in model.parameters()], loss.item(), mesh.coordinates.tp


def batch(config, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(config.vocab_size, (2, 4, TOKENS), generator=generator)
    return tokens, targets.masked_fill(torch.rand(4, TOKENS, generator=generator) < 0.25, IGNORE_INDEX)


@given(
    seed=seeds,
    sizes=st.sampled_from([dict(dp=2, tp=2, ep=2), dict(dp=4, tp=2, ep=2), dict(dp=2, tp=3, ep=2)]),
    sequence_parallel=st.booleans(),
    experts_first=st.booleans(),
    top_k=st.integers(1, 2),
    capacity_factor=st.sampled_from([0.5, None]),
    shared_dim=st.sampled_from([0, 6]),
)
@examples(4, phases=(Phase.generate,))
def test_experts_may_be_spread_and_cut(
    seed, sizes, sequence_parallel, experts_first, top_k, capacity_factor, shared_dim
):
    config = ModelConfig(
        vocab_size=12,
        dim=12,
        num_layers=2,
        num_heads=6,
        num_kv_heads=6,
        hidden_dim=6,
        num_experts=4,
        top_k=top_k,
        capacity_factor=capacity_factor,
        shared_dim=shared_dim,
        group_tokens=3,
        jitter=0.1,
    )
    if sequence_parallel and TOKENS % sizes["tp"]:
        sequence_parallel = False
    results = minipar.run(
        gradients, config, sizes, seed, sequence_parallel, experts_first,
        world_size=sizes["dp"] * sizes["tp"],
    )  # fmt: skip
    oracle = Transformer(config, seed).double()
    tokens, targets = batch(config, seed)
    loss = oracle.loss(tokens, targets)
    loss.backward()
    total = sum(part for _, part, tp in results if tp == 0)
    assert_equal_to(torch.tensor(total, dtype=torch.float64), loss.detach())
    by_name = {}
    for parts, _, _ in results:
        for placement, gradient in parts:
            by_name.setdefault(placement.name, []).append((placement, gradient))
    for name, parameter in oracle.named_parameters():
        whole = gather(by_name[name], check_replicas=False)
        assert_equal_to(whole, parameter.grad, what=name)
        for placement, gradient in by_name[name]:
            assert_equal_to(gradient, placement.slice_of(parameter.grad), what=name)
