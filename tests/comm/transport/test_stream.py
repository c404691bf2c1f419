"""A Comm is a stream: one order for its operations, whoever waits for what; several streams run at once."""

import threading
import time
import weakref
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.comm.transport.stream import Handle, StreamThread, ThreadStream
from tests.examples import examples


def test_a_thread_is_said_to_wait_as_long_as_it_waits():
    waits = {}
    handle = Handle("an operation", waits)
    waiter = threading.Thread(target=handle.wait)
    waiter.start()
    while not waits:
        pass
    assert waits == {waiter.ident: "an operation"}
    handle.finished.set()
    waiter.join()
    assert waits == {}


def test_operations_run_in_the_order_of_their_calls():
    stream, ran = ThreadStream("comm 'x'"), []
    gate = threading.Event()
    first = stream.submit(lambda: gate.wait(60) and ran.append("first"))
    second = stream.submit(lambda: ran.append("second"))
    assert not stream.idle()
    gate.set()
    stream.run(lambda: ran.append("third"))
    assert ran == ["first", "second", "third"]
    assert first.wait() is second.wait() is None
    assert stream.idle()


def test_an_idle_stream_works_in_the_callers_own_thread():
    stream = ThreadStream("comm 'x'")
    assert stream.run(threading.get_ident) == threading.get_ident()
    assert stream.submit(threading.get_ident).wait() != threading.get_ident()
    assert stream.run(threading.get_ident) == threading.get_ident()


def test_a_step_within_an_operation_runs_at_once():
    stream = ThreadStream("comm 'x'")
    assert stream.run(lambda: stream.run(lambda: 1)) == 1
    assert stream.submit(lambda: stream.run(lambda: 2)).wait() == 2


def test_an_error_is_raised_at_wait_and_the_stream_goes_on():
    stream = ThreadStream("comm 'x'")
    handle = stream.submit(lambda: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            handle.wait()
    assert stream.submit(lambda: 7).wait() == 7


def test_a_second_thread_is_refused():
    stream, said = ThreadStream("comm 'x'"), []
    stream.run(lambda: None)

    def other():
        with pytest.raises(RuntimeError, match="two threads use comm 'x'.*a name of its own"):
            stream.run(lambda: None)
        said.append(True)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert said == [True]


def test_a_stream_in_use_refuses_another_streams_operation():
    inner, outer = ThreadStream("comm 'inner'"), ThreadStream("comm 'outer'")

    def step():
        handle = outer.submit(lambda: inner.run(lambda: None))
        with pytest.raises(
            RuntimeError, match="thread \"comm 'outer'\" uses comm 'inner' while another thread is"
        ):
            handle.wait()
        return inner.run(lambda: 1)

    assert inner.run(step) == 1
    assert outer.submit(lambda: inner.run(lambda: 2)).wait() == 2


def test_draining_returns_the_errors_that_no_wait_has_raised():
    stream = ThreadStream("comm 'x'")
    told, untold = (stream.submit(partial(divmod, number, 0), what="sum") for number in (1, 2))
    with pytest.raises(ZeroDivisionError):
        told.wait()
    assert stream.drain() == [untold._error]
    assert untold._error.__notes__ == [
        "This was sum of comm 'x', asynchronous, and nobody has waited for it."
    ]


def test_draining_waits_for_what_nobody_has_waited_for():
    stream, ended = ThreadStream("comm 'x'"), []
    stream.drain()
    gate = threading.Event()
    stream.submit(lambda: gate.wait(60) and ended.append(True))
    threading.Timer(0.05, gate.set).start()
    stream.drain()
    assert ended == [True]


class LateEvent(threading.Event):
    """Whoever waits goes on before `set` returns, as when the waiting thread is scheduled first."""

    def set(self):
        super().set()
        time.sleep(0.2)


class Brought:
    """What an operation brings along."""

    def keep(self):
        return None


def test_an_operation_is_released_once_it_is_waited_for():
    brought, handle, thread = Brought(), Handle(), StreamThread("a stream")
    gone, handle.finished = weakref.ref(brought), LateEvent()
    thread.operations.put((handle, brought.keep))
    thread.operations.put(None)
    del brought
    thread.start()
    handle.wait()
    assert gone() is None
    thread.join()


def test_two_threads_may_not_share_a_comm_but_may_use_subgroups():
    def results(world):
        world.barrier()
        mine, theirs = world.subgroup([0, 1], "mine"), world.subgroup([0, 1], "theirs")
        said = []

        def other():
            said.append(theirs.all_reduce(torch.ones(3)).tolist())
            with pytest.raises(RuntimeError, match="two threads use comm 'world'"):
                world.all_reduce(torch.ones(3))

        thread = threading.Thread(target=other)
        thread.start()
        total = mine.all_reduce(torch.ones(3)).tolist()
        thread.join()
        return [total, *said]

    assert minipar.run(results, world_size=2) == [[[2.0] * 3] * 2] * 2


def test_a_backward_may_communicate_from_autograds_own_thread():
    """A hook runs on a thread of autograd's where the device has one, and acts for the thread that called backward."""

    def gradient(world):
        x = torch.ones(2, requires_grad=True)
        x.register_hook(lambda g: world.all_reduce(g))
        world.barrier()
        x.sum().backward()
        return x.grad.tolist()

    assert minipar.run(gradient, world_size=2) == [[2, 2]] * 2


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "world"]), st.booleans()), min_size=1, max_size=12))
@examples(15)
def test_mixed_asynchronous_and_synchronous_calls_are_right(calls):
    """On three streams of the same ranks: each call's result is that of the call, in whatever order they end."""

    def results(world):
        comms = {"a": world.subgroup(range(3), "a"), "b": world.subgroup(range(3), "b"), "world": world}
        inputs = [torch.full((50,), float(i)) for i in range(len(calls))]
        out = [comms[name].all_reduce(x, async_op=late) for (name, late), x in zip(calls, inputs)]
        return [(y.wait() if late else y)[0].item() for y, (_, late) in zip(out, calls)]

    assert minipar.run(results, world_size=3) == [[3.0 * i for i in range(len(calls))]] * 3


def test_synchronous_operations_see_earlier_asynchronous_ones():
    def result(world):
        x = torch.ones(1 << 18)
        handle = world.all_reduce_(x, async_op=True)
        y = world.all_reduce(x)  # queued behind, so x is summed already
        handle.wait()
        return y[0].item(), x[0].item()

    assert minipar.run(result, world_size=2) == [(4.0, 2.0)] * 2


def test_a_collective_is_under_way_while_its_caller_computes():
    """Each rank launches, then tells the other by a message that it went on: with a caller that waits this would hang."""

    def result(world):
        other, bell = 1 - world.rank, world.subgroup([0, 1], "bell")
        if world.rank == 0:
            handle = world.all_reduce(torch.ones(4), async_op=True)
            bell.send(torch.ones(1), other)  # rank 1 joins the all-reduce only after hearing this
        else:
            bell.recv((1,), torch.float32, other)
            handle = world.all_reduce(torch.ones(4), async_op=True)
        return handle.wait().tolist()

    assert minipar.run(result, world_size=2) == [[2.0] * 4] * 2


@pytest.mark.parametrize("outer_is_async", [False, True])
def test_a_nested_asynchronous_operation_returns_a_handle(outer_is_async):
    """It runs at once, as a step of the other; whoever wrote it need not know that."""

    def result(world):
        def steps():
            handles = [
                world.all_reduce(torch.ones(2), async_op=True),
                world.all_gather(torch.tensor([world.rank]), async_op=True),
                world.reduce(torch.ones(2), async_op=True),
                world.custom("inner", lambda: 7, async_op=True),
                world.exchange(
                    torch.ones(1), 1 - world.rank, (1,), torch.float32, 1 - world.rank, async_op=True
                ),
            ]
            total, parts, reduced, inner, received = (handle.wait() for handle in handles)
            reduced = reduced.tolist() if world.rank == 0 else reduced
            return total.tolist(), parts.tolist(), reduced, inner, received.tolist()

        done = world.custom("outer", steps, async_op=outer_is_async)
        return done.wait() if outer_is_async else done

    want = [([2.0, 2.0], [0, 1], reduced, 7, [1.0]) for reduced in ([2.0, 2.0], None)]
    assert minipar.run(result, world_size=2) == want


@pytest.mark.tagged("on both ranks a send waits behind a receive, which NCCL takes in order")
def test_point_to_point_beside_a_running_collective_does_not_meet_it():
    def result(world):
        other, bell = 1 - world.rank, world.subgroup([0, 1], "bell")
        handle = world.all_reduce(torch.full((1 << 16,), 1.0), async_op=True)
        received = [
            bell.exchange(torch.tensor([i]), other, (1,), torch.int64, other).item() for i in range(20)
        ]
        later = world.recv((1,), torch.int64, other, async_op=True)
        world.send(torch.tensor([77]), other, async_op=True).wait()
        return received == list(range(20)), later.wait().item(), handle.wait().unique().tolist()

    assert minipar.run(result, world_size=2) == [(True, 77, [2.0])] * 2
