"""What is on its way while a block is computed, seen in a trace."""

from contextlib import contextmanager
from threading import Semaphore

import minipar
from minipar.support.trace import Trace
from tests.context.strategies import Case


class EachBlockWaitsForAMessage(Trace):
    """The first block of a forward and of a backward ends only when a message has been begun since the last such block."""

    def __init__(self):
        super().__init__()
        self.begun, self.blocks = Semaphore(0), []

    @contextmanager
    def span(self, kind, name, lane="main"):
        with super().span(kind, name, lane):
            if kind == "communicate":
                self.begun.release()  # after the span has its start
            yield
            if kind == "compute":
                first = name.split()[0] not in self.blocks
                self.blocks.append(name.split()[0])
                assert not first or self.begun.acquire(timeout=60), f"nothing was under way beside {name}"


def traced(world):
    case = Case("ring", world.size, "zigzag", seq_len=2048 * world.size, head_dim=32, impl="tiled")
    mine = [case.local(x, world.rank).float().requires_grad_() for x in case.qkv()]
    world.trace = EachBlockWaitsForAMessage()
    case.split(world, *mine).sum().backward()
    spans, world.trace = world.trace.spans, None
    return spans


def test_keys_and_values_travel_while_blocks_are_computed():
    for spans in minipar.run(traced, world_size=2):
        computed = [s for s in spans if s.kind == "compute"]
        sent = [s for s in spans if s.kind == "communicate"]
        assert [s.name.split()[0] for s in computed] == 2 * ["forward"] + 2 * ["backward"]
        # keys and values forward and backward, and one gradient home
        assert [s.name.split()[0] for s in sent] == 2 * ["ring_attention"] + ["ring_attention_gradients"]
        assert {s.lane for s in sent}.isdisjoint({s.lane for s in computed})
        # under way, on the Comm's lane, before the block beside them has been computed
        for on_its_way, block in zip(sent, (computed[0], computed[2])):
            assert on_its_way.start_s < block.end_s
