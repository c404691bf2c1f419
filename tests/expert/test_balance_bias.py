"""Biases that even out the load follow the load of all ranks, not of one."""

import torch

import minipar
from minipar.expert import SwitchMoE
from minipar.model import update_balance_bias


def biases(world) -> tuple[list[float], list[float]]:
    """After 6 tokens on each of 4 ranks, of which two choose expert 0, one 1 and one 2: with the Comm, and without."""
    found = []
    for comm in (world, None):
        moe = SwitchMoE(4, 3, 4, capacity_factor=None, balance_bias=True, comm=world).double()
        with torch.no_grad():
            moe.router.weight.copy_(100 * torch.eye(4))
        chosen = torch.tensor((0, 0, 1, 2)[world.rank]).expand(6)
        moe(torch.eye(4, dtype=torch.float64)[chosen])
        update_balance_bias(moe, 0.5, comm)
        found.append(moe.balance_bias.tolist())
    return found[0], found[1]


def test_the_bias_of_an_expert_follows_the_load_of_all_ranks():
    """Loads are 12, 6, 6 and 0, their mean 6. By its own load alone each rank would lower only the expert that it chose."""
    for rank, (together, alone) in enumerate(minipar.run(biases, world_size=4)):
        assert together == [-0.5, 0.0, 0.0, 0.5]
        assert [e for e in range(4) if alone[e] < 0] == [(0, 0, 1, 2)[rank]]
