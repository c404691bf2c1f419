"""On gloo, too, the grouped transport refuses what NCCL would hang on or cross, and names both ranks and what they do."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.comm.transport.process_groups import named_group
from minipar.comm.transport.transports import choose_transport
from minipar.support.errors import RankError
from tests.comm.cases import cases, implementation
from tests.comm.transport import order_faults as faults
from tests.examples import examples

BOTH = ("tagged", "grouped")


def run_on(transport: str, function, *args, **options):
    """minipar.run, with this transport."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIPAR_TRANSPORT", transport)
        return minipar.run(function, *args, **options)


def either(first: str, second: str) -> str:
    """A pattern for the sentence of whichever rank is the first to notice."""
    return f"{first}|{second}"


SUM, GATHER = r"collective 1, all_reduce sum of \[3\]", "collective 1, all_gather"
FAULTS = [
    (
        faults.makes_groups_in_another_order,
        either(
            r"rank 0 makes comm 'world/a' of ranks \(0, 1\), where rank 1 makes comm 'world/b' of ranks \(0, 1\)",
            r"rank 1 makes comm 'world/b' of ranks \(0, 1\), where rank 0 makes comm 'world/a' of ranks \(0, 1\)",
        ),
    ),
    (
        faults.makes_groups_of_other_ranks_first,
        r"(?s)rank 0 waits .* from rank 1 .*make comm 'world/pair' of ranks \(0, 1\).* is blocked itself.*"
        r"rank 1 waits .* from rank 2 .*make comm 'world/pair' of ranks \(1, 2\).* is blocked itself",
    ),
    (
        faults.forgets_to_make_a_group,
        r"(?s)rank 0 waits .* from rank 1 .*make comm 'world/a'.*rank 1 waits .* rank 0 on comm 'world' \(barrier",
    ),
    (
        faults.makes_a_group_in_a_thread,
        r"rank [01] makes comm 'world/late' of ranks \(0, 1\) in thread 'loader', .* make it in thread 'MainThread'",
    ),
    (
        faults.makes_a_group_inside_an_operation,
        r"rank [01] makes comm 'world/late' of ranks \(0, 1\) in thread \"comm 'world'\"",
    ),
    (
        faults.swaps_collectives,
        either(
            rf"rank 0 expects from rank 1 on comm 'world': {SUM}, .*; rank 1 sends: {GATHER}",
            rf"rank 1 expects from rank 0 on comm 'world': {GATHER}, .*; rank 0 sends: {SUM}",
        ),
    ),
    (
        faults.swaps_sums_of_one_length,
        either(
            r"rank 0 expects from rank 1 .*all_reduce sum of \[2, 3\].*; rank 1 sends: .*all_reduce sum of \[3, 2\]",
            r"rank 1 expects from rank 0 .*all_reduce sum of \[3, 2\].*; rank 0 sends: .*all_reduce sum of \[2, 3\]",
        ),
    ),
    (
        faults.swaps_a_message_and_a_collective,
        rf"rank 1 expects from rank 0 on comm 'world': {SUM}.*; rank 0 sends: point to point, message 0",
    ),
    (
        faults.has_a_hook_that_communicates_in_another_order,
        either(
            r"rank 0 expects from rank 1 .*sum of \[(4|2, 3)\].*; rank 1 sends: .*sum of \[(4|2, 3)\]",
            r"rank 1 expects from rank 0 .*sum of \[(4|2, 3)\].*; rank 0 sends: .*sum of \[(4|2, 3)\]",
        ),
    ),
    (
        faults.adds_here_and_takes_the_largest_there,
        r"expects from rank [01] .*all_reduce (sum|max).*; rank [01] sends: .*all_reduce (max|sum)",
    ),
    (
        faults.skips_a_collective,
        r"rank 0 waits to .* rank 1 on comm 'world' \(all_reduce sum.*has returned",
    ),
    (
        faults.calls_a_collective_twice,
        either(
            r"rank 0 expects from rank 1 .*collective 2, barrier.*; rank 1 sends: collective 2, all_reduce sum",
            r"rank 1 expects from rank 0 .*collective 2, all_reduce sum.*; rank 0 sends: collective 2, barrier",
        ),
    ),
    (faults.forgets_the_partner_of_a_send, r"rank 0 waits to send 12 bytes to rank 1 .*has returned"),
    (faults.leaves_a_send_behind, r"rank 0 waits to send 12 bytes to rank 1 .*has returned"),
    (
        faults.sends_nothing_to_one_that_waits,
        r"rank 1 waits to receive 12 bytes from rank 0 .*message 0\), .*has returned",
    ),
    (
        faults.posts_an_empty_message,
        either("rank 0 posts an empty send to rank 1", "rank 1 posts an empty receive from rank 0"),
    ),
    (
        faults.sends_fewer_than_are_received,
        r"rank 1 expects from rank 0 .* 16 bytes of float32; rank 0 sends: .* 12 bytes of float32",
    ),
    (
        faults.receives_another_dtype,
        r"rank 1 expects from rank 0 .* 8 bytes of int64; rank 0 sends: .* 8 bytes of float64",
    ),
    (faults.sums_another_dtype, r"bytes of (float32|int32); rank [01] sends: .*bytes of (float32|int32)"),
    (faults.sends_first_on_both, r"deadlock: rank 0 waits to send 12 bytes to rank 1"),
    (faults.uses_a_second_thread, "two threads use comm 'world', 'MainThread' and 'second'"),
    (faults.runs_a_backward_in_a_second_thread, "two threads use comm 'world', 'MainThread' and 'second'"),
]


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("function", "words"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_what_breaks_a_rule_of_nccl_is_named_with_both_ranks(function, words):
    """Well before the deadline of a minute, those too that hang."""
    size = 3 if function is faults.makes_groups_of_other_ranks_first else 2
    with pytest.raises(RankError, match=words):
        run_on("grouped", function, world_size=size)


def test_torchs_own_collectives_are_told_apart_too():
    """Their messages are torch's, so a sentence of ours goes round the ranks before each."""
    words = r"expects from rank [01] .*(all_reduce|broadcast).*; rank [01] sends: .*(all_reduce|broadcast)"
    with pytest.raises(RankError, match=words):
        run_on("grouped", faults.crosses_torchs_own_collectives, world_size=2)


# The same on both transports -------------------------------------------------------------------------------------


def sends_and_results(world, calls):
    """For each call: its result, what traffic counts, and every message in the order of posting, with its peer."""
    transport, seen = world._transport, []
    post, posted = transport.post, []

    def recorded(channel, kind, x, to, out, source, traffic):
        sent = (to, x.dtype, x.numel()) if to is not None and x.numel() else None
        received = (source, out.dtype, out.numel()) if source is not None and out.numel() else None
        posted.append((channel.key, channel.kind or kind, sent, received))
        return post(channel, kind, x, to, out, source, traffic)

    transport.post = recorded
    for case in calls:
        world.traffic.reset()
        x = case.inputs(world.size)[world.rank]
        x = x / 10 if x.is_floating_point() else x  # so that another order of additions gives other bits
        result = implementation(case)(world, x, *case.arguments(world.size, world.rank))
        ledger = world.traffic
        seen.append((result, ledger.sent_bytes, ledger.messages, dict(ledger.by_kind), posted.copy()))
        posted.clear()
    return seen


@examples(6)
@given(size=st.integers(2, 5), data=st.data())
def test_both_transports_give_the_same_messages_and_bits(size, data):
    calls = data.draw(st.lists(cases(size), min_size=4, max_size=10))
    ranks = [run_on(name, sends_and_results, calls, world_size=size) for name in BOTH]
    for rank, (one, other) in enumerate(zip(*ranks)):
        for case, (result, *sent), (same, *also) in zip(calls, one, other):
            assert sent == also, (rank, case)
            assert (result is None) == (same is None)
            assert result is None or torch.equal(result, same), (rank, case)


def test_point_to_point_and_subgroups_are_the_same_on_both_transports():
    def received(world):
        pair = world.subgroup([world.rank // 2 * 2 + 1, world.rank // 2 * 2], "pair")
        again = pair.subgroup([1, 0], "again")
        x, got = torch.arange(6.0).view(2, 3).t() + world.rank, []
        for comm in (world, pair, again):
            right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
            handle = comm.exchange(x, right, (3, 2), x.dtype, left, async_op=True)
            comm.barrier()
            got += [handle.wait(), comm.exchange(x[:0], right, (0, 2), x.dtype, left)]
            if comm.rank == 0:
                got += [comm.send(x, 1, async_op=True).wait(), comm.recv((3, 2), x.dtype, 1)]
            elif comm.rank == 1:
                got += [comm.recv((3, 2), x.dtype, 0), comm.send(x, 0)]
        return [y if y is None else y.tolist() for y in got], world.traffic.sent_bytes, world.traffic.messages

    tagged, grouped = (run_on(name, received, world_size=4) for name in BOTH)
    assert tagged == grouped


# The choice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "backend", "chosen"),
    [
        (None, "gloo", "Shared"),
        ("", "gloo", "Shared"),
        ("tagged", "gloo", "Tagged"),
        ("grouped", "gloo", "CheckedGrouped"),
        (None, "nccl", "Grouped"),
        ("grouped", "cpu:gloo,cuda:nccl", "Grouped"),
    ],
)
def test_the_backend_chooses_the_transport_unless_overridden(monkeypatch, name, backend, chosen):
    monkeypatch.delenv("MINIPAR_TRANSPORT", raising=False)
    if name is not None:
        monkeypatch.setenv("MINIPAR_TRANSPORT", name)
    assert choose_transport(backend).__name__ == chosen


def test_a_transport_that_is_none_is_refused_before_a_process_starts(monkeypatch):
    monkeypatch.setenv("MINIPAR_TRANSPORT", "carrier pigeon")
    with pytest.raises(
        ValueError, match="MINIPAR_TRANSPORT='carrier pigeon' is unknown; use tagged, shared or grouped"
    ):
        minipar.run(lambda world: None, world_size=2)
    monkeypatch.setenv("MINIPAR_TRANSPORT", "tagged")
    with pytest.raises(
        ValueError, match="MINIPAR_TRANSPORT='tagged' needs gloo, as NCCL has no tags; use grouped"
    ):
        choose_transport("nccl")


@pytest.mark.parametrize("transport", BOTH)
def test_a_tensor_on_another_device_is_refused_before_waiting(transport):
    """Here on the device "meta", as there on another card, or on the CPU beside NCCL."""

    def refused(world):
        x, here = torch.ones(4, device="meta"), torch.ones(4)
        calls = [
            lambda: world.all_reduce(x),
            lambda: world.all_gather(x, async_op=True),
            lambda: world.all_to_all(x, algorithm="native"),
            lambda: world.send(x, 1 - world.rank),
            lambda: world.exchange(here, 1 - world.rank, (4,), x.dtype, 1 - world.rank, out=x),
        ]
        for call in calls:
            with pytest.raises(ValueError, match="x is on meta, and comm 'world' on cpu; use x.to"):
                call()
        return world.traffic.messages

    assert run_on(transport, refused, world_size=2) == [0, 0]


# Communicators ---------------------------------------------------------------------------------------------------


def test_each_comm_keeps_its_own_communicator_across_runs():
    def groups(world):
        comms = [world, world.subgroup([0, 1], "a"), world.subgroup([0, 1], "b"), world.subgroup([1, 0], "c")]
        assert world.subgroup([0, 1], "a").process_group() is comms[1].process_group()
        return [id(comm.process_group()) for comm in comms] + [id(world._transport.group)]

    first, again = (run_on("grouped", groups, world_size=2) for _ in range(2))
    assert [len(set(ids)) for ids in first] == [5, 5]
    assert first == again


def test_a_group_on_gpus_is_connected_by_its_own_ranks_alone():
    """With a GPU bound to the world's group torch would split that group's communicator, which waits for all its ranks."""
    gpu = torch.device("cuda", 0)

    def made(world):
        default, seen = dist.distributed_c10d._get_default_group(), []

        def helper(size, rank, ranks, backend, store, **options):
            seen.append((ranks, backend, options["device_id"], default.bound_device_id))
            return object(), None

        default.bound_device_id = gpu
        with mock.patch.object(dist.distributed_c10d, "_new_process_group_helper", helper):
            named_group([0, 1], "x", 10.0, gpu)
        seen.append(default.bound_device_id)
        default.bound_device_id = None
        return seen

    assert minipar.run(made, world_size=2)[0] == [([0, 1], "nccl", gpu, None), gpu]
