"""The check of the collectives goes red where the messages of the library's own algorithms go wrong."""

import pytest
import torch

import minipar
from minipar.comm import ring, tree
from minipar.spec.collectives import Call, wrong


class Tampered:
    """A Comm whose exchanges a test can change."""

    def __init__(self, comm):
        self._comm, self.num_exchanges = comm, 0

    def __getattr__(self, name):
        return getattr(self._comm, name)


class WrongNeighbour(Tampered):
    """Two ranks away."""

    def exchange(self, x, to, shape, dtype, source, out):
        to, source = (to + 1) % self.size, (source - 1) % self.size
        return self._comm.exchange(x, to, shape, dtype, source, out=out)


class OneExchangeSkipped(Tampered):
    skipped = 1

    def exchange(self, x, to, shape, dtype, source, out):
        self.num_exchanges += 1
        if self.num_exchanges == self.skipped:
            return out.zero_()
        return self._comm.exchange(x, to, shape, dtype, source, out=out)


class LastExchangeSkipped(OneExchangeSkipped):
    skipped = 4  # of a reduce-scatter or an all-gather of 5 ranks


class OthersForgotten(Tampered):
    """What arrives is replaced by zeros."""

    def exchange(self, x, to, shape, dtype, source, out):
        return self._comm.exchange(x, to, shape, dtype, source, out=out).zero_()


RINGS = {"all_reduce": ring.all_reduce, "reduce_scatter": ring.reduce_scatter, "all_gather": ring.all_gather}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("collective", RINGS)
@pytest.mark.parametrize(
    "fault", [WrongNeighbour, OneExchangeSkipped, LastExchangeSkipped, OthersForgotten, None]
)
def test_a_ring_whose_messages_go_wrong_is_noticed(collective, fault):
    def check(world):
        function = RINGS[collective]
        broken = function if fault is None else lambda comm, x: function(fault(comm), x)
        return wrong(world, broken, Call(collective, (10, 2)))

    found = minipar.run(check, world_size=5)
    assert any(found) == (fault is not None)


def test_a_mean_divided_twice_is_noticed():
    def twice(world):
        mean = Call("all_reduce", (7,), torch.float64, "mean")
        return wrong(world, lambda comm, x: tree.all_reduce(comm, x, "mean") / comm.size, mean)

    for words in minipar.run(twice, world_size=3):
        assert "exactly 3 times too small" in words
