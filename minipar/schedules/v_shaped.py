"""ZB-V and DualPipe-V: two chunks per rank, placed as a V, so that a forward ends on the rank where it began.

Rank r holds stage r ("chunk 0", on the way down) and stage 2p-1-r ("chunk 1", on the way up). The last rank
holds both stages at the turn, and rank 0 the first and the last stage of the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import cast

from minipar.schedules.schedule import Action, Op, Schedule, first_microbatches
from minipar.support.errors import require_positive


def zb_v(p: int, m: int) -> Schedule:
    """Return ZB-V: zero bubble with the memory of 1F1B.

    If F=I=W and m >= 2p-1, there is no idle time, and every rank keeps 2p chunks alive, the memory of p stages of 1F1B.
    Fewer microbatches use the order for 2p-1, without its microbatches from m on.
    Raises ValueError if p or m is below 1.
    Source: arXiv:2401.10241, section 6, and arXiv:2405.15362.
    """
    require_positive(p=p, m=m)
    return _v_schedule(p, m, [_zb_v_steps(p, max(m, 2 * p - 1), rank) for rank in range(p)], "zb-v")


def _zb_v_steps(p: int, m: int, rank: int) -> list[str]:
    return (
        ["F0"] * (2 * (p - rank) - 1)
        + ["F1", "F0"] * rank
        + ["F1", "I1", "W1"] * (p - rank)
        + ["F0", "I0", "W0", "F1", "I1", "W1"] * (m - 2 * p + 1 + rank)
        + ["I0", "W0", "F1", "I1", "W1"] * (p - 1 - rank)
        + ["I0", "I1"] * rank
        + ["I0", "W0"] * (p - rank)
        + ["W1"] * rank
        + ["W0"] * rank
    )


def dualpipe_v(p: int, m: int) -> Schedule:
    """Return DualPipe-V, DualPipe cut in half: forwards of one chunk are paired with backwards of the other.

    If F=I=W=1 and m >= 2p, each rank idles p-1 and keeps at most 2p+1 chunks alive. In the paper the two actions of a pair
    overlap, so that one communicates while the other computes; the paper's idle time, (p-1)(F&B + B - 3W), counts a pair as
    one action. Here the two run in turn, and the first sends its result before the second runs. Only backwards that would
    leave a gap are split. Fewer than 2p microbatches use the order for 2p, without its microbatches from m on.
    Raises ValueError if p or m is below 1.
    Source: DeepSeek-V3, arXiv:2412.19437, section 3.2.1, and its DualPipeV.
    """
    require_positive(p=p, m=m)
    return _v_schedule(p, m, [_dualpipe_v_steps(p, max(m, 2 * p), rank) for rank in range(p)], "dualpipe-v")


def _dualpipe_v_steps(p: int, m: int, rank: int) -> list[str]:
    left = p - 1 - rank
    tail = ["B1", "B0"] * (rank + 1)
    whole, split = tail[: rank + 1], [step.replace("B", "I") for step in tail[rank + 1 :]]
    weights = [step.replace("I", "W") for step in split + ["I0"] * left]
    return (
        ["F0"] * (2 * left)
        + ["F0", "F1"] * (rank + 1)
        + ["I1", "W1", "F1"] * left
        + ["F0", "B1", "F1", "B0"] * (m - 2 * p + rank + 1)
        + ["B1", "F1", "B0"] * left
        + whole
        + split
        + [step for weight in weights[:left] for step in (weight, "I0")]
        + weights[left:]
    )


def _v_schedule(p: int, m: int, steps: list[list[str]], name: str) -> Schedule:
    stage_rank = (*range(p), *reversed(range(p)))
    actions = (first_microbatches(m, _number(steps[rank], rank, 2 * p - 1 - rank)) for rank in range(p))
    return Schedule(tuple(actions), stage_rank, m, name)


def _number(steps: list[str], *stages: int) -> Iterable[Action]:
    """Turn each step into an action: "F1" is the forward of the next microbatch on stages[1]. A B counts as its I and W."""
    done: Counter[str] = Counter()
    for step in steps:
        op, chunk = step[0], step[1]
        halves = "IW" if op == "B" else op
        yield Action(cast(Op, op), stages[int(chunk)], done[halves[0] + chunk])
        done.update(half + chunk for half in halves)
