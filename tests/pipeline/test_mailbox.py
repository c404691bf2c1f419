"""Messages on their way: when a thread waits for them, and when the step does at its end."""

from threading import current_thread, main_thread
from types import SimpleNamespace

import pytest
import torch

from minipar.pipeline.mailbox import HELD_BYTES, Mailbox, Outbox
from minipar.schedules.gpipe import gpipe


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
    outbox.put(message, 100)
    outbox.drain()
    thread = outbox._thread
    assert waited.count(thread) == 2
    assert waited.count(main_thread()) == 1, "the bytes that the thread waits for count again"
    del outbox
    thread.join(timeout=60)
    assert not thread.is_alive(), "the thread outlives its outbox"


@pytest.mark.parametrize(("device", "by_a_thread"), [("cpu", True), ("cuda", False)])
def test_a_gpu_keeps_a_messages_memory_without_a_thread(device, by_a_thread):
    comm = SimpleNamespace(rank=0, device=torch.device(device), subgroup=lambda *_: None)
    mailbox, waited = Mailbox(comm, gpipe(2, 2)), []
    mailbox._outbox.put(SimpleNamespace(wait=lambda: waited.append(current_thread())), HELD_BYTES + 1)
    mailbox.finish()
    assert len(waited) == 1
    assert (waited != [main_thread()]) == by_a_thread
