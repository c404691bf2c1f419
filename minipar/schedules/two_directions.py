"""Chimera and DualPipe: half the microbatches enter at each end of the ranks, which hold two copies of the model.

Rank r holds stage r of the copy that runs down, from rank 0 to p-1, and stage p-1-r of the one that runs up. So does
rank p-1-r, with the copies exchanged: the two hold the same parts of the model, and sum their gradients.

Fold the ranks in the middle, and ranks r and p-1-r lie on each other: what remains is a V on p/2 ranks, in which every
microbatch goes down and comes back. `unfolded` does the reverse: it makes two directions of any V-shaped schedule.
The idle time and the live activations per rank are the V's. Twice the parameters buy nothing that dp=2 of the V, on the
same ranks with the same parameters each, does not have; DualPipe-V says so of DualPipe.
"""

from __future__ import annotations

from minipar.errors import require_positive
from minipar.schedules.schedule import Action, Schedule, first_microbatches
from minipar.schedules.v_shaped import dualpipe_v


def chimera(p: int, m: int) -> Schedule:
    """1F1B from both ends, merged: where F = B, and p divides m, no two actions want a rank at the same time.

    idle per rank, p dividing m   p-2 where F = B = 1, a fraction (p-2) / (2m + p-2) of the step, half of 1F1B's
                                  (p-2) (1 + m/p) where B = 2F = 2: with m = p a fraction (p-2) / (3m/2 + p-2)
    live activations              p/2 + 1 on the first rank, one more on each to p in the middle, and down again

    More than p microbatches repeat the order for p, each time beginning in the gaps at the end of the one before (direct
    concatenation). Other numbers use the order for the next multiple of p, leaving out microbatches m and later.
    Raises ValueError where p or m is odd or below 2.
    Source: Chimera, arXiv:2107.06925, section 3 and table 2.
    """
    half = _require_even(p, m)
    folded = tuple(first_microbatches(m // 2, _folded_chimera(p, -(-m // p), rank)) for rank in range(half))
    stage_rank = (*range(half), *reversed(range(half)))
    return unfolded(Schedule(folded, stage_rank, m // 2, "chimera"))


def _folded_chimera(p: int, rounds: int, rank: int) -> list[Action]:
    """Return the folded rank's actions, by the slots in which two 1F1B pipelines of p stages run them where F = B = 1.

    F(s, j) in slot s + 2j, B(s, j) in slot 2p - 1 - s + 2j, for j < p/2; the next p/2 microbatches 2p slots later
    """
    slots = {}
    for stage in (rank, p - 1 - rank):
        for k in range(rounds * (p // 2)):
            turn, j = divmod(k, p // 2)
            slots[2 * p * turn + stage + 2 * j] = Action("F", stage, k)
            slots[2 * p * turn + 2 * p - 1 - stage + 2 * j] = Action("B", stage, k)
    return [slots[slot] for slot in sorted(slots)]


def dualpipe(p: int, m: int) -> Schedule:
    """DualPipe: `dualpipe_v` on p/2 ranks with m/2 microbatches, unfolded.

    idle per rank p/2 - 1 where F=I=W=1 and m >= 2p; at most p+1 activations alive, of stages of 1/p of the model.
    Raises ValueError where p or m is odd or below 2.
    Source: DeepSeek-V3, arXiv:2412.19437, section 3.2.1 and table 2.
    """
    return unfolded(dualpipe_v(_require_even(p, m), m // 2), "dualpipe")


def unfolded(folded: Schedule, name: str | None = None) -> Schedule:
    """Return the schedule on twice the ranks and with twice the microbatches, in two directions, of a V-shaped one.

    Ranks r and p-1-r both run what the folded rank r runs, each with the microbatches of its direction: the folded
    microbatch k is 2k on its way down, and 2k+1 on its way up.
    Raises ValueError where `folded` is not a V of two chunks per rank, of one model and whole samples.
    """
    half = folded.num_ranks
    p = 2 * half
    if folded.copies > 1 or folded.slices > 1:
        raise ValueError(
            f"schedule {folded.name} has copies={folded.copies} and slices={folded.slices}; to be unfolded it must have "
            "one of each, as zb-v has"
        )
    if folded.stage_rank != (*range(half), *reversed(range(half))):
        raise ValueError(
            f"schedule {folded.name} places its stages on ranks {folded.stage_rank}; to be unfolded they must "
            "go down and up as a V, such as (0, 1, 1, 0)"
        )

    def unfold(action: Action, up: bool) -> Action:
        # On the rank of the lower half, the way down is chunk 0; the way up comes back there as chunk 1.
        comes_back = action.stage >= half
        runs_up = comes_back != up
        return Action(action.op, action.stage + p * runs_up, 2 * action.microbatch + runs_up)

    lower = [tuple(unfold(a, up=False) for a in actions) for actions in folded.actions]
    upper = [tuple(unfold(a, up=True) for a in actions) for actions in reversed(folded.actions)]
    stage_rank = (*range(p), *reversed(range(p)))
    return Schedule((*lower, *upper), stage_rank, 2 * folded.num_microbatches, name or folded.name, copies=2)


def _require_even(p: int, m: int) -> int:
    """Return p/2. Raises ValueError where p or m is odd or below 2."""
    require_positive(p=p, m=m)
    for name, n, what in (("p", p, "ranks"), ("m", m, "microbatches")):
        if n % 2:
            raise ValueError(
                f"{name}={n} {what} in two directions: half of them go each way; use an even number, such as {n + 1}"
            )
    return p // 2
