"""Which backend a world gets and which GPU a rank, and what is refused before a rank starts. No GPU is needed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipar.runtime import devices
from minipar.runtime.devices import Machine, choose_backend, device_of, group_options, why_not_nccl

FOUR = Machine(4, (2, 28, 3), False)
machines = st.builds(
    Machine,
    st.integers(0, 8),
    st.sampled_from([None, (2, 18, 1), (2, 29, 7), (2, 30, 0), (3, 0, 0)]),
    st.booleans(),
)


@pytest.mark.parametrize(
    ("machine", "ranks", "words"),
    [
        (Machine(0, None, False), 2, "needs a GPU, and torch finds none; use gloo"),
        (Machine(2, None, False), 2, "is not in this build of torch; install torch with CUDA, or use gloo"),
        (FOUR, 8, "has 8 ranks for 4 GPUs here, and NCCL 2.28.3 allows one rank per GPU; "
                  "use 4 ranks, NCCL 2.30 or later, or gloo"),
        (Machine(1, (2, 30, 1), False), 2, "has 2 ranks for 1 GPU here; use 1 rank, "
                                           "set NCCL_MULTI_RANK_GPU_ENABLE=1 so that ranks share a GPU, or use gloo"),
        (Machine(1, (2, 29, 9), True), 2, "NCCL 2.29.9 allows one rank per GPU"),
    ],
)  # fmt: skip
def test_what_nccl_cannot_serve_is_refused_with_what_would_work(machine, ranks, words):
    with pytest.raises(ValueError, match="backend='nccl' ") as refused:
        choose_backend("nccl", ranks, machine)
    assert words in str(refused.value)
    assert choose_backend("auto", ranks, machine) == "gloo"


@given(machines, st.integers(1, 16))
def test_auto_takes_nccl_exactly_where_nccl_is_not_refused(machine, ranks):
    refused = why_not_nccl(ranks, machine)
    assert choose_backend("auto", ranks, machine) == ("gloo" if refused else "nccl")
    if not refused:
        assert choose_backend("nccl", ranks, machine) == "nccl"
        assert machine.num_gpus >= ranks or (machine.shares_gpus and machine.nccl >= (2, 30))


@given(machines, st.integers(1, 16))
def test_gloo_serves_every_machine(machine, ranks):
    assert choose_backend("gloo", ranks, machine) == "gloo"
    assert device_of("gloo", ranks - 1, machine) == torch.device("cpu")


@pytest.mark.parametrize(("gpus", "local_rank", "gpu"), [(4, 0, 0), (4, 3, 3), (1, 3, 0), (2, 5, 1)])
def test_a_rank_has_the_gpu_of_its_local_rank_and_ranks_beyond_share(monkeypatch, gpus, local_rank, gpu):
    current = []
    monkeypatch.setattr(devices.torch.cuda, "set_device", current.append)
    device = device_of("nccl", local_rank, Machine(gpus, (2, 30, 0), True))
    assert current == [device] == [torch.device("cuda", gpu)]


def test_a_group_on_gpus_is_bound_to_one_and_has_gloo_for_the_host():
    device = torch.device("cuda", 1)
    assert group_options("nccl", device) == {"backend": "cpu:gloo,cuda:nccl", "device_id": device}
    assert group_options("gloo", torch.device("cpu")) == {"backend": "gloo"}


def test_several_ranks_on_a_gpu_are_allowed_by_nccls_own_variable(monkeypatch):
    for value, allowed in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", value)
        assert Machine.here().shares_gpus == allowed
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE")
    assert not Machine.here().shares_gpus


def test_the_nccl_that_is_loaded_counts_not_the_one_torch_was_built_with(monkeypatch):
    class Loaded:
        def ncclGetVersion(self, found):
            found._obj.value = 23203

    monkeypatch.setattr(devices.torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(devices.ctypes, "CDLL", lambda name: Loaded())
    assert Machine.here().nccl == (2, 32, 3)
