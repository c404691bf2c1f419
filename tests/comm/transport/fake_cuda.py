"""A stand-in for torch.cuda: streams whose work is done when the test says so. The host can never wait for one."""

from __future__ import annotations

from contextlib import contextmanager


class FakeCuda:
    """`log` has what was put on each stream, in order; `finish(stream)` runs it all. A second passes with every entry."""

    def __init__(self):
        self.log: list[tuple] = []
        self.time_s = 0.0
        self._current = FakeStream(self, "main")

    def Stream(self, device):
        return FakeStream(self, "comm")

    def Event(self, enable_timing=False):
        return FakeEvent(self, enable_timing)

    def current_stream(self):
        return self._current

    @contextmanager
    def stream(self, stream):
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def synchronize(self):
        self.log.append(("host", "synchronizes"))

    def put(self, stream, *what):
        self.log.append((stream.name, *what))
        self.time_s += 1.0


class FakeStream:
    def __init__(self, cuda, name):
        self.cuda, self.name, self.events = cuda, name, []

    def wait_stream(self, other):
        self.cuda.put(self, "waits for stream", other.name)

    def wait_event(self, event):
        self.cuda.put(self, "waits for event of", event.stream.name)

    def record_event(self, event=None):
        event = event or FakeEvent(self.cuda)
        event.record(self)
        return event

    def finish(self):
        for event in self.events:
            event.passed = True


class FakeEvent:
    def __init__(self, cuda, enable_timing=False):
        self.cuda, self.enable_timing, self.passed = cuda, enable_timing, False

    def record(self, stream):
        self.stream, self.at_s = stream, self.cuda.time_s
        stream.events.append(self)

    def query(self):
        return self.passed

    def elapsed_time(self, later):
        assert self.enable_timing, "as torch refuses it"
        assert later.enable_timing, "as torch refuses it"
        return 1000 * (later.at_s - self.at_s)
