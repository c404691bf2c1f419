"""torch's process groups: the time that an operation on them may take, and what many of them cost."""

from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import minipar
from minipar.comm.transport import process_groups
from minipar.comm.transport.process_groups import named_group, set_timeout


@pytest.mark.parametrize(("device", "limit_s"), [("cpu", 5.0), ("cuda", 10.0)])
def test_nccls_watchdog_waits_longer_than_ours(monkeypatch, device, limit_s):
    limits = {}
    monkeypatch.setattr(
        dist.distributed_c10d, "_set_pg_timeout", lambda limit, group: limits.update({group: limit})
    )
    set_timeout(["world", "pair"], 5.0, torch.device(device))
    assert {group: limit.total_seconds() for group, limit in limits.items()} == dict.fromkeys(
        ["world", "pair"], limit_s
    )


def polling_threads() -> int:
    """How many threads of this process look at gloo's sockets."""
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has just ended
            names.append(path.read_text())
    return sum(name.startswith("gloo_tcp_loop") for name in names)


def sum_in_three_groups(world, backend):
    """The sum of the ranks in each of three new groups, and how many threads the last two of them added."""
    sums, threads = [], []
    with patch.object(process_groups, "GLOO", backend):
        for name in ("first", "second", "third"):
            x = torch.tensor([float(world.rank)])
            dist.all_reduce(x, group=named_group(list(range(world.size)), f"{name} on {backend}", 60.0))
            sums.append(x.item())
            threads.append(polling_threads())
    return sums, threads[-1] - threads[0]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="lists threads as Linux does")
@pytest.mark.parametrize(("backend", "more"), [(process_groups.GLOO, 0), ("gloo", 2)])
def test_groups_share_one_polling_thread_where_torchs_do_not(backend, more):
    found = minipar.run(sum_in_three_groups, backend, world_size=3)
    assert found == [([3.0] * 3, more)] * 3


def test_a_new_group_leaves_the_default_group_bound_to_its_gpu(monkeypatch):
    """While one is made, torch must not see the binding: it would split NCCL's communicator of all ranks."""
    world, seen = SimpleNamespace(bound_device_id="cuda:1"), []
    monkeypatch.setattr(dist, "get_backend", lambda *group: "gloo")
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: world)

    def fails(*args, **kwargs):
        seen.append(world.bound_device_id)
        raise KeyError

    monkeypatch.setattr(dist.distributed_c10d, "_new_process_group_helper", fails)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: None)
    with pytest.raises(KeyError):
        named_group([0], "own", 60.0)
    assert (seen, world.bound_device_id) == ([None], "cuda:1")


def backend_of_a_group(world, backend):
    with patch.object(dist, "get_backend", lambda *group: backend):
        group = named_group([0], f"beside {backend}", 60.0)
    return dist.get_backend(group)


def test_a_group_has_the_backends_of_its_world():
    """Beside NCCL, "cpu:gloo,cuda:nccl": with gloo alone, a native collective on a GPU would find no backend."""
    assert minipar.run(backend_of_a_group, "cpu:gloo", world_size=1) == ["cpu:gloo"]
    assert minipar.run(backend_of_a_group, "gloo", world_size=1) == [process_groups.GLOO]


def backend_beside_another_default(world):
    with patch.object(
        dist, "get_backend", lambda group=None: "gloo" if group is world._transport.group else "nccl"
    ):
        group = world.subgroup([0], "alone").process_group()
    return dist.get_backend(group)


def test_a_group_has_its_worlds_backend_not_torchs_default():
    assert minipar.run(backend_beside_another_default, world_size=1) == [process_groups.GLOO]
