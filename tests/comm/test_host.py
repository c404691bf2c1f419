"""A Comm for values that the host needs: without gloo in the process group, the Comm of the GPUs itself."""

from types import SimpleNamespace
from unittest.mock import patch

import torch

import minipar
from minipar.comm import host


def test_a_group_of_nccl_alone_has_no_other_comm_for_the_host():
    comm = SimpleNamespace(device=torch.device("cuda"), _transport=SimpleNamespace(group=None))
    with patch.object(host, "has_backend", lambda group, backend: False):
        assert host.on_host(comm) is comm


class OnGpu:
    """A comm that says to be on a GPU."""

    device = torch.device("cuda")

    def __init__(self, comm):
        self.comm = comm

    def __getattr__(self, name):
        return getattr(self.comm, name)


def reduces_on_the_host(world):
    return [
        host.on_host(OnGpu(world)).all_reduce(torch.ones(2), algorithm="native").tolist() for _ in range(2)
    ]


def test_a_comm_can_be_asked_for_its_host_s_twice():
    assert minipar.run(reduces_on_the_host, world_size=2) == [[[2.0, 2.0]] * 2] * 2
