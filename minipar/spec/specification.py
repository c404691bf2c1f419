"""A specification: the stages that an implementation must pass, and the report of the first that it fails."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from minipar.errors import RankError
from minipar.runtime.launch import run

StageName = Literal["runs", "small", "drawn", "bytes", "memory", "order", "refusals"]
TIMEOUT_S = 10.0  # of one wait; a deadlock is detected and reported sooner
PACKAGE = Path(__file__).parent.parent


class Stage(NamedTuple):
    """`test(implementation)` returns None if the stage is passed, otherwise a description of the mistake."""

    name: StageName
    test: Callable[[Callable], str | None]


class Verdict(NamedTuple):
    stage: StageName
    words: str | None  # None: passed


@dataclass(frozen=True)
class Report:
    """The verdicts on an implementation: the stages it passed, and the first that it failed, if any."""

    specification: str
    verdicts: tuple[Verdict, ...]
    num_stages: int

    @property
    def ok(self) -> bool:
        return len(self.verdicts) == self.num_stages and all(v.words is None for v in self.verdicts)

    @property
    def first_wrong(self) -> Verdict | None:
        return next((v for v in self.verdicts if v.words is not None), None)

    def __str__(self):
        if self.ok:
            return f"{self.specification}: right, in all {self.num_stages} stages"
        met = sum(v.words is None for v in self.verdicts)
        stage, words = self.first_wrong
        return f"{self.specification}: {met} of {self.num_stages} stages met; {stage}: {words}"


@dataclass(frozen=True)
class Specification:
    """`signature` is what to implement; `says` states in a sentence what it must do; `stages` check it."""

    name: str
    signature: str
    says: str
    stages: tuple[Stage, ...]

    def check(self, implementation: Callable, stages: Iterable[StageName] | None = None) -> Report:
        """Run all stages, or only those named in `stages`, in order, until one fails."""
        wanted = [stage for stage in self.stages if stages is None or stage.name in set(stages)]
        verdicts = []
        for stage in wanted:
            verdicts.append(Verdict(stage.name, stage.test(implementation)))
            if verdicts[-1].words is not None:
                break
        return Report(self.name, tuple(verdicts), len(wanted))


def on_ranks(
    body: Callable, implementation: Callable, *args, sizes: Iterable[int] = (1, 2, 3, 4)
) -> str | None:
    """Run body(world, implementation, *args) on worlds of these sizes, up to the first mistake; return its description.

    On each rank `body` returns a description of a mistake, or None. An exception, a dead rank, a deadlock and a lost
    message are described too. Returns None if there is no mistake.
    """
    for size in sizes:
        try:
            said = run(body, implementation, *args, world_size=size, timeout_s=TIMEOUT_S)
        except RankError as error:
            # A rank that found a mistake has returned early; the other ranks may have failed waiting for it.
            said = [words for _, words in sorted(error.returned.items())]
            if not any(said):
                return f"on {_ranks(size)}: {explained(error)}"
        if wrong := [words for words in said if words is not None]:
            everywhere = len(wrong) == size > 1 and len(set(map(_without_rank, wrong))) == 1
            where = f"on every one of {size} ranks" if everywhere else f"on {_ranks(size)}"
            return f"{where}: {_without_rank(wrong[0]) if everywhere else wrong[0]}"
    return None


def explained(error: RankError) -> str:
    """Describe a failed rank in one line: the last line of its traceback, and the last line it ran outside minipar."""
    lines = error.remote_traceback.strip().splitlines()
    if lines[0].startswith("deadlock") or "not received" in lines[0] or "not sent" in lines[0]:
        return " ".join(line.strip() for line in lines)
    own = [m for line in lines if (m := re.match(r'\s*File "(.+)", line (\d+), in (.+)', line))]
    own = [m for m in own if not Path(m[1]).is_relative_to(PACKAGE) and "site-packages" not in m[1]]
    where = f" ({Path(own[-1][1]).name}, line {own[-1][2]})" if own else ""
    others = "; ".join(f"rank {r} {what}" for r, what in sorted(error.waiting.items()) if "waiting" in what)
    return f"rank {error.rank} raised {lines[-1]}{where}" + (f"; meanwhile {others}" if others else "")


def _without_rank(words: str) -> str:
    return re.sub(r"^rank \d+: ", "", words)


def _ranks(size: int) -> str:
    return "one rank" if size == 1 else f"{size} ranks"
