"""Tensors without contents count as the memory that they would take in a run."""

import gc

import torch

from minipar.extras.dry_run.programs import run_ranks


def test_memory_that_a_storage_gives_back_is_not_held():
    """FSDP frees gathered parameters by `resize_`, which no mode of torch's sees."""

    def resizes(world, memory):
        held = [memory.now]
        x = torch.zeros(1000)
        held.append(memory.now)
        x.untyped_storage().resize_(0)
        held.append(memory.now)
        x.untyped_storage().resize_(x.nbytes)
        held.append(memory.now)
        del x
        return [*held, memory.now], memory.peak

    before = torch.UntypedStorage.resize_, torch.UntypedStorage.data_ptr
    assert run_ranks(1, resizes).results == {0: ([0, 4000, 0, 4000, 0], 4000)}
    assert (torch.UntypedStorage.resize_, torch.UntypedStorage.data_ptr) == before


def test_memory_that_only_the_collector_would_free_is_held():
    """Otherwise a peak would depend on when Python collects garbage."""

    def makes_cycles(world, memory):
        for _ in range(2000):
            cycle = [torch.zeros(10)]
            cycle.append(cycle)
        return memory.now

    assert run_ranks(1, makes_cycles).results == {0: 2000 * 40}
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_view_of_unknown_numbers_is_no_memory_of_its_own():
    def views(world, memory):
        x = torch.zeros(8, dtype=torch.int64)
        memory.forget_contents(x)
        before = memory.now
        view = x[:3].view(torch.uint8)
        return before, memory.now - before, memory.has_contents(view)

    assert run_ranks(1, views).results == {0: (64, 0, False)}


def test_a_write_to_a_wrong_shape_raises():
    def adds(world, memory):
        x = torch.zeros(3)
        for _ in range(2):
            x.add_(torch.zeros(3))
            torch.add(x, x, out=x)
        return x.add_(torch.zeros(4))

    (fault,) = run_ranks(1, adds).faults
    assert fault.startswith("rank 0 raises RuntimeError: ")
    assert "length 4" in fault


def test_a_range_of_floats_has_no_numbers_and_one_of_integers_has():
    """Angles of a position would otherwise be computed for every layer and microbatch."""

    def ranges(world, memory):
        made = [
            torch.arange(4),
            torch.arange(0, 4, 2),
            torch.arange(4.0),
            torch.arange(4, dtype=torch.float64),
        ]
        kept = [(x.dtype, x.nbytes, memory.has_contents(x)) for x in made]
        return kept, memory.now, made[1].tolist()

    integers = [(torch.int64, 32, True), (torch.int64, 16, True)]
    floats = [(torch.float32, 16, False), (torch.float64, 32, False)]
    assert run_ranks(1, ranges).results == {0: ([*integers, *floats], 96, [0, 2])}


def test_no_two_tensors_have_one_address():
    """A view deep in one storage is where another storage's object happens to lie, if that is what an address is."""

    def addresses(world, memory):
        first, second = sorted(
            (torch.zeros(2**40) for _ in range(2)), key=lambda x: x.untyped_storage()._cdata
        )
        apart = second.untyped_storage()._cdata - first.untyped_storage()._cdata
        view, alias = first[apart // first.itemsize :], second[:8]
        assert view.untyped_storage()._cdata + apart == second.untyped_storage()._cdata
        storages = [x.untyped_storage().data_ptr() for x in (first, second, alias)]
        return view.data_ptr() == second.data_ptr(), alias.data_ptr() == second.data_ptr(), storages

    ((equal, of_alias, (first, second, alias)),) = run_ranks(1, addresses).results.values()
    assert not equal
    assert of_alias
    assert first != second == alias


def test_scratch_memory_for_floats_outlives_that_for_integers():
    def sends(world, memory):
        held = []
        for x in (torch.zeros(1000), torch.zeros(4, dtype=torch.int64)):
            world.all_reduce(x, algorithm="ring")
            del x
            held.append(memory.now)
        return held

    for floats, both in run_ranks(2, sends).results.values():
        assert both >= floats > 0
