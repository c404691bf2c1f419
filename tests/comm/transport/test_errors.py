"""A connection that broke is told as what it means of the rank at its other end."""

import re
from unittest import mock

import pytest
import torch

import minipar
from minipar.comm import PeerLost
from minipar.comm import native as native_module
from minipar.comm.transport.errors import peer_lost

GLOO = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4242. This is "
    "typically caused by a remote worker crashing."
)
BROKEN = [
    RuntimeError(GLOO),
    RuntimeError("[pair.cc:471] writev [127.0.0.1]:4242: Broken pipe"),
    RuntimeError("[pair.cc:601] Read error [127.0.0.1]:4242: Connection reset by peer"),
    BrokenPipeError(32, "Broken pipe"),
    ConnectionResetError(104, "Connection reset by peer"),
]


@pytest.mark.parametrize("error", BROKEN, ids=str)
def test_a_broken_connection_names_the_rank_that_ended(error):
    said = str(peer_lost("rank 0 could not send 8 bytes", "rank 1", error))
    assert re.fullmatch(
        "rank 0 could not send 8 bytes: rank 1 has ended, or .* equally many batches and steps", said
    )


def test_an_error_of_another_kind_is_told_as_it_is():
    assert str(peer_lost("rank 0 could not send", "rank 1", OSError("no memory"))) == (
        "rank 0 could not send: no memory"
    )


def native_sum_that_breaks(world, error):
    breaks = mock.patch.dict(native_module.NATIVE, all_reduce=mock.Mock(side_effect=error))
    with breaks, pytest.raises(RuntimeError) as caught:
        world.all_reduce(torch.ones(1), algorithm="native")
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize("error", [RuntimeError(GLOO), RuntimeError("a wrong shape")])
def test_torchs_collectives_name_the_ranks_that_may_have_ended(error):
    for rank, (kind, said) in enumerate(minipar.run(native_sum_that_breaks, error, world_size=2)):
        if "shape" in str(error):
            assert (kind, said) == (RuntimeError, "a wrong shape")
        else:
            assert kind is PeerLost
            assert (
                f"rank {rank} could not finish torch's all_reduce on comm 'world': rank {1 - rank} has"
                in said
            )
