"""Choose, by load, the experts that every rank replicates for one step of a layer. Imports no torch.

For its own experts a rank computes the rows of all ranks, but for a replicated (shadowed) expert only its own rows:

    rows(r) = sum over r's experts e that are not shadowed of sum over ranks s of counts[s][e]
            + sum over shadowed e of counts[r][e]

The layer waits for the rank with the most rows, B. A row takes row_s seconds forward and twice that backward. A row is sent
four times (dispatch, combine, and the backward of both), each time in send_s seconds. An expert's weights are sent to the
replicas and its gradients back, each in weights_s seconds. So, for n shadowed experts,

    seconds = (3 row_s + 4 send_s) B + 2 n weights_s

Shadowing one more expert pays if it reduces B by more than 2 weights_s / (3 row_s + 4 send_s) rows: `break_even_rows`. The
policy of fastmoe (fmoe/fastermoe/shadow_policy.py) counts weights_s once, so its threshold is half as many rows.
Source: FasterMoE, doi:10.1145/3503221.3508418 (dynamic shadowing).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from minipar.support.errors import require_divides


def break_even_rows(hidden_dim: int, flops_per_s: float, bytes_per_s: float, elem_bytes: int = 2) -> float:
    """Return the number of rows at which a replica costs as much as it saves, for an expert with hidden size F.

        row_s = 6 D F / flops_per_s    send_s = D elem_bytes / bytes_per_s    weights_s = 3 D F elem_bytes / bytes_per_s

    with gate, up [F, D] and down [D, F]. All three are proportional to D, so D cancels. With slow links, the result is
    1.5 F; with fast links, less.
    """
    row_s, send_s = 6 * hidden_dim / flops_per_s, elem_bytes / bytes_per_s
    weights_s = 3 * hidden_dim * elem_bytes / bytes_per_s
    return 2 * weights_s / (3 * row_s + 4 * send_s)


def rows_of_ranks(counts: Sequence[Sequence[int]], shadowed: Collection[int] = ()) -> list[int]:
    """Return the rows that each rank computes.

    counts  [ep][E]  rows of each rank for each expert; rank r has experts r*E/ep ...
    """
    ep, num_experts = len(counts), len(counts[0])
    require_divides("ep", ep, "num_experts", num_experts)
    each = num_experts // ep
    rows = [sum(counts[rank][e] for e in shadowed) for rank in range(ep)]
    for e in set(range(num_experts)) - set(shadowed):
        rows[e // each] += sum(source[e] for source in counts)
    return rows


def choose_shadowed(counts: Sequence[Sequence[int]], break_even: float) -> list[int]:
    """Return the experts to replicate: greedily the busiest rank's hottest expert, as long as that pays.

    counts      [ep][E], the same on every rank, so that all ranks choose the same experts
    break_even  each replica must reduce the rows of the busiest rank by more than this number
    """
    each = len(counts[0]) // len(counts)
    chosen: list[int] = []
    while True:
        rows = rows_of_ranks(counts, chosen)
        busiest = rows.index(max(rows))
        own = [e for e in range(busiest * each, (busiest + 1) * each) if e not in chosen]
        if not own:
            return sorted(chosen)
        hottest = max(own, key=lambda e: sum(source[e] for source in counts))
        if max(rows) - max(rows_of_ranks(counts, [*chosen, hottest])) <= break_even:
            return sorted(chosen)
        chosen.append(hottest)
