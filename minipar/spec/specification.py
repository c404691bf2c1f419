"""A specification: the stages that an implementation must pass, and a report that names the first failed stage."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from minipar.runtime.caller import is_own
from minipar.runtime.launch import run
from minipar.spec.convention import ALWAYS as FOR_ALL
from minipar.spec.convention import CONVENTIONS
from minipar.spec.counted import counts_as
from minipar.spec.from_file import Hangs, Note, Subject, checked
from minipar.spec.witness import WrongSignature
from minipar.spec.words import first
from minipar.support.errors import RankError

StageName = Literal["runs", "small", "drawn", "bytes", "memory", "order", "varied", "refusals"]
# (implementation, ...) -> a description of the mistake on this rank, or None
Body = Callable[..., str | None]
STAGES = {
    "runs": "it runs",
    "small": "right on one small case",
    "drawn": "right on drawn cases",
    "bytes": "the bytes sent",
    "memory": "the memory",
    "order": "the order of events",
    "varied": "right for other values, dtypes, strides and lengths",
    "refusals": "what it refuses",
}
ALWAYS = (
    "In every stage: nothing that is given is written to, unless that is asked, nor an incoming gradient nor the result "
    "of an earlier call. Drawn cases are asked again before the first backward, and two models are trained in turn; groups "
    "are not the world, nor in its order, and a process is in one after the other. Memory is that of live storages."
)
# Five ranks in two groups, neither of them the world nor in its order; then in two others.
GROUPS = (((3, 1), (4, 0, 2)), ((1, 4, 3), (0, 2)))
World = int | tuple[tuple[tuple[int, ...], ...], ...]
WORLDS: tuple[World, ...] = (1, 2, 3, 4, GROUPS)
TIMEOUT_S = 60.0  # for one wait; a deadlock is detected and reported sooner
FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Stage:
    """A part of a check: `body(world, implementation)` on the ranks of each of these worlds, up to the first mistake.

    sizes   numbers of ranks; GROUPS: of five ranks, in groups; (): body(implementation), on one rank without a Comm
    writes  the arguments, by position, that an implementation may write to
    """

    name: StageName
    body: Body
    sizes: tuple[World, ...] = WORLDS
    writes: tuple[int, ...] = ()

    def test(self, implementation: Subject, ranks: Iterable[int] | None = None, **how: Any) -> str | None:
        """Return None if the stage is passed, otherwise a description of the mistake.

        ranks  for drawn and varied
        how    options of `run`
        """
        writes = None if self.name == "memory" else self.writes  # a witness keeps tensors alive
        if not self.sizes:
            words = on_ranks(lambda world, alone: self.body(alone), implementation, (1,), writes, **how)
            return words and re.sub("^on one rank: (rank 0:? )?", "", words)
        sizes = self.sizes if ranks is None or self.name not in ("drawn", "varied") else ranks
        return on_ranks(self.body, implementation, sizes, writes, **how)


class Verdict(NamedTuple):
    """The result of one stage for an implementation.

    words  the mistake; None: the stage is passed
    sent   the bytes that rank 0 sent through torch.distributed, not through its Comm, in the last count of the stage
    asked  whether the implementation was called; a stage of which its conventions excuse it is not met
    """

    stage: StageName
    words: str | None
    sent: Mapping[str, int] = {}
    asked: bool = True

    @property
    def met(self) -> bool:
        return self.asked and self.words is None


@dataclass(frozen=True)
class Report:
    """The verdicts on an implementation, up to the first stage that it fails, and the conventions that it states."""

    specification: str
    verdicts: tuple[Verdict, ...]
    num_stages: int
    conventions: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.first_wrong is None and any(v.met for v in self.verdicts)

    @property
    def first_wrong(self) -> Verdict | None:
        return next((v for v in self.verdicts if v.words is not None), None)

    def __str__(self) -> str:
        by = f", by convention: {', '.join(self.conventions)}" if self.conventions else ""
        met = sum(v.met for v in self.verdicts)
        if self.first_wrong is None and met:
            sent = ", ".join(counts_as(kind) for v in self.verdicts for kind in v.sent if v.stage == "bytes")
            number = f"all {met}" if met == self.num_stages else f"{met} of {self.num_stages}"
            return f"{self.specification}: right, in {number} stages{by}{sent and f' ({sent})'}"
        wrong = self.first_wrong or Verdict("runs", "it was not asked")
        return (
            f"{self.specification}: {met} of {self.num_stages} stages met{by}; {wrong.stage}: {wrong.words}"
        )


@dataclass(frozen=True)
class Specification:
    """The signature to implement, the requirement in a sentence, the stages that check it, and the conventions it knows."""

    name: str
    signature: str
    requirement: str
    stages: tuple[Stage, ...]
    conventions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        in_order = sorted(self.stages, key=lambda stage: [*STAGES].index(stage.name))
        object.__setattr__(self, "stages", tuple(in_order))

    @property
    def defines(self) -> tuple[str, ...]:
        """The names of the functions and classes of the signature."""
        return tuple(dict.fromkeys(re.findall(r"(?:^|\), |; )(\w+)\(", self.signature)))

    @property
    def most_ranks(self) -> int:
        """The size of the largest world on which it is checked."""
        sizes = [size for stage in self.stages for size in stage.sizes]
        return max((size if isinstance(size, int) else sum(map(len, size[0])) for size in sizes), default=1)

    @property
    def words(self) -> str:
        """The question in words, stage by stage."""
        asked = [
            f"  {stage.name:9} {STAGES[stage.name]} ({', '.join(map(_world, stage.sizes)) or 'one rank'})"
            for stage in self.stages
        ]
        known = "Conventions that it knows: " + "; ".join(
            f"{name} ({CONVENTIONS[name]})" for name in self._known
        )
        return "\n".join([f"{self.name}: {self.signature}", self.requirement, *asked, ALWAYS, known])

    @property
    def _known(self) -> tuple[str, ...]:
        return (*FOR_ALL, *self.conventions)

    def check(
        self,
        implementation: Subject,
        stages: Iterable[StageName] | None = None,
        ranks: Iterable[int] | None = None,
        backend: str | None = None,
    ) -> Report:
        """Run all stages, or only those named in `stages`, in order, until one fails.

        ranks    for drawn and varied
        backend  that of `run`

        Raises ValueError for a convention that it does not know.
        """
        asked, sizes = None if stages is None else set(stages), None if ranks is None else tuple(ranks)
        wanted = [stage for stage in self.stages if asked is None or stage.name in asked]
        verdicts = []
        for stage in wanted:
            notes: list[Note] = []
            words = stage.test(
                implementation,
                sizes,
                backend=backend,
                on_report=lambda _, note, notes=notes: notes.append(note),
            )
            said = notes[-1] if notes else Note((), {}, True)
            if unknown := set(said.conventions) - set(self._known):
                raise ValueError(
                    f"conventions={sorted(unknown)[0]!r} is unknown to {self.name}, which knows {', '.join(self._known)}"
                )
            if words is not None and WrongSignature.__name__ in words:
                words = f"{words.replace(f'{WrongSignature.__name__}: ', '')}; asked is {self.signature}"
            called = any(note.asked for note in (*notes, said))
            verdicts.append(Verdict(stage.name, words, said.sent, called))
            if words is not None:
                break
        return Report(self.name, tuple(verdicts), len(wanted), said.conventions if verdicts else ())


def on_ranks(
    body: Body,
    implementation: Subject,
    sizes: Iterable[World] = WORLDS,
    writes: tuple[int, ...] | None = (),
    **how: Any,
) -> str | None:
    """Run body(world, implementation) on worlds of these sizes, up to the first mistake; return its description.

    On each rank `body` returns a description of a mistake, or None. An exception, a dead rank, a deadlock, a lost message
    and a rank that takes too long are described too. Returns None if there is no mistake.
    """
    for number, world in enumerate(sizes):
        groupings = None if isinstance(world, int) else world
        size = world if isinstance(world, int) else sum(map(len, world[0]))
        where = _ranks(size) if groupings is None else f"{size} ranks, in {_world(world)}"
        try:
            said = run(
                checked,
                body,
                implementation,
                writes,
                groupings,
                number == 0 or groupings is not None,  # guarded: not everywhere, since it takes as long again
                world_size=size,
                timeout_s=TIMEOUT_S,
                **how,
            )
        except RankError as error:
            # A rank that found a mistake has returned early; the other ranks may have failed waiting for it.
            said = [words for _, words in sorted(error.returned.items())]
            if not any(said):
                return f"on {where}: {explained(error)}"
        if wrong := [words for words in said if words is not None]:
            everywhere = len(wrong) == size > 1 and len(set(map(_without_rank, wrong))) == 1
            where = f"every one of {size} ranks" if everywhere and groupings is None else where
            return f"on {where}: {_without_rank(wrong[0]) if everywhere else wrong[0]}"
    return None


def every(*bodies: Body) -> Body:
    """Return a body that runs these bodies, up to the first mistake."""
    return lambda *args: first(body(*args) for body in bodies)


def explained(error: RankError) -> str:
    """Describe a rank's error in one line: the last line of the traceback, and the last line run outside minipar."""
    lines = error.remote_traceback.strip().splitlines()
    if lines[0].startswith("deadlock") or "not received" in lines[0] or "not sent" in lines[0]:
        return "; ".join(line.strip() for line in lines)
    if not lines[0].startswith("Traceback"):
        return f"rank {error.rank}: {lines[0]}"
    frames = [(i, m) for i, line in enumerate(lines) if (m := re.match(r'\s*File "(.+)", line (\d+)', line))]
    last = max((i for i, _ in frames), default=0)
    raised = next(line for line in [*lines[last + 1 :], lines[-1]] if not line.startswith(" "))
    if (name := f"{Hangs.__name__}: ") in raised:
        return f"rank {error.rank} {raised.partition(name)[2]}"
    own = [m for _, m in frames if is_own(m[1]) and not m[1].startswith("<")]
    where = f" ({Path(own[-1][1]).name}, line {own[-1][2]})" if own else ""
    did = "raised"
    minipars = [m[1] for _, m in frames if Path(m[1]).is_relative_to(FOLDER.parent)]
    if not own and minipars and Path(minipars[-1]).parent == FOLDER:
        entered = Path(minipars[-1]).name not in ("witness.py", "from_file.py")
        did = "returned something that cannot be used:" if entered else "cannot load or call it:"
    others = "; ".join(f"rank {r} {what}" for r, what in sorted(error.waiting.items()) if "waiting" in what)
    return f"rank {error.rank} {did} {raised}{where}" + (f"; meanwhile {others}" if others else "")


def _without_rank(words: str) -> str:
    return re.sub(r"^rank \d+: ", "", words)


def _ranks(size: int) -> str:
    return "one rank" if size == 1 else f"{size} ranks"


def _world(world: World) -> str:
    if isinstance(world, int):
        return str(world)
    groupings = (" ".join(str(list(group)) for group in groups) for groups in world)
    return f"groups {' then '.join(groupings)}"
