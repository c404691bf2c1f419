"""Every exercise, in the order in which they build on each other. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from minipar.exercises.hints import HINTS

SIMPLE = "minipar.simple."


@dataclass(frozen=True)
class Exercise:
    """A function or class to write.

    name           also that of its file
    minutes        for somebody who has read the lesson
    lesson         number of the lesson that explains it
    needs          exercises to do before
    specification  name of the specification that it is held to
    solution       name to define -> "module:attribute" that defines it in minipar
    """

    name: str
    title: str
    minutes: int
    lesson: str
    needs: tuple[str, ...]
    specification: str
    solution: dict[str, str]

    @property
    def hints(self) -> tuple[str, str, str]:
        return HINTS[self.name]


def _exercise(name, title, minutes, lesson, needs, solution, specification=None) -> Exercise:
    solutions = solution if isinstance(solution, dict) else dict([solution])
    return Exercise(name, title, minutes, lesson, tuple(needs.split()), specification or name, solutions)


def _same_name(module: str, *names: str) -> dict[str, str]:
    return {name: f"{module}:{name}" for name in names}


_COLLECTIVES, _RING = f"{SIMPLE}collectives", f"{SIMPLE}ring_attention"

EXERCISES = (
    _exercise("shift", "Pass to the right, without deadlock", 10, "00", "", ("shift", f"{_RING}:_pass_on")),
    _exercise(
        "broadcast", "Broadcast by a binomial tree", 25, "01", "shift", _same_name(_COLLECTIVES, "broadcast")
    ),
    _exercise(
        "reduce_scatter",
        "Reduce-scatter around a ring",
        30,
        "01",
        "shift",
        _same_name(_COLLECTIVES, "reduce_scatter"),
    ),
    _exercise(
        "all_gather", "All-gather around a ring", 15, "01", "shift", _same_name(_COLLECTIVES, "all_gather")
    ),
    _exercise(
        "all_reduce_in_place",
        "All-reduce, in place",
        25,
        "01",
        "reduce_scatter all_gather",
        _same_name(_COLLECTIVES, "all_reduce_"),
        "all_reduce_",
    ),
    _exercise(
        "halving_doubling",
        "All-reduce by halving and doubling, for any p",
        60,
        "01",
        "all_reduce_in_place",
        _same_name("minipar.comm.halving_doubling", "all_reduce"),
    ),
    _exercise(
        "all_to_all", "All-to-all, in pairs", 20, "08", "shift", _same_name(_COLLECTIVES, "all_to_all")
    ),
    _exercise(
        "hierarchical",
        "All-reduce inside nodes, then across them",
        25,
        "01",
        "all_reduce_in_place",
        ("hierarchical", "minipar.comm.hierarchical:all_reduce"),
    ),
    _exercise(
        "conjugates",
        "Communication that autograd differentiates",
        40,
        "04",
        "all_gather",
        _same_name(f"{SIMPLE}autograd", "copy", "all_reduce", "gather_tokens", "scatter_tokens"),
    ),
    _exercise(
        "average_gradients",
        "Data parallelism, the naive way",
        10,
        "02",
        "",
        _same_name(f"{SIMPLE}ddp", "average_gradients"),
    ),
    _exercise(
        "ddp",
        "Data parallelism in buckets, during the backward",
        60,
        "02",
        "average_gradients",
        _same_name(f"{SIMPLE}ddp", "DDP"),
    ),
    _exercise(
        "global_loss",
        "The loss over all ranks' tokens",
        20,
        "02",
        "average_gradients",
        _same_name(f"{SIMPLE}global_loss", "global_loss"),
    ),
    _exercise(
        "zero1",
        "ZeRO-1: the optimizer's state in parts",
        45,
        "03",
        "ddp",
        _same_name(f"{SIMPLE}zero", "Zero1"),
    ),
    _exercise("zero2", "ZeRO-2: the gradients too", 30, "03", "zero1", _same_name(f"{SIMPLE}zero", "Zero2")),
    _exercise("fsdp", "FSDP: the parameters too", 90, "03", "zero2", _same_name(f"{SIMPLE}fsdp", "FSDP")),
    _exercise(
        "mlp",
        "A column- and a row-parallel matrix",
        25,
        "04",
        "conjugates",
        _same_name(f"{SIMPLE}tensor_parallel", "mlp"),
    ),
    _exercise(
        "vocab_loss",
        "Cross-entropy with a sharded vocabulary",
        45,
        "04",
        "conjugates",
        _same_name(f"{SIMPLE}vocab", "cross_entropy"),
    ),
    _exercise(
        "sequence_parallel",
        "A block whose tokens are sharded",
        30,
        "05",
        "mlp",
        _same_name(f"{SIMPLE}sequence_parallel", "block"),
    ),
    _exercise(
        "gpipe", "GPipe as data", 15, "06", "", _same_name("minipar.schedules", "gpipe"), "schedule_gpipe"
    ),
    _exercise(
        "one_f_one_b",
        "1F1B as data",
        25,
        "06",
        "gpipe",
        _same_name("minipar.schedules", "one_f_one_b"),
        "schedule_1f1b",
    ),
    _exercise(
        "zb_h1",
        "ZB-H1: a third of the bubble",
        40,
        "07",
        "one_f_one_b",
        _same_name("minipar.schedules", "zb_h1"),
        "schedule_zb_h1",
    ),
    _exercise(
        "pipeline_step",
        "A step of a pipeline",
        60,
        "06",
        "one_f_one_b",
        _same_name(f"{SIMPLE}pipeline", "one_f_one_b"),
        "pipeline_one_f_one_b",
    ),
    _exercise(
        "dispatch",
        "Rows to their experts, and back",
        45,
        "08",
        "all_to_all",
        ("dispatch", f"{SIMPLE}moe:_through_experts"),
    ),
    _exercise(
        "switch",
        "Switch: router, capacity, losses",
        60,
        "08",
        "dispatch",
        _same_name(f"{SIMPLE}moe", "switch"),
    ),
    _exercise(
        "ring_forward", "Ring attention, forward", 60, "09", "shift", _same_name(_RING, "ring_forward")
    ),
    _exercise(
        "ring_backward",
        "Ring attention, backward",
        60,
        "09",
        "ring_forward",
        _same_name(_RING, "ring_backward"),
    ),
    _exercise(
        "ulysses",
        "Ulysses: heads for tokens",
        40,
        "09",
        "all_to_all",
        _same_name(f"{SIMPLE}ulysses", "ulysses_attention"),
        "ulysses_attention",
    ),
    _exercise("mesh", "The groups of a mesh", 20, "10", "", _same_name(f"{SIMPLE}mesh", "groups")),
    _exercise(
        "grad_norm",
        "The gradient's norm over a mesh",
        20,
        "10",
        "mesh",
        _same_name(f"{SIMPLE}grad_norm", "grad_norm"),
    ),
    _exercise(
        "reshard", "A checkpoint of another mesh", 30, "11", "", _same_name(f"{SIMPLE}reshard", "reshard")
    ),
)


def find_exercise(name: str) -> Exercise:
    """Return the exercise of this name. Raises ValueError with the nearest name where there is none."""
    by_name = {exercise.name: exercise for exercise in EXERCISES}
    plain = name.replace("-", "_").removesuffix(".py")
    if plain not in by_name:
        near = get_close_matches(plain, by_name, 1)
        meant = f"did you mean {near[0]}?" if near else "`minipar exercise list` names them all"
        raise ValueError(f"name={name!r} is no exercise; {meant}")
    return by_name[plain]
