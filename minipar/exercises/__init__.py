"""Exercises: write a piece yourself; the library's own specification checks it, and says in words what is wrong.

    minipar exercise list                  what there is, and how far you are
    minipar exercise start shift           writes exercises/shift.py: signature, shapes, formula, and a hole
    minipar exercise check shift           runs it on real ranks; --watch checks again whenever the file is saved
    minipar exercise hint shift            one of three hints
    minipar exercise solution shift        the ground floor's or the library's own source
    minipar exercise cards                 ten problems for pen and paper, with fresh numbers

In reading order:

registry.py   every exercise: its specification, its solution, its time, what it builds on
hints.py      three hints for each
stubs/        the files that `start` copies
folder.py     the learner's folder: start, progress, which hint comes next
check.py      a learner's file held to a specification, stage by stage, in the ranks' own processes
examine.py    what can be said before it runs: no such function, another signature, an error in the file
recording.py  a learner's run, to draw
solution.py   the source of a solution, with the helpers it uses
cards.py      problems for pen and paper
problems.py   the ten problems
command.py    the command `minipar exercise`
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
