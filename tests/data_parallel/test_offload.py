"""States in the host's memory or on disk: the same numbers, and on disk less resident memory than the states need."""

import ctypes
import gc
import os
import sys

import pytest
import torch
from torch import nn

import minipar
from minipar.data_parallel import FSDP, ZeroOptimizer
from tests.data_parallel.test_zero import CASE, Net, batch, groups_of


def train(world, stage, offload, folder):
    net = Net(5, 1)
    optimizer = ZeroOptimizer(groups_of(net), torch.optim.AdamW, world, stage=stage, algorithm="ring",
                              bucket_mb=3e-4, lr=0.01, offload=offload, folder=folder)  # fmt: skip
    for step in range(3):
        optimizer.zero_grad()
        net(batch(CASE, world.rank, step, 0), world.rank).backward()
        optimizer.step()
    state = optimizer.full_state_dict()
    optimizer.load_full_state_dict(state)
    return (
        [p.detach().clone() for p in net.parameters()],
        state["state"],
        optimizer.full_state_dict()["state"],
    )


def train_all(world, folder):
    for stage in (1, 2):
        want, state, _ = train(world, stage, None, None)
        for offload, where in (("cpu", None), ("disk", folder)):
            got, its, again = train(world, stage, offload, where)
            assert all(map(torch.equal, got, want)), offload
            for number, values in state.items():
                for key, value in values.items():
                    assert torch.equal(its[number][key], value), (offload, key)
                    assert torch.equal(again[number][key], value), (offload, key)
    assert os.listdir(folder) == []  # files without a name: gone with the process, whatever happens to it


def test_offloaded_states_give_the_same_bits_and_leave_no_files(tmp_path):
    minipar.run(train_all, str(tmp_path), world_size=2, timeout_s=10)


def resident_bytes() -> int:
    """Of this process, pages of files included; memory that the allocator keeps for later is given back first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


NUM_LAYERS, WIDTH = 12, 1024
STATES = 12 * NUM_LAYERS * WIDTH * WIDTH  # fp32 master copy and AdamW's two moments: 151 MB


def resident_while_training(world, offload, folder):
    """Growth of resident memory while a bf16 model is trained, beyond its parameters and a step's gradients."""
    train(world, 2, None, None)  # the first optimizer of a process makes torch import much
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS))).bfloat16()
    x = torch.ones(1, WIDTH, dtype=torch.bfloat16)
    net(x).sum().backward()
    net.zero_grad()
    start = resident_bytes()
    optimizer = ZeroOptimizer(net.parameters(), torch.optim.AdamW, world, stage=2, bucket_mb=2.0, lr=1e-3,
                              master_dtype=torch.float32, offload=offload, folder=folder)  # fmt: skip
    for _ in range(2):
        optimizer.zero_grad()
        net(x).float().sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    return resident_bytes() - start


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_on_disk_a_model_trains_with_less_resident_memory_than_its_states_need(tmp_path):
    (ordinary,) = minipar.run(resident_while_training, None, None, world_size=1, timeout_s=10)
    (disk,) = minipar.run(resident_while_training, "disk", str(tmp_path), world_size=1, timeout_s=10)
    assert ordinary > 0.9 * STATES
    assert disk < 0.5 * STATES


def fsdp_on_disk(world, folder):
    results = []
    for offload in (None, "cpu", "disk"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(9, 20), nn.Tanh(), nn.Linear(20, 3)).double()
        fsdp = FSDP(net, world, nn.Linear, algorithm="ring", offload=offload,
                    folder=folder if offload == "disk" else None)  # fmt: skip
        optimizer = torch.optim.Adam(fsdp.parameters())
        for step in range(3):
            optimizer.zero_grad()
            fsdp(torch.full((2, 9), world.rank + step + 1.0, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
        results.append(fsdp.full_state_dict())
    for other in results[1:]:
        assert all(torch.equal(other[name], value) for name, value in results[0].items())


def test_fsdps_shards_can_live_in_the_hosts_memory_or_on_disk(tmp_path):
    minipar.run(fsdp_on_disk, str(tmp_path), world_size=3, timeout_s=10)
