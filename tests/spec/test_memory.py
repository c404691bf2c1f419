"""What the specifications count as held is every storage, and nothing that has none."""

import torch

from minipar.spec.memory import held_bytes, storages


def test_a_sparse_tensor_counts_by_its_indices_and_values():
    values, places = torch.ones(3), torch.tensor([[0, 2, 4]])
    sparse = torch.sparse_coo_tensor(places, values, (5,), check_invariants=True).requires_grad_()
    sparse.grad = 2 * sparse.detach()
    assert sparse.grad.layout == torch.sparse_coo
    assert values.untyped_storage()._cdata in storages()


class Wrapper(torch.Tensor):
    """A tensor that has a shape and another tensor, and no memory, as a DTensor is."""

    @staticmethod
    def __new__(cls, inside):
        made = torch.Tensor._make_wrapper_subclass(cls, (1000, *inside.shape), dtype=inside.dtype)
        made.inside = inside
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return NotImplemented


def test_a_wrapper_counts_by_the_tensor_inside():
    before = storages()
    wrapper = Wrapper(torch.ones(4))
    assert wrapper.untyped_storage().nbytes() == 16_000
    assert held_bytes(before) == 16
