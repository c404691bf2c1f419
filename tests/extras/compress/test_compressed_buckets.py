"""What compressors are given of a flat buffer's gradients."""

import torch

from minipar.extras.compress.compressed_buckets import parts_by_rank


def test_rank_parts_are_gradients_in_order_with_no_empty_pieces():
    layout = {torch.tensor(0): (0, 4), torch.tensor(1): (4, 3), torch.tensor(2): (7, 3)}
    parts = parts_by_rank(torch.arange(10), layout, [5, 0, 3, 2])
    named = [{key.item(): x.tolist() for key, x in part.items()} for part in parts]
    assert named == [{0: [0, 1, 2, 3], 1: [4]}, {}, {1: [5, 6], 2: [7]}, {2: [8, 9]}]
