"""Chimera and DualPipe, drawn and simulated: half the microbatches enter at each end of the ranks, which hold two models.

Rank r holds stage r of the copy that runs down, from rank 0 to p-1, and stage p-1-r of the copy that runs up. Rank p-1-r
holds the same two stages, with the copies exchanged, and the two ranks sum their gradients.

With ranks r and p-1-r folded into one, this is a V on p/2 ranks, in which every microbatch goes down and comes back.
`unfolded` does the reverse: it turns any V-shaped schedule into two directions. Each rank idles as long and keeps as many
activations as in the V. So the V with dp=2 is as good: it uses as many ranks, each with as many parameters. The authors of
DualPipe-V note this.
"""

from __future__ import annotations

from dataclasses import dataclass

from minipar.schedules.schedule import Action, Schedule, first_microbatches, needs
from minipar.schedules.v_shaped import dualpipe_v
from minipar.support.errors import require_positive


@dataclass(frozen=True)
class TwoDirections(Schedule):
    """A schedule of two copies of a model of S stages: stage s is part s % S of copy s // S. No pipeline runs it.

    Microbatch 2k goes through the stages of copy 0, microbatch 2k+1 through those of copy 1. DualPipe-V on half the ranks,
    with twice the dp, is as good, and runs.
    """

    def needs(self, action: Action) -> tuple[Action, ...]:
        """Return what `needs` says of the action's own copy."""
        parts = self.num_stages // 2
        copy, part = divmod(action.stage, parts)
        own = needs(action._replace(stage=part), parts)
        return tuple(need._replace(stage=need.stage + copy * parts) for need in own)

    def work(self) -> set[tuple[int, int]]:
        parts = self.num_stages // 2
        return {(stage, k) for stage, k in super().work() if k % 2 == stage // parts}


def chimera(p: int, m: int) -> TwoDirections:
    """Return Chimera: 1F1B from both ends, merged. If F = B and p divides m, the two ends' actions never overlap on a rank.

    idle per rank, p dividing m   p-2 if F = B = 1, a fraction (p-2) / (2m + p-2) of the step, half of 1F1B's
                                  (p-2) (1 + m/p) if B = 2F = 2: for m = p a fraction (p-2) / (3m/2 + p-2)
    live activations              p/2 + 1 on the first rank, one more on each further rank up to p in the middle, then one
                                  fewer on each

    For more than p microbatches, the order for p is repeated; each repetition begins in the gaps at the end of the previous
    one (direct concatenation). If p does not divide m, the order for the next multiple of p is used, and the microbatches
    beyond m are left out. Raises ValueError if p or m is odd or below 2.
    Source: Chimera, arXiv:2107.06925, section 3 and table 2.
    """
    half = _require_even(p, m)
    folded = tuple(first_microbatches(m // 2, _folded_chimera(p, -(-m // p), rank)) for rank in range(half))
    stage_rank = (*range(half), *reversed(range(half)))
    return unfolded(Schedule(folded, stage_rank, m // 2, "chimera"))


def _folded_chimera(p: int, rounds: int, rank: int) -> list[Action]:
    """Return the folded rank's actions, in the order of their time slots in two 1F1B pipelines of p stages with F = B = 1.

    For j < p/2, F(s, j) is in slot s + 2j and B(s, j) in slot 2p - 1 - s + 2j. The slots of the next p/2 microbatches are
    2p later, and so on.
    """
    slots = {}
    for stage in (rank, p - 1 - rank):
        for k in range(rounds * (p // 2)):
            turn, j = divmod(k, p // 2)
            slots[2 * p * turn + stage + 2 * j] = Action("F", stage, k)
            slots[2 * p * turn + 2 * p - 1 - stage + 2 * j] = Action("B", stage, k)
    return [slots[slot] for slot in sorted(slots)]


def dualpipe(p: int, m: int) -> TwoDirections:
    """Return DualPipe: `dualpipe_v` on p/2 ranks with m/2 microbatches, unfolded.

    Each rank idles p/2 - 1 if F=I=W=1 and m >= 2p, and keeps at most p+1 activations, each of a stage of 1/p of the
    model. Raises ValueError if p or m is odd or below 2.
    Source: DeepSeek-V3, arXiv:2412.19437, section 3.2.1 and table 2.
    """
    return unfolded(dualpipe_v(_require_even(p, m), m // 2), "dualpipe")


def unfolded(folded: Schedule, name: str | None = None) -> TwoDirections:
    """Unfold a V-shaped schedule into two directions, with twice the ranks and twice the microbatches.

    Ranks r and p-1-r both run the actions of the folded rank r, each with the microbatches of its direction: the folded
    microbatch k becomes 2k on the way down, and 2k+1 on the way up.
    Raises ValueError if `folded` is not a V of two chunks per rank, of whole microbatches.
    """
    half = folded.num_ranks
    p = 2 * half
    if type(folded) is not Schedule:
        raise ValueError(
            f"schedule {folded.name} is a {type(folded).__name__}; only a plain V can be unfolded, such as zb-v"
        )
    if folded.stage_rank != (*range(half), *reversed(range(half))):
        raise ValueError(
            f"schedule {folded.name} places its stages on ranks {folded.stage_rank}; to be unfolded they must "
            "go down and up as a V, such as (0, 1, 1, 0)"
        )

    def unfold(action: Action, up: bool) -> Action:
        # On a rank of the lower half, a microbatch going down reaches chunk 0 first; one coming up from the other end
        # reaches chunk 1.
        comes_back = action.stage >= half
        runs_up = comes_back != up
        return Action(action.op, action.stage + p * runs_up, 2 * action.microbatch + runs_up)

    lower = [tuple(unfold(a, up=False) for a in actions) for actions in folded.actions]
    upper = [tuple(unfold(a, up=True) for a in actions) for actions in reversed(folded.actions)]
    stage_rank = (*range(p), *reversed(range(p)))
    return TwoDirections((*lower, *upper), stage_rank, 2 * folded.num_microbatches, name or folded.name)


def _require_even(p: int, m: int) -> int:
    """Return p/2. Raises ValueError if p or m is odd or below 2."""
    require_positive(p=p, m=m)
    for name, n, what in (("p", p, "ranks"), ("m", m, "microbatches")):
        if n % 2:
            raise ValueError(
                f"{name}={n} {what} in two directions: half of them go each way; use an even number, such as {n + 1}"
            )
    return p // 2
