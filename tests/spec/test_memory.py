"""What the specifications count as held is every storage, and nothing that has none."""

import torch

from minipar.spec.memory import storages


def test_a_sparse_tensor_counts_by_its_indices_and_values():
    values, places = torch.ones(3), torch.tensor([[0, 2, 4]])
    sparse = torch.sparse_coo_tensor(places, values, (5,), check_invariants=True).requires_grad_()
    sparse.grad = 2 * sparse.detach()
    assert sparse.grad.layout == torch.sparse_coo
    assert values.untyped_storage()._cdata in storages()
