"""The least a transport may promise, as a machine: what runs on it hangs nowhere.

A message passes when it is first in line at both ends. `shared=True`: one line per pair of ranks for both
directions; else one per direction. Who moves next is up to the caller's random generator.
"""

from __future__ import annotations

from collections import defaultdict, deque
from random import Random

from minipar.schedules.lower import Compute, Program, Receive, Send, Wait
from minipar.schedules.schedule import Action, Schedule, output_key


class Hang(Exception):
    pass


class Machine:
    def __init__(self, schedule: Schedule, programs: tuple[Program, ...], shared: bool):
        self.schedule, self.programs, self.shared = schedule, programs, shared
        self.counter = [0] * len(programs)
        self.held: list[set[Action]] = [set() for _ in programs]  # results a rank computed or received
        self.ran: list[list[Action]] = [[] for _ in programs]
        self.lines = defaultdict(deque)  # (channel, rank) -> messages (source, to, action) posted at this end

    def run(self, random: Random) -> list[list[Action]]:
        """What each rank computed, in order. Raises Hang where nobody can move."""
        while moves := [*self._steps(), *self._passes()]:
            random.choice(moves)()
        if any(self.lines.values()) or any(n < len(p) for n, p in zip(self.counter, self.programs)):
            raise Hang(self.counter)
        return self.ran

    def _steps(self):
        for rank, program in enumerate(self.programs):
            if self.counter[rank] < len(program):
                instruction = program[self.counter[rank]]
                if not isinstance(instruction, Wait) or output_key(instruction.action) in self.held[rank]:
                    yield lambda rank=rank, instruction=instruction: self._step(rank, instruction)

    def _step(self, rank: int, instruction) -> None:
        self.counter[rank] += 1
        if isinstance(instruction, Compute):
            wanted = {output_key(need) for need in self.schedule.needs(instruction.action)}
            assert wanted <= self.held[rank], f"{instruction} on rank {rank} lacks {wanted - self.held[rank]}"
            self.held[rank].add(output_key(instruction.action))
            self.ran[rank].append(instruction.action)
        elif isinstance(instruction, Send):
            assert output_key(instruction.action) in self.held[rank]
            self._post(rank, (rank, instruction.to, instruction.action))
        elif isinstance(instruction, Receive):
            self._post(rank, (instruction.source, rank, instruction.action))

    def _post(self, rank: int, message: tuple[int, int, Action]) -> None:
        source, to, _ = message
        self.lines[self._channel(source, to), rank].append(message)

    def _channel(self, source: int, to: int):
        return frozenset((source, to)) if self.shared else (source, to)

    def _passes(self):
        for channel, rank in list(self.lines):
            peer = next(r for r in channel if r != rank)
            here, there = self.lines[channel, rank], self.lines[channel, peer]
            if rank < peer and here and there and here[0] == there[0]:
                yield lambda here=here, there=there: self._pass(here, there)

    def _pass(self, here: deque, there: deque) -> None:
        _, to, action = here.popleft()
        there.popleft()
        self.held[to].add(output_key(action))
