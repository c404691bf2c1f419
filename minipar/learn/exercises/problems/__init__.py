"""Problems for pen and paper, with random numbers: three for each lesson, the first about what limits performance.

The answer comes from minipar.cost, or from a formula that the problem states; its worked lines end in a calculation with
the numbers put in. Tests evaluate that calculation, and compute every answer in another way.

card.py        Card, Problem
messages.py    00 messages, 01 rings, 14 compressed gradients
data.py        02 data parallelism, 03 ZeRO, 20 the batch
tensors.py     04 tensor and 05 sequence parallelism, 13 activations, 16 sixteen bits, 22 grids
pipelines.py   06 bubbles, 07 zero bubble, 23 memory or bubble
splits.py      08 experts, 09 long context
runs.py        10 the mesh, 11 checkpoints, 12 what a run costs, 15 torch, 17 which mesh, 21 traces, 24 faults
serving.py     18 one token at a time, 19 many requests
"""

from minipar.learn.exercises.problems import data, messages, pipelines, runs, serving, splits, tensors
from minipar.learn.exercises.problems.card import Card, Problem

_FILES = (messages, data, tensors, pipelines, splits, runs, serving)
PROBLEMS: tuple[Problem, ...] = tuple(
    sorted(
        (problem for file in _FILES for problem in vars(file).values() if isinstance(problem, Problem)),
        key=lambda problem: problem.lesson,
    )
)
LESSONS = tuple(dict.fromkeys(problem.lesson for problem in PROBLEMS))

__all__ = ["LESSONS", "PROBLEMS", "Card", "Problem"]
