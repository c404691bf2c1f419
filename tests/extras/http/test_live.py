"""Requests that come and go while the engine runs: each gets its own text, and whoever leaves leaves no block behind."""

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipar.extras.http.live import Closed, Desk, Progress, QueueFull, serve_live
from minipar.inference import Engine, Options, Request
from minipar.inference.events import Event, Kind
from tests.inference.test_engine import LONGEST, SMALL, check_blocks, options, plant
from tests.inference.texts import PROMPTS, VOCAB, alone, requests
from tests.model.texts import loud_model


class Visit(NamedTuple):
    """A client: it comes before a step, and leaves some steps later, or stays to the end (None)."""

    request: Request
    comes: int
    stays: int | None


class Client:
    def __init__(self, desk, visit):
        self.visit, self.tokens, self.ended, self.left = visit, [], False, False
        self.error = None
        self.number = desk.submit(visit.request, self.listen)

    def listen(self, heard):
        assert not self.left, "told something after it had left"
        assert not self.ended
        self.tokens += heard.tokens
        self.error = heard.error
        self.ended = heard.is_last or heard.error is not None


def serve_visits(model, visits, options, max_open=100):
    """Serve in this process; look at the blocks before each step. Returns the clients and the desk."""
    engine, desk, clients, step = Engine(model, options), Desk(max_open, idle_s=0), [], 0
    coming = sorted(visits, key=lambda visit: visit.comes)

    def exchange(progress):
        nonlocal step
        check_blocks(engine)
        gone = {client.number for client in clients if client.left or client.ended}
        under_way = {sequence.number for sequence in engine.scheduler.sequences}
        assert not gone & under_way, "it left, and is still served"
        assert engine._saved.keys() <= under_way
        if coming and progress.is_idle:
            step = max(step, coming[0].comes)
        while coming and coming[0].comes <= step:
            clients.append(Client(desk, coming.pop(0)))
        for client in clients:
            stays = client.visit.stays
            if stays is not None and not client.ended and step >= client.visit.comes + stays:
                client.left = True
                desk.cancel(client.number)
        step += 1
        news = desk.answer(0, progress)
        if not coming and all(client.ended or client.left for client in clients):
            desk.close()
        return news

    serve_live(engine, exchange)
    return clients, desk, engine


def serve_and_compare(model, visits, options):
    clients, desk, engine = serve_visits(model, visits, options)
    assert len(clients) == len(visits)
    for client in clients:
        want = alone(model, client.visit.request)
        assert client.ended or client.left
        assert client.tokens == (want if client.ended else want[: len(client.tokens)])
    kept = 0 if engine.prefix is None else len(engine.prefix)
    assert engine.pool.num_free == engine.options.num_blocks - kept, "blocks leaked"
    left, ended = sum(c.left for c in clients), sum(c.ended for c in clients)
    # A client may leave in the very step in which its text ends.
    assert desk.totals.cancelled <= left
    assert desk.totals.finished >= ended
    assert desk.totals.finished + desk.totals.cancelled == len(visits)
    assert desk.num_open == 0


@given(
    visits=st.lists(
        st.builds(Visit, requests(LONGEST), st.integers(0, 9), st.one_of(st.none(), st.integers(0, 6))),
        min_size=1,
        max_size=6,
    ),
    options=options(),
)
def test_each_gets_its_own_text_whoever_comes_and_goes(visits, options):
    serve_and_compare(loud_model(SMALL), visits, options)


def crowd():
    """Visits with preemption by swapping; some leave while they run, wait or are swapped out."""
    visits = [
        Visit(
            Request(PROMPTS[i % 3][: 6 + i], 11, temperature=8.0 * (i % 2), seed=i),
            comes=i // 3,
            stays=None if i % 3 else 2 + i,
        )
        for i in range(8)
    ]
    return visits, Options(block_size=4, num_blocks=9, token_budget=12, preemption="swap")


def test_in_a_crowd_clients_leave_and_others_stay():
    serve_and_compare(loud_model(SMALL), *crowd())
    clients, desk, _ = serve_visits(loud_model(SMALL), *crowd())
    assert desk.totals.cancelled > 0
    assert desk.totals.finished > 0
    assert desk.totals.preemptions > 0


FAULTS = {
    "cancelled request keeps its blocks": (
        Engine, "cancel", "self.scheduler.remove(sequence)", "self.scheduler.sequences.remove(sequence)",
    ),
    "cancelled request goes on": (Engine, "cancel", "self.scheduler.remove(sequence)", "pass"),
    "streams swapped": (Desk, "_tell", "progress.written.get(number, [])", "progress.written.get(number ^ 1, [])"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(monkeypatch, fault):
    plant(monkeypatch, *FAULTS[fault])
    with pytest.raises(AssertionError):
        serve_and_compare(loud_model(SMALL), *crowd())


def fill(desk):
    for _ in range(desk.max_open + 1):
        desk.submit(Request((1,), 1), lambda heard: None)


def test_a_full_desk_takes_no_more_until_someone_leaves():
    desk = Desk(max_open=2, idle_s=0)
    with pytest.raises(QueueFull):
        fill(desk)
    assert desk.num_open == 2
    desk.cancel(0)
    assert desk.submit(Request((1,), 1), lambda heard: None) == 2
    assert [number for number, _ in desk.answer(0, Progress()).arrived] == [0, 1, 2]


def test_a_limit_that_is_ignored_is_seen(monkeypatch):
    plant(monkeypatch, Desk, "submit", "len(self._open) >= self.max_open", "False")
    with pytest.raises(pytest.fail.Exception):
        test_a_full_desk_takes_no_more_until_someone_leaves()


def test_a_request_that_cannot_be_served_is_told_why():
    (client, fine), desk, _ = serve_visits(
        loud_model(SMALL), [Visit(Request((VOCAB,), 1), 0, None), Visit(Request((1,), 2), 1, None)], Options()
    )
    assert client.error == "prompt has token 13; vocab_size=13 allows 0 to 12"
    assert fine.ended
    assert fine.error is None
    assert (desk.totals.refused, desk.totals.finished) == (1, 1)


def test_a_text_that_is_complete_is_finished_however_its_request_ends():
    desk = Desk(max_open=3, idle_s=0)
    for number in range(3):
        assert desk.submit(Request((1,), 5), lambda heard: None) == number
        desk.cancel(number, is_complete=number < 2)
    kinds = (
        Kind.CANCEL,
        Kind.FINISH,
        Kind.CANCEL,
    )  # the second ended in the very step in which it was cancelled
    events = tuple(Event(kind, number, 0.0, 0.0, 1) for number, kind in enumerate(kinds))
    assert desk.answer(0, Progress(events)).cancelled == (0, 1, 2)
    assert (desk.totals.finished, desk.totals.cancelled) == (2, 1)
    assert not desk._complete


def test_a_desk_that_closes_tells_those_who_wait():
    desk, heard = Desk(2), []
    desk.submit(Request((1,), 1), heard.append)
    desk.close("no more")
    assert [one.error for one in heard] == ["no more"]
    news = desk.answer(0, Progress())
    assert news.closed
    assert news.cancelled == (0,)
    with pytest.raises(Closed):
        desk.submit(Request((1,), 1), heard.append)
