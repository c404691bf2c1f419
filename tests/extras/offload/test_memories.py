"""States in the host's memory or on disk: the same numbers, in less memory; the disk works while the update does."""

import contextlib
import ctypes
import errno
import gc
import os
import sys
import threading
from functools import partial

import pytest
import torch
from torch import nn

import minipar
from minipar.data_parallel import FSDP, ZeroOptimizer
from minipar.extras.offload.memories import Disk
from minipar.extras.offload.offloaded_optimizer import OffloadedOptimizer
from minipar.support.live_bytes import LiveBytes
from minipar.support.trace import Trace, overlap_fraction
from minipar.train.master_weights import MasterWeights
from tests.data_parallel.training import Case, Net, batch, groups_of


def train(world, stage, offload, folder):
    net = Net(5, 1)
    optimizer = ZeroOptimizer(groups_of(net), torch.optim.AdamW, world, stage=stage, algorithm="ring",
                              bucket_mb=3e-4, lr=0.01, offload=offload, folder=folder)  # fmt: skip
    for step in range(3):
        optimizer.zero_grad()
        net(batch(Case(), world.rank, step), world.rank).backward()
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
    minipar.run(train_all, str(tmp_path), world_size=2)


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


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_on_disk_training_needs_less_memory_than_its_states(tmp_path):
    (ordinary,) = minipar.run(resident_while_training, None, None, world_size=1)
    (disk,) = minipar.run(resident_while_training, "disk", str(tmp_path), world_size=1)
    assert ordinary > 0.9 * STATES
    assert disk < 0.5 * STATES


def live_while_training(world, offload):
    """Live bytes after three steps and at most, of a bf16 model whose layers are all of one size, a bucket each."""
    net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))).bfloat16()
    with LiveBytes() as memory:
        optimizer = ZeroOptimizer(net.parameters(), torch.optim.AdamW, world, stage=1, bucket_mb=1e-3, lr=1e-3,
                                  first_bucket_mb=1e-3, master_dtype=torch.float32, offload=offload)  # fmt: skip
        peaks = []
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.ones(1, 64).bfloat16()).float().sum().backward()
            memory.peak = memory.now
            optimizer.step()
            peaks.append(memory.peak - memory.now)
        gc.collect()
    return memory.now, peaks[-1], [chunk.chunk.nbytes for chunk in optimizer._chunks]


@pytest.mark.thorough
def test_two_chunks_of_states_are_resident_however_many_there_are():
    tensors = 3  # a master and two moments
    plain = minipar.run(live_while_training, None, world_size=2)
    disk = minipar.run(live_while_training, "disk", world_size=2)
    for (before, _, chunks), (after, in_step, _) in zip(plain, disk):
        resident = after - (before - tensors * sum(chunks))
        assert len(chunks) == 8
        assert resident == pytest.approx(2 * tensors * max(chunks), rel=0.02)
        assert in_step < 6 * max(chunks)  # gradients, and what the optimizer's formulas need, of one chunk


def while_updating(world, trace):
    """In which order one step reads and writes chunks on disk, and updates them.

    An update ends when the next chunk's read has begun; a write ends when the next chunk's update has begun.
    """
    net = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    optimizer = ZeroOptimizer(net.parameters(), torch.optim.AdamW, world, bucket_mb=1e-4, first_bucket_mb=1e-4,
                              lr=1e-3, offload="disk")  # fmt: skip
    net(torch.ones(1, 8)).sum().backward()
    optimizer.step()  # makes the states
    begun = {what: [threading.Event() for _ in range(4)] for what in ("read", "update", "write")}
    in_time = []

    def observed(what, waits_for, original, *args):
        i = [event.is_set() for event in begun[what]].index(False)
        begun[what][i].set()
        if waits_for and i < 3:
            in_time.append(begun[waits_for][i + 1].wait(60))
        return original(*args)

    for chunk in optimizer._chunks:
        chunk.optimizer.step = partial(observed, "update", "read", chunk.optimizer.step)
    disk = optimizer._memory
    disk._read = partial(observed, "read", None, disk._read)
    disk._write = partial(observed, "write", "update", disk._write)
    world.trace = trace
    optimizer.step()
    world.trace = None
    return in_time, trace.spans


def test_an_update_overlaps_reading_and_writing_other_chunks():
    ((in_time, spans),) = minipar.run(while_updating, Trace(), world_size=1)
    assert in_time == [True] * 6
    disk = [s for s in spans if s.kind == "disk"]
    assert sorted(s.name for s in disk) == ["read"] * 4 + ["write"] * 4
    assert {s.lane for s in disk} == {"offload"}
    assert [s.kind for s in spans if s.name == "read of states"] == ["wait"] * 4
    assert 0.0 <= overlap_fraction(spans, "disk") <= 1.0


def step_on_a_full_disk(world):
    net = nn.Linear(8, 8)
    optimizer = ZeroOptimizer(net.parameters(), torch.optim.AdamW, world, lr=0.1, offload="disk")
    net(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    plain = os.pwrite

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.pwrite = full
    try:
        optimizer.step()
    finally:
        os.pwrite = plain


def test_a_full_disk_says_so():
    with pytest.raises(
        minipar.RankError, match="offload='disk': .* bytes could not be written to .*: No space left"
    ):
        minipar.run(step_on_a_full_disk, world_size=1)


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be written to: No such file or directory"):
        Disk(str(tmp_path / "missing"))


def after_a_failed_update(world, offload):
    """An update fails in the second of three chunks; then other states are loaded, and the next step is a plain one."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    optimizer = ZeroOptimizer(net.parameters(), torch.optim.SGD, world, bucket_mb=1e-4, first_bucket_mb=1e-4,
                              momentum=0.9, lr=0.1, master_dtype=torch.float64, offload=offload)  # fmt: skip
    chunk, plain = optimizer._chunks[1], optimizer._chunks[1].optimizer.step
    for update in (plain, lambda: 1 / 0, plain):
        optimizer.zero_grad()
        net(torch.ones(1, 8)).square().sum().backward()
        chunk.optimizer.step = update
        with contextlib.suppress(ZeroDivisionError):
            optimizer.step()
        state = optimizer.full_state_dict()
        for own in state["state"].values():
            own["momentum_buffer"] *= 2
        optimizer.load_full_state_dict(state)
    return [p.detach().clone() for p in net.parameters()]


def test_a_failed_update_leaves_no_stale_states():
    plain, disk = (minipar.run(after_a_failed_update, o, world_size=1)[0] for o in (None, "disk"))
    assert all(map(torch.equal, plain, disk))


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
    minipar.run(fsdp_on_disk, str(tmp_path), world_size=3)


def offloaded_update(world, offload, optimizer_cls, options):
    """FSDP whose rest stays whole and bf16, with float32 shards: one optimizer of all, and one of each flat buffer."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(9, 20), nn.Tanh(), nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 3))
    net[4].bfloat16()
    fsdp = FSDP(
        net, world, lambda m: m in (net[0], net[2]), shard_rest=False, algorithm="ring", offload=offload
    )
    groups = [{"params": list(fsdp.parameters()), "weight_decay": 0.1}]
    if offload is None:
        optimizer = MasterWeights(groups, optimizer_cls, **options)
    else:
        optimizer = OffloadedOptimizer([fsdp], groups, optimizer_cls, torch.float32, **options)
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (step + 1)
        optimizer.zero_grad()
        y = fsdp.module[:4](torch.full((2, 9), world.rank + step + 1.0))
        fsdp.module[4](y.bfloat16()).float().square().sum().backward()
        optimizer.step(grad_scale=2.0)
    states = {
        x.placement.name: [x.detach().clone(), s[SQUARES[optimizer_cls]].clone()]
        for x, s in optimizer.tensors_and_states()
    }
    return fsdp.full_state_dict(), states


SQUARES = {torch.optim.AdamW: "exp_avg_sq", torch.optim.Adagrad: "sum"}


@pytest.mark.parametrize(
    ("offload", "optimizer"),
    [
        ("cpu", (torch.optim.AdamW, {"lr": 0.1})),
        ("disk", (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5})),
    ],
)
def test_flat_buffers_updated_one_by_one_have_the_bits_of_all_at_once(offload, optimizer):
    want = minipar.run(offloaded_update, None, *optimizer, world_size=2)
    got = minipar.run(offloaded_update, offload, *optimizer, world_size=2)
    for (weights, states), (its_weights, its_states) in zip(want, got):
        assert all(torch.equal(its_weights[name], w) for name, w in weights.items())
        assert its_states.keys() == states.keys()
        assert all(torch.equal(a, b) for name in states for a, b in zip(its_states[name], states[name]))
