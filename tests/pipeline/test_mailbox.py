"""Messages on their way: when a thread waits for them, and when the step does at its end."""

from threading import current_thread, main_thread
from types import SimpleNamespace

from minipar.pipeline.mailbox import Outbox


def test_steps_of_few_bytes_wake_no_thread_however_many_there_are():
    outbox, waited = Outbox(held_bytes=100), []
    message = SimpleNamespace(wait=lambda: waited.append(current_thread()))
    for _ in range(3):
        outbox.put(message, 60)
        outbox.put(message, 40)
        outbox.drain()
    assert waited == [main_thread()] * 6


def test_a_thread_waits_for_more_bytes_and_ends_with_its_outbox():
    outbox, waited = Outbox(held_bytes=100), []
    message = SimpleNamespace(wait=lambda: waited.append(current_thread()))
    outbox.put(message, 100)
    outbox.put(message, 1)
    outbox.drain()
    thread = outbox._thread
    assert waited == [thread] * 2
    del outbox
    thread.join(timeout=60)
    assert not thread.is_alive(), "the thread outlives its outbox"
