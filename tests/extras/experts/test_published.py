"""Numbers that DeepSeek-V3 and fastmoe give of a token's experts and of hot experts: reproduced, or corrected."""

from __future__ import annotations

import pytest

from minipar.extras.experts.shadow_placement import break_even_rows, choose_shadowed, rows_of_ranks

FLOAT = 4

# DeepSeek-V3, arXiv:2412.19437, section 3.2.2: 8 experts a token, on 4 nodes; "up to 13 at the same cost" ---------------

INFINIBAND, NVLINK = 50e9, 160e9  # bytes/s, as printed


def test_nvlink_hides_behind_infiniband_12_experts_not_13():
    """4 x 3.2 = 12.8 is printed as 13; a token of 13 experts waits for NVLink, 1.6 % longer."""
    over_infiniband = 4 / INFINIBAND
    assert pytest.approx(3.2) == NVLINK / INFINIBAND
    assert [k for k in range(20) if k / NVLINK <= over_infiniband][-1] == 12
    assert 13 / NVLINK / over_infiniband == pytest.approx(1.016, abs=1e-3)


# fastmoe, fmoe/fastermoe/shadow_policy.py, "using the formula in the PPoPP paper", with its default machine --------------

NET, FLOPS = 50e9 / 8, 11.5e12  # bytes/s, FLOP/s
DIM, ALPHA = 2048, 2  # features, hidden over features; float32
# Gate, up and down of so many features are as large, and as much work, as its two matrices.
HIDDEN = ALPHA * DIM * 2 / 3


def fastmoe_break_even() -> float:
    """Rows that one more replica must save there: weights sent once, a row computed three times and sent four times."""
    weights_s, row_s = 2 * ALPHA * DIM**2 * FLOAT / NET, 4 * ALPHA * DIM**2 / FLOPS
    return weights_s / (3 * row_s + 4 * DIM * FLOAT / NET)


def test_fastmoe_replicates_at_half_of_what_a_replica_costs():
    """Its policy counts the weights on their way to the replicas; their gradients come back, as many bytes."""
    rows = break_even_rows(HIDDEN, FLOPS, NET, FLOAT)
    assert fastmoe_break_even() == pytest.approx(767.2, abs=0.1)
    assert rows == pytest.approx(2 * fastmoe_break_even())
    saved = 1000  # between the two
    counts = [[saved, 0], [saved, 0]]
    assert choose_shadowed(counts, fastmoe_break_even()) == [0]
    assert choose_shadowed(counts, rows) == []

    def seconds(shadowed) -> float:
        row_s, send_s = 4 * ALPHA * DIM**2 / FLOPS, DIM * FLOAT / NET
        both_ways = 2 * 2 * ALPHA * DIM**2 * FLOAT / NET
        return (3 * row_s + 4 * send_s) * max(rows_of_ranks(counts, shadowed)) + both_ways * len(shadowed)

    assert seconds([0]) > seconds([])
