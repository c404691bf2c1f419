"""Bytes that experts split by their hidden features send are the formula's, whoever chooses."""

import pytest
import torch

import minipar
from minipar.mesh import place_whole
from minipar.model import MoE
from minipar.tensor_parallel.split_experts import split_experts

B, T, D, EXPERTS, FLOAT64 = 2, 16, 8, 6, 8


def sent(world, sequence_parallel: bool, options: dict) -> tuple[int, int]:
    comm = world.using("ring")
    moe = MoE(D, 8, EXPERTS, **options).double()
    place_whole(moe)
    split_experts(moe, comm, sequence_parallel)
    tokens = T // world.size if sequence_parallel else T
    x = torch.randn(B, tokens, D, dtype=torch.float64, requires_grad=True)
    comm.traffic.reset()
    y, _ = moe(x)
    forward = comm.traffic.sent_bytes
    y.sum().backward()
    return forward, comm.traffic.sent_bytes - forward


@pytest.mark.parametrize(
    ("options", "k"),
    [
        (dict(top_k=2), 2),
        (dict(router="expert_choice", top_k=2), EXPERTS),
        (dict(router="expert_choice", group_tokens=5), EXPERTS),
    ],
    ids=str,
)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_split_experts_send_a_row_and_k_weights_a_token(options, k, sequence_parallel):
    for tp in (2, 4):
        share = FLOAT64 * B * T * (tp - 1)
        want = (2 * D * share // tp, (3 * D + 2 * k if sequence_parallel else 2 * (D + k)) * share // tp)
        assert minipar.run(sent, sequence_parallel, options, world_size=tp) == [want] * tp
