"""Check that the recorded programs of all ranks fit each other, or name the first disagreement.

    collectives   the members of a channel call the same collectives of the same shape in the same order
    messages      every message that one rank sends is received by the other, with the same bytes and the same operation

What fits may still wait in a circle, as two ranks do that both receive before they send; a run names that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from minipar.comm.transport.messages import Message, counted
from minipar.extras.dry_run.record import Key, Program, key_of

MOST_SENTENCES = 8


def disagreements(programs: Sequence[Program]) -> list[str]:
    """Describe what does not fit, the most helpful sentence first; an empty list if all programs fit."""
    # Different collectives also send different messages, which would repeat the finding.
    return (_different_collectives(programs) or _different_messages(programs))[:MOST_SENTENCES]


def _different_collectives(programs: Sequence[Program]) -> list[str]:
    """Name, for each channel, the first collective in which a member differs from the first."""
    of_rank = {program.rank: program for program in programs}
    found = []
    for channel in sorted({channel for program in programs for channel in program.collectives}):
        members = [of_rank[rank] for rank in channel.ranks if rank in of_rank]
        lists = {program.rank: program.collectives.get(channel, []) for program in members}
        for i in range(max(map(len, lists.values()))):
            # A program that was cut short says nothing about the collectives that it would have called later.
            here = {
                r: calls[i] if i < len(calls) else None
                for r, calls in lists.items()
                if i < len(calls) or of_rank[r].ended
            }
            if len(set(here.values())) <= 1:
                continue
            first, usual = next(iter(here.items()))
            other = next(r for r, call in here.items() if call != usual)
            found.append(
                f"collective {i + 1} on {channel}: rank {other} {_calls(here[other])}, and rank {first} {_calls(usual)}"
            )
            break
    return found


def _calls(collective: str | None) -> str:
    return "calls no more" if collective is None else f"calls {collective}"


def _different_messages(programs: Sequence[Program]) -> list[str]:
    """Name the messages of which a half is missing, or is of another size or operation."""
    halves: dict[Key, dict[str, Message]] = defaultdict(dict)
    for program in programs:
        for message in program.posted():
            halves[key_of(program.rank, message)][message.verb] = message
    cut = {program.rank for program in programs if not program.ended}
    found = []
    for (channel, _, sender, receiver, number), both in halves.items():
        send, receive = both.get("send"), both.get("receive")
        is_cut = (send is None and sender in cut) or (receive is None and receiver in cut)
        if not is_cut and _what(send) != _what(receive):
            found.append(
                f"message {number} on {channel}: rank {sender} sends {_what(send)} to rank {receiver}, and rank {receiver} "
                f"receives {_what(receive)}"
            )
    return found


def _what(message: Message | None) -> str:
    return "nothing" if message is None else f"{counted(message.num_bytes, 'byte')} ({message.label})"
