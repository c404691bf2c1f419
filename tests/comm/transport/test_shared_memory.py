"""Through shared memory arrive the same bits and counts as through gloo, and a peer that ends is found."""

import mmap
import os
import re
import resource
import signal
import time
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.comm.transport import linking, shared_memory
from minipar.comm.transport.errors import PeerLate, PeerLost
from minipar.comm.transport.linking import Described
from minipar.comm.transport.messages import ChannelId, Message
from minipar.comm.transport.transport import Tagged, Transport
from minipar.comm.transport.transports import choose_transport
from minipar.context.attention_ring import ring_attention
from minipar.runtime import call as runtime_call
from minipar.support.errors import RankError
from tests.comm import cases as cases_module
from tests.comm.cases import cases
from tests.comm.transport.test_checked import run_on, sends_and_results
from tests.examples import examples

NAMES = [
    (kind, name) for kind, name in cases_module.NAMES if name not in ("native", "auto")
]  # those of extras, too
MILLION = 1 << 20


def with_links(world, limits, function, *args):
    """Call the function with these constants of the transport; return its result, and whether each link could be made."""
    with mock.patch.multiple(shared_memory, **limits):
        return function(world, *args), [link is not None for link in world._transport._links.values()]


LIMITS = {
    "every message is long, and in slots of 200 bytes": {"SLOT_BYTES": 200, "LONG_BYTES": 1},
    "some are long": {"SLOT_BYTES": 100, "LONG_BYTES": 50, "REPEATED": 0},
    "short ones from the third on": {"REPEATED": 2},
}


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
@examples(4)
@given(size=st.integers(2, 4), data=st.data())
def test_results_bytes_and_messages_are_those_of_the_tagged_transport(limits, size, data):
    calls = data.draw(st.lists(cases(size, NAMES), min_size=4, max_size=10))
    tagged = run_on("tagged", sends_and_results, calls, world_size=size)
    shared = run_on("shared", with_links, limits, sends_and_results, calls, world_size=size)
    for rank, (one, (other, links)) in enumerate(zip(tagged, shared)):
        assert all(links)
        for call, (result, *sent), (same, *also) in zip(calls, one, other):
            assert sent == also, (rank, call)
            assert result is same is None or torch.equal(result, same), (rank, call)


def one_of_each(world):
    """The results of one collective of each kind."""
    p, x = world.size, torch.arange(24.0) + world.rank
    y = x.clone()
    return [
        world.all_reduce(x),
        world.reduce_scatter(x),
        world.all_gather(x),
        world.all_to_all(x),
        world.broadcast(x, root=p - 1),
        world.broadcast(y, root=p - 1, out=y),
        world.broadcast(x, algorithm="ring"),
        world.reduce(x, root=p - 1),
        world.reduce(x, algorithm="ring"),
        *attended(world),
    ]


def attended(world):
    """Ring attention's output, and the gradient of its keys."""
    torch.manual_seed(world.rank)
    q, k, v = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3))
    out = ring_attention(world, q, k, v)
    out.square().sum().backward()
    return out.detach(), k.grad


def all_long(world, function, refuses=()):
    """Call the function where every message is long; return its result, and the kinds of collectives that used links."""
    kinds = set()

    class Seen(shared_memory.Exchange):
        def __init__(self, transport, moves):
            super().__init__(transport, moves)
            kinds.update(half.message.label.split()[0] for half, _ in moves)

    constants = mock.patch.multiple(shared_memory, SLOT_BYTES=40, LONG_BYTES=1, Exchange=Seen)
    refused = mock.patch.object(linking, "_connection_to", return_value=None)
    with constants, refused if world.rank in refuses else nullcontext():
        return function(world), kinds


KINDS = {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce"}
KINDS |= {"ring_attention", "ring_attention_gradients"}


def test_every_kind_uses_links_and_gloo_gives_the_same_results():
    right = run_on("tagged", one_of_each, world_size=3)
    for refuses in ((), (1,), (0, 1, 2)):
        for rank, (results, kinds) in enumerate(
            run_on("shared", all_long, one_of_each, refuses, world_size=3)
        ):
            assert all(a is b is None or torch.equal(a, b) for a, b in zip(results, right[rank], strict=True))
            assert kinds == (set() if len(refuses) == 3 else KINDS)


@pytest.mark.parametrize("name", ["tagged", "shared"])
def test_a_conjugate_and_a_negative_view_are_sent_as_their_values(name):
    def received(world):
        x = torch.view_as_complex(torch.arange(12.0).view(6, 2))
        return world.broadcast(x.conj()), world.broadcast(x[:1].conj().imag)

    for (conjugate, imaginary), _ in run_on(name, all_long, received, world_size=2):
        pairs = torch.arange(12.0).view(6, 2)
        assert torch.equal(conjugate.resolve_conj(), torch.complex(pairs[:, 0], -pairs[:, 1]))
        assert imaginary.tolist() == [-1.0]


def sums(world, limit_bytes=None):
    """Sum 4 MB on this Comm, where a file may have `limit_bytes` on rank 1: the sum, whether links came to be, errors."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit_bytes and world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, old[1]))
    try:
        total = world.all_reduce(torch.full((MILLION,), world.rank + 1.0), algorithm="ring")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    links = world._transport._links
    return total.unique().tolist(), {(verb, peer): bool(link) for (_, verb, peer, _), link in links.items()}


def test_without_shared_memory_a_rank_uses_gloo_and_says_so(capfd):
    ranks = run_on("shared", sums, MILLION, world_size=3)
    assert [total for total, _ in ranks] == [[6.0]] * 3
    assert [links for _, links in ranks] == [
        {("send", 1): True, ("receive", 2): True},
        {("send", 2): False, ("receive", 0): True},
        {("send", 0): True, ("receive", 1): False},
    ]
    assert "rank 1 sends through gloo, as it has no memory to share: " in capfd.readouterr().err


def on_another_machine(world):
    with mock.patch.object(linking, "_connection_to", return_value=None):
        return sums(world)


def test_ranks_that_cannot_connect_stay_on_gloo():
    ranks = run_on("shared", on_another_machine, world_size=2)
    assert ranks == [([3.0], {("send", 1 - r): False, ("receive", 1 - r): False}) for r in range(2)]


def without_memory_files(world):
    if world.rank == 1:
        with mock.patch.object(os, "memfd_create", create=True):
            del os.memfd_create  # as on another system, or in a Python built for an old Linux
            return sums(world)
    return sums(world)


def test_without_memory_files_a_rank_uses_gloo_silently(capfd):
    (_, links), (total, others) = run_on("shared", without_memory_files, world_size=2)
    assert total == [3.0]
    assert links == {("send", 1): True, ("receive", 1): False}
    assert others == {("send", 0): False, ("receive", 0): True}
    assert capfd.readouterr().err == ""


@contextmanager
def few_descriptors(spare):
    """Leave this process so many descriptors, and no gaps below the ones in use."""
    old, used = resource.getrlimit(resource.RLIMIT_NOFILE), [os.dup(0)]
    highest = max(map(int, os.listdir("/proc/self/fd")))
    while used[-1] < highest:
        used.append(os.dup(0))
    free = used.pop()
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + spare, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, old)
        for descriptor in used:
            os.close(descriptor)


def with_few_descriptors(world, spare, every):
    """Sum as above with so many descriptors left, on rank 1 or on every rank."""
    world.all_reduce(torch.ones(1))  # gloo's own connections
    with few_descriptors(spare) if every or world.rank == 1 else nullcontext():
        return sums(world)


@pytest.mark.parametrize("every", [False, True], ids=["one rank", "every rank"])
def test_ranks_short_of_descriptors_agree_on_using_gloo(every):
    """Each step needs one or two more: memory, its map, a socket, a connection, the descriptor that is passed."""
    kinds = set()
    for spare in range(12):
        (total, links), (same, others) = run_on("shared", with_few_descriptors, spare, every, world_size=2)
        assert total == same == [3.0]
        assert links["send", 1] == others["receive", 0]
        assert links["receive", 1] == others["send", 0]
        kinds.add((links["send", 1], links["receive", 1]))
    assert {(False, False), (True, True)} <= kinds


def links_after_sums(world, num_sums):
    for _ in range(num_sums):
        world.all_reduce_(torch.ones(4))
    return list(world._transport._links)


def test_a_short_message_takes_a_link_once_as_many_went_before_it():
    channel = ChannelId("world", (0, 1))
    for num_sums, made in ((shared_memory.REPEATED, False), (shared_memory.REPEATED + 1, True)):
        for rank, links in enumerate(run_on("shared", links_after_sums, num_sums, world_size=2)):
            small = [(channel, verb, 1 - rank, shared_memory.LONG_BYTES) for verb in ("send", "receive")]
            assert links == (small if made else [])


def test_short_all_to_all_messages_always_stay_on_gloo():
    def links(world):
        for _ in range(shared_memory.REPEATED + 2):
            world.all_to_all(torch.ones(4))
        short = len(world._transport._links)
        world.all_to_all(torch.ones(MILLION))
        return short, len(world._transport._links)

    assert run_on("shared", links, world_size=2) == [(0, 2)] * 2


def a_tree_and_a_ring(world):
    """One all-reduce along a tree, then the same with exchanges; return this rank's links."""
    with mock.patch.multiple(shared_memory, LONG_BYTES=1):
        world.all_reduce(torch.ones(4), algorithm="tree")
        after_tree = len(world._transport._links)
        world.all_reduce(torch.ones(4), algorithm="ring")
        return after_tree, len(world._transport._links)


def test_separate_sends_and_receives_use_links_only_with_a_root():
    assert run_on("shared", a_tree_and_a_ring, world_size=3) == [(0, 2)] * 3


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def open_after(world, connect):
    """Open files and waits after a sum on links and the end of all operations, and open files before."""
    world.all_reduce(torch.ones(1))  # gloo's own connections
    before = open_files()
    connect(world)
    world._transport.close()
    return before, open_files(), world._transport.waits


@pytest.mark.parametrize("connect", [sums, on_another_machine])
def test_closing_the_transport_leaves_no_link_files_open(connect):
    for before, after, waits in run_on("shared", open_after, connect, world_size=2):
        assert before == after
        assert waits == {}


def memories() -> set[str]:
    """Names that stay in /dev/shm: other tests' semaphores and tensors have some for a moment."""
    looks = []
    for _ in range(3):
        looks.append(set(os.listdir("/dev/shm")))
        time.sleep(0.1)
    return set.intersection(*looks)


def left_behind(world):
    """Names in /dev/shm and open files after a run."""
    return memories(), open_files()


def test_a_run_leaves_no_name_and_no_open_file():
    def after_a_run():
        run_on("shared", sums, world_size=2)
        return run_on("shared", left_behind, world_size=2)

    for (names, files), (later, later_files) in zip(after_a_run(), after_a_run()):
        assert later <= names
        assert later_files <= files


def ends_between_segments(world, how):
    """Rank 1 ends after its first segment of the second sum."""
    sums(world)
    if world.rank == 1:
        send, sent = shared_memory.Link._send, []

        def then_ends(*args):
            if sent:
                how()
            sent.append(send(*args))

        shared_memory.Link._send = then_ends
    world.all_reduce(torch.ones(4 * MILLION), algorithm="ring")


def test_the_memory_of_a_link_is_taken_before_it_is_written_to():
    offer = linking._offer(0, MILLION)
    assert os.fstat(offer.descriptor).st_blocks * 512 >= MILLION
    offer.close()


def test_link_names_are_random_rather_than_counted_up():
    offer = linking._offer(0, 200)
    assert re.fullmatch(rb"\0minipar-[0-9a-f]{32}", offer.listener.getsockname())
    offer.close()


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_writer_is_found_long_before_the_deadline():
    names = memories()
    with pytest.raises(RankError, match=r"(?s)rank 1 failed:.*killed by SIGKILL"):
        run_on("shared", ends_between_segments, killed, world_size=2, timeout_s=600)
    assert memories() <= names


@pytest.fixture
def own_pool():
    """For ranks that go on after a wait which timed out: gloo has closed their connections, also for later tests."""
    yield
    minipar.shutdown()


def sums_until_a_peer_ends(world):
    """Sums on a link, of which rank 1 makes fewer and then closes its connections."""
    for _ in range(shared_memory.REPEATED + 3 * (world.rank == 0)):
        world.all_reduce(torch.ones(8), algorithm="ring")
    world._transport.close()


def test_a_peer_with_fewer_calls_is_named_where_it_ends():
    with pytest.raises(RankError, match="rank 0 could not .*: rank 1 has ended, .* equally many batches"):
        run_on("shared", sums_until_a_peer_ends, world_size=2, timeout_s=20)


def sums_around_a_mismatch(world, waits_in_order):
    """Sums by operations that are under way together, the second of which differs between the ranks; their results."""
    world.all_reduce(torch.ones(MILLION), algorithm="ring")
    handles = [
        world.all_reduce(torch.full((MILLION,), x), op, algorithm="ring", async_op=True)
        for x, op in ((1.0, "sum"), (2.0, ("sum", "max")[world.rank]), (3.0, "sum"), (4.0, "sum"))
    ]
    found = []
    for handle in handles if waits_in_order else reversed(handles):
        try:
            found.append(handle.wait().unique().tolist())
        except (PeerLate, PeerLost) as error:
            found.append(type(error))
    return found


@pytest.mark.usefixtures("own_pool")
@pytest.mark.parametrize("in_order", [True, False])
def test_after_a_failed_message_later_ones_on_its_link_fail(in_order, monkeypatch):
    monkeypatch.setattr(
        runtime_call, "PATIENCE_S", 600.0
    )  # the ranks' own errors are wanted, not that of a deadlock
    run_on("shared", sums, world_size=2)  # ranks have imported this file then, and begin at the same time
    for found in run_on("shared", sums_around_a_mismatch, in_order, world_size=2, timeout_s=3):
        first, second, *later = found if in_order else found[::-1]
        assert first == [2.0]
        assert second in (PeerLate, PeerLost)
        assert later == [PeerLost, PeerLost]


def late_to_a_broadcast(world, told):
    """Rank 0 waits in vain for rank 1 to make a link with it, and writes whom its error names."""
    if world.rank == 0:
        try:
            world.broadcast(torch.ones(MILLION // 4))
        except PeerLate as error:
            told.write_text(f"{error.peer}: {error}")
            raise
    while not told.exists():
        time.sleep(0.01)


def test_a_rank_that_does_not_come_to_link_is_late_not_lost(tmp_path):
    told = tmp_path / "told"
    with pytest.raises(RankError, match="PeerLate"):
        run_on("shared", late_to_a_broadcast, told, world_size=2, timeout_s=1)
    assert told.read_text().startswith("1: rank 0 waited 1 s to send 1048576 bytes to rank 1 on comm 'world'")


@pytest.mark.parametrize(("raised", "error"), [(TimeoutError, PeerLate), (ConnectionResetError, None)])
def test_a_slow_link_step_is_late_and_a_failed_one_leaves_gloo(raised, error):
    transport = mock.Mock(rank=0, timeout_s=7.0, waits={})
    transport.late, transport.lost = partial(Transport.late, transport), partial(Transport.lost, transport)
    message = Message("send", 1, ChannelId("world", (0, 1)), "collective", 0, 8)

    def step():
        assert list(map(str, transport.waits.values())) == [str(message)]
        raise raised

    with (
        pytest.raises(error, match="rank 0 waited 7 s to send 8 bytes to rank 1") if error else nullcontext()
    ):
        assert linking._unless_it_fails(transport, message, mock.Mock(), step) is None
    assert transport.waits == {}


def sums_once_too_often(world):
    for _ in range(1 + world.rank):
        world.all_reduce(torch.ones(MILLION), algorithm="ring")


def leaves_out_a_sum(world):
    if world.rank:
        world.all_reduce(torch.ones(MILLION), algorithm="ring")


@pytest.mark.parametrize(
    ("function", "size"), [(sums_once_too_often, 2), (leaves_out_a_sum, 2), (leaves_out_a_sum, 4)]
)
def test_a_rank_that_returns_before_a_message_on_a_link_is_named(function, size):
    with pytest.raises(RankError, match=r"(?s)deadlock: .*but rank 0's function has returned"):
        run_on("shared", function, world_size=size, timeout_s=120)


@pytest.mark.usefixtures("own_pool")
def test_a_rank_with_another_transport_waits_for_its_deadline():
    """It would abort if the words about a link came with the message's own tag."""

    def different(world):
        if world.rank == 1:
            world._transport.__class__ = Tagged
        with suppress(PeerLate, PeerLost):  # lost, for a rank that is told of the other one's deadline first
            world.all_reduce(torch.ones(MILLION), algorithm="ring")
            return "delivered"

    assert "delivered" not in run_on("shared", different, world_size=2, timeout_s=1)


def test_memory_is_not_passed_to_a_process_of_another_user():
    def alone(world):
        with mock.patch.object(os, "getuid", return_value=os.getuid() + 1 + world.rank):
            return sums(world)

    for total, links in run_on("shared", alone, world_size=2):
        assert total == [3.0]
        assert not any(links.values())


def other_length(world):
    world.all_reduce(torch.ones((4 + world.rank) * MILLION), algorithm="ring")


def test_a_message_of_another_length_is_never_delivered():
    with pytest.raises(RankError, match=r"(?s)rank \d .*all_reduce sum float32"):
        run_on("shared", other_length, world_size=2, timeout_s=1)


def test_shared_memory_is_chosen_by_name_and_not_for_nccl(monkeypatch):
    monkeypatch.setenv("MINIPAR_TRANSPORT", "shared")
    assert choose_transport("gloo") is shared_memory.Shared
    with pytest.raises(ValueError, match="MINIPAR_TRANSPORT='shared' needs gloo"):
        choose_transport("nccl")


def make_link(header, **connection):
    """A link whose sender has written 8 bytes of 3 and this header."""
    memory = mmap.mmap(-1, shared_memory.SLOT_BYTES * shared_memory.NUM_SLOTS)
    of_header = {"recv.return_value": shared_memory.HEADER.pack(*header)}
    connection = mock.Mock(**of_header, **connection)
    link = shared_memory.Link(connection, memory, shared_memory.SLOT_BYTES)
    link._memory[:8] = bytes([3]) * 8
    return link, connection


@pytest.mark.parametrize("ended", [BrokenPipeError, ConnectionResetError])
def test_a_sender_that_has_ended_wants_no_slot_back(ended):
    link, connection = make_link((5, 0, 8), **{"send.side_effect": ended})
    segment = torch.zeros(8, dtype=torch.uint8)
    link.move("receive", 5, 0, segment)
    assert segment.tolist() == [3] * 8
    connection.send.assert_called_once()


@pytest.mark.parametrize("header", [(6, 0, 8), (5, 200, 8), (5, 0, 7)], ids=["tag", "offset", "length"])
def test_a_segment_of_another_message_is_no_message(header):
    link, _ = make_link(header, **{"gettimeout.return_value": 0.0})
    segment = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(TimeoutError):
        link.move("receive", 5, 0, segment)
    assert not segment.any()


@pytest.mark.parametrize(
    ("raised", "error", "words"),
    [
        (TimeoutError(), PeerLate, "rank 0 waited 7 s to receive 8 bytes from rank 1"),
        (ConnectionResetError("its process has ended"), PeerLost, r"rank 0 could not receive 8 .*has ended"),
    ],
)
def test_a_late_peer_and_a_lost_one_are_told_apart(raised, error, words):
    transport = mock.Mock(rank=0, timeout_s=7.0, waits={})
    transport.late, transport.lost = partial(Transport.late, transport), partial(Transport.lost, transport)
    message = Message("receive", 1, ChannelId("world", (0, 1)), "collective", 0, 8)

    def fails(*_):
        # what the other ranks' errors say of this one
        assert list(map(str, transport.waits.values())) == [str(message)]
        raise raised

    link = mock.Mock(move=fails)
    with pytest.raises(error, match=words) as caught:
        shared_memory.Exchange(transport, [(Described(torch.zeros(2), 1, message, 5), link)]).run()
    link.close.assert_called_once()
    assert getattr(caught.value, "peer", None) == (1 if error is PeerLate else None)
    assert transport.waits == {}
