"""The order and the lifetimes that a Comm's CUDA stream keeps, on a stand-in for torch.cuda: no GPU is needed."""

import gc
import weakref

import pytest
import torch

from minipar.comm.transport.cuda_stream import CudaStream
from minipar.comm.transport.cuda_trace import CudaTrace, trace_on
from minipar.comm.transport.messages import ChannelId
from minipar.comm.transport.recording import run_recorded
from minipar.comm.transport.watch import Watch
from minipar.support.trace import Trace, overlap_fraction
from tests.comm.transport.fake_cuda import FakeCuda, FakeStream

KEY = ChannelId("world", (0, 1))


class Seen(torch.Tensor):
    """A tensor that notes which streams it was marked as used by."""

    def record_stream(self, stream):
        self.users = [*getattr(self, "users", []), stream.name]


def made(watch=None):
    cuda = FakeCuda()
    return cuda, CudaStream(KEY, torch.device("cuda", 0), watch, cuda)


def test_streams_wait_for_each_other_and_the_host_never_waits():
    cuda, stream = made()
    result = torch.ones(2).as_subclass(Seen)
    handle = stream.submit(lambda: cuda.put(cuda.current_stream(), "all_reduce") or result)
    cuda.put(cuda.current_stream(), "matmul")
    assert handle.wait() is result
    assert cuda.log == [
        ("comm", "waits for stream", "main"),
        ("comm", "all_reduce"),
        ("main", "matmul"),  # while the collective runs
        ("main", "waits for event of", "comm"),
    ]
    assert result.users == ["main"]


def submitted(stream):
    """A handle for an operation on a tensor that its caller has dropped, and a weak reference to that tensor."""
    x = torch.ones(4)
    return stream.submit(lambda: x.sum().item()), weakref.ref(x)


def alive(x):
    gc.collect()
    return x() is not None


def test_an_input_lives_until_its_operation_has_ended():
    _, stream = made()
    _, x = submitted(stream)
    stream.submit(int)
    assert alive(x), "the memory could be handed out again while the Comm's stream reads it"
    stream._stream.finish()
    stream.submit(int)
    assert not alive(x)


@pytest.mark.parametrize(("waiter", "kept"), [("caller", False), ("another stream", True)])
def test_an_input_is_let_go_once_its_callers_stream_has_waited(waiter, kept):
    cuda, stream = made()
    handle, x = submitted(stream)
    with cuda.stream(cuda.current_stream() if waiter == "caller" else FakeStream(cuda, "other")):
        handle.wait()
    assert alive(x) == kept


def test_a_step_within_an_operation_runs_at_once_on_the_same_stream():
    cuda, stream = made()
    assert stream.run(lambda: stream.run(lambda: cuda.current_stream().name)) == "comm"
    assert not stream.inside()


def test_an_operation_that_raises_leaves_the_stream_usable():
    _, stream = made()
    with pytest.raises(ZeroDivisionError):
        stream.run(lambda: 1 / 0)
    assert stream.run(lambda: 3) == 3


def test_every_operation_is_watched_by_its_name():
    watch = Watch(1.0, print)
    cuda, stream = made(watch)
    stream.run(int, what="all_reduce")
    assert watch.counts == {KEY: 1}
    assert watch.look() is None
    stream._stream.finish()
    assert watch.look() is None
    assert not watch._pending[KEY]


def test_only_reading_a_traces_spans_waits_for_the_gpu():
    cuda, stream = made()
    trace = CudaTrace(cuda)
    waits = len(cuda.log)
    handle = stream.submit(
        lambda: run_recorded(trace, "all_reduce", stream, lambda: cuda.put(cuda.current_stream(), "sends")),
        lambda start, end: trace.add("wait", "all_reduce", start, end),
    )
    with trace.span("compute", "matmul"):
        cuda.put(cuda.current_stream(), "matmul")
    handle.wait()
    assert ("host", "synchronizes") not in cuda.log[waits:]
    communicate, compute, wait = trace.spans
    assert cuda.log[waits:].count(("host", "synchronizes")) == 1
    assert (communicate.lane, compute.lane, wait.lane) == ("comm 'world'", "main", "main")
    assert [round(s.end_s - s.start_s, 6) for s in (communicate, compute, wait)] == [1.0, 1.0, 1.0]
    assert communicate.end_s == compute.start_s  # as they were put on the streams
    assert overlap_fraction(trace.spans) == 0.0


def test_a_cpus_trace_is_the_hosts():
    assert type(trace_on(torch.device("cpu"))) is Trace
