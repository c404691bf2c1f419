"""Tensors without contents count as the memory that they would take in a run."""

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

    before = torch.UntypedStorage.resize_
    assert run_ranks(1, resizes).results == {0: ([0, 4000, 0, 4000, 0], 4000)}
    assert torch.UntypedStorage.resize_ is before


def test_a_view_of_unknown_numbers_is_no_memory_of_its_own():
    def views(world, memory):
        x = torch.zeros(8, dtype=torch.int64)
        memory.forget_contents(x)
        before = memory.now
        view = x[:3].view(torch.uint8)
        return before, memory.now - before, memory.has_contents(view)

    assert run_ranks(1, views).results == {0: (64, 0, False)}
