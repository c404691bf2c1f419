"""Refuse a schedule that cannot train: actions missing or repeated, a deadlock, messages posted in different orders."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from minipar.schedules.lower import Program, Receive, Send, lower
from minipar.schedules.schedule import OPS, Action, Schedule


def validate(schedule: Schedule) -> None:
    """Raise ValueError unless every rank can run `schedule` to its end and all work is done exactly once.

    complete   each (stage, microbatch) of the schedule's `work` has one F, and either one B or one I and one W, on its
               stage's rank
    runs       the ranks' orders and `needs` together have no cycle; otherwise Deadlock, a ValueError, is raised, which
               names each blocked rank's next action and the cycle
    matched    in the lowered programs, both ranks of every pair post their messages in the same order

    A rank may consume messages in a different order from that in which they were sent: `lower` posts receives in the order
    of the sends, and each action waits for its own messages.
    """
    require_complete(schedule)
    require_matched(lower(schedule))


def require_complete(schedule: Schedule) -> None:
    """Raise ValueError unless every action is on its stage's rank and each forward and backward occurs exactly once."""
    work = schedule.work()
    _require_placement(schedule, work)
    count = Counter(action for rank in schedule.actions for action in rank)
    for stage, k in sorted(work):
        f, b, i, w = (count[Action(op, stage, k)] for op in OPS)
        if f != 1:
            raise ValueError(
                f"{Action('F', stage, k)} occurs {f} times in schedule {schedule.name}; once is right"
            )
        if (b, i, w) not in ((1, 0, 0), (0, 1, 1)):
            raise ValueError(
                f"the backward of microbatch {k} on stage {stage} has {b} B, {i} I and {w} W in schedule "
                f"{schedule.name}; use one B, or one I and one W"
            )


def _require_placement(schedule: Schedule, work: set[tuple[int, int]]) -> None:
    for stage, rank in enumerate(schedule.stage_rank):
        if not 0 <= rank < schedule.num_ranks:
            raise ValueError(f"stage {stage} is placed on rank {rank} of {schedule.num_ranks} ranks")
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.op not in OPS:
                raise ValueError(f"op={action.op!r} on rank {rank}; use F, B, I or W")
            if not 0 <= action.stage < schedule.num_stages:
                raise ValueError(f"{action} on rank {rank}: there are {schedule.num_stages} stages")
            if action[1:] not in work:
                raise ValueError(
                    f"{action} on rank {rank}: there are {schedule.num_microbatches} microbatches"
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
