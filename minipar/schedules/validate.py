"""Refuse a schedule that cannot train: actions missing or repeated, a deadlock, messages posted in different orders."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence

from minipar.schedules.lower import Program, Receive, Send, lower
from minipar.schedules.schedule import OPS, Action, Schedule, needs, output_key
from minipar.support.errors import require_positive


def validate(schedule: Schedule) -> None:
    """Raise ValueError unless every rank can run `schedule` to its end and all work is done exactly once.

    complete   each (stage, unit) has one F, and either one B or one I and one W, on its stage's rank; a unit is a
               microbatch, or one slice of it. If there are several copies of the model, a unit passes through one copy
    copied     with two copies of the model, ranks r and p-1-r hold the same parts and run them in the same order at the
               same time, so that they can sum gradients and gather weights like data-parallel ranks
    runs       the ranks' orders and `needs` together have no cycle; otherwise Deadlock, a ValueError, is raised, which
               names each blocked rank's next action and the cycle
    offloaded  offloaded units are whole samples, each on a stage that runs it
    matched    in the lowered programs, both ranks of every pair post their messages in the same order

    A rank may consume messages in a different order from that in which they were sent: `lower` posts receives in the order
    of the sends, and each action waits for its own messages.
    """
    require_complete(schedule)
    require_offloadable(schedule)
    require_copied(schedule)
    programs = lower(schedule)
    require_in_step(schedule)
    require_matched(programs)


def require_offloadable(schedule: Schedule) -> None:
    """Raise ValueError unless every offloaded unit is a whole microbatch on a stage that has it."""
    have = {action[1:] for actions in schedule.actions for action in actions}
    for stage, unit in sorted(schedule.offloaded - have):
        raise ValueError(
            f"schedule {schedule.name} offloads microbatch {unit} on stage {stage}, which does not run it"
        )
    if schedule.offloaded and schedule.slices > 1:
        raise ValueError(
            f"schedule {schedule.name} offloads units, of slices={schedule.slices} a sample; later slices need the keys "
            "and values of earlier ones, so use whole samples"
        )


def require_complete(schedule: Schedule) -> None:
    """Raise ValueError unless every action is on its stage's rank and each forward and backward occurs exactly once."""
    _require_placement(schedule)
    count = Counter(action for rank in schedule.actions for action in rank)
    copy_of = {action.microbatch: action.stage // schedule.model_stages for action in count}
    for k in range(schedule.num_units):
        first = copy_of.get(k, 0) * schedule.model_stages
        for stage in range(schedule.num_stages):
            f, b, i, w = (count[Action(op, stage, k)] for op in OPS)
            if not first <= stage < first + schedule.model_stages:
                if f + b + i + w:
                    raise ValueError(
                        f"microbatch {k} is on stages {first} and {stage} of schedule {schedule.name}, of two copies of "
                        "the model; use the stages of one"
                    )
                continue
            if f != 1:
                raise ValueError(
                    f"{Action('F', stage, k)} occurs {f} times in schedule {schedule.name}; once is right"
                )
            if (b, i, w) not in ((1, 0, 0), (0, 1, 1)):
                raise ValueError(
                    f"the backward of microbatch {k} on stage {stage} has {b} B, {i} I and {w} W in schedule "
                    f"{schedule.name}; use one B, or one I and one W"
                )


def require_copied(schedule: Schedule) -> None:
    """Raise ValueError unless two copies of the model are placed and run as mirror images of each other."""
    if schedule.copies == 1:
        return
    last = schedule.num_ranks - 1
    if schedule.num_ranks % 2:
        raise ValueError(
            f"two copies of the model on {schedule.num_ranks} ranks: rank {last // 2} would hold a part twice; use an even "
            "number"
        )
    down, up = schedule.stage_rank[: schedule.model_stages], schedule.stage_rank[schedule.model_stages :]
    for part, (rank, other) in enumerate(zip(down, up)):
        if other != last - rank:
            raise ValueError(
                f"part {part} of the model is on ranks {rank} and {other}; the second copy must be on rank {last - rank}"
            )
    for rank in range(schedule.num_ranks // 2):
        own, mirror = (
            [(a.op, schedule.part(a.stage)) for a in schedule.actions[r]] for r in (rank, last - rank)
        )
        if own != mirror:
            raise ValueError(
                f"ranks {rank} and {last - rank} hold the same parts of the model and run them in different orders, so "
                "neither could wait for the other's gradients; use one order"
            )


def require_in_step(schedule: Schedule) -> None:
    """Raise ValueError unless, with two copies, ranks r and p-1-r can always run their n-th actions at the same time.

    If weights are sharded over the two ranks, both take part in the all-gather before an action, so both must have reached
    their n-th action.
    """
    if schedule.copies == 1:
        return
    mirrored = zip(schedule.actions, reversed(schedule.actions))
    left = [deque(zip(own, mirror)) for own, mirror in mirrored][: schedule.num_ranks // 2]
    done: set[Action] = set()

    def ready(action: Action) -> bool:
        wanted = needs(action, schedule.model_stages, schedule.slices)
        return all(output_key(need) in done for need in wanted)

    while waiting := [pairs for pairs in left if pairs]:
        able = [pairs for pairs in waiting if all(map(ready, pairs[0]))]
        if not able:
            rank, (own, mirror) = next((rank, pairs[0]) for rank, pairs in enumerate(left) if pairs)
            raise ValueError(
                f"ranks {rank} and {schedule.num_ranks - 1 - rank} hold the same parts of the model and cannot run {own} "
                f"and {mirror} at the same time, so neither could gather their weights; use orders that mirror each other"
            )
        done.update(output_key(action) for pairs in able for action in pairs.popleft())


def _require_placement(schedule: Schedule) -> None:
    require_positive(slices=schedule.slices)
    if schedule.copies not in (1, 2) or schedule.num_stages % schedule.copies:
        raise ValueError(
            f"copies={schedule.copies} of a model in {schedule.num_stages} stages; use 1, or 2 and an even number of stages"
        )
    for stage, rank in enumerate(schedule.stage_rank):
        if not 0 <= rank < schedule.num_ranks:
            raise ValueError(f"stage {stage} is placed on rank {rank} of {schedule.num_ranks} ranks")
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.op not in OPS:
                raise ValueError(f"op={action.op!r} on rank {rank}; use F, B, I or W")
            if not 0 <= action.stage < schedule.num_stages:
                raise ValueError(f"{action} on rank {rank}: there are {schedule.num_stages} stages")
            if not 0 <= action.microbatch < schedule.num_units:
                cut = f" of {schedule.slices} slices" if schedule.slices > 1 else ""
                raise ValueError(
                    f"{action} on rank {rank}: there are {schedule.num_microbatches} microbatches{cut}"
                )
            if schedule.stage_rank[action.stage] != rank:
                raise ValueError(
                    f"{action} on rank {rank}: rank {schedule.stage_rank[action.stage]} holds the stage"
                )


def require_matched(programs: Sequence[Program]) -> None:
    """Raise ValueError unless, for each pair of ranks, both post the same messages in the same order.

    NCCL needs this: it matches the messages between two ranks, of both directions together, by their order.
    """
    posted = defaultdict(list)  # (rank, peer) -> messages as (source, action)
    for rank, program in enumerate(programs):
        for instruction in program:
            if isinstance(instruction, Send):
                posted[rank, instruction.to].append((rank, instruction.action))
            elif isinstance(instruction, Receive):
                posted[rank, instruction.source].append((instruction.source, instruction.action))
    for (rank, peer), messages in posted.items():
        other = posted.get((peer, rank), [])
        if messages != other:
            n = next(
                (i for i, (a, b) in enumerate(zip(messages, other)) if a != b), min(len(messages), len(other))
            )
            raise ValueError(
                f"message {n} between ranks {rank} and {peer}: rank {rank} posts {_named(messages, n)}, "
                f"rank {peer} {_named(other, n)}"
            )


def _named(messages: list[tuple[int, Action]], n: int) -> str:
    return f"{messages[n][1]} from rank {messages[n][0]}" if n < len(messages) else "nothing"
