"""Exercises: write a function yourself; the library's own specification checks it, and says in a sentence what is wrong.

    minipar exercise list                  all exercises, and your progress
    minipar exercise start shift           writes exercises/shift.py: signature, shapes, formula, and a hole to fill in
    minipar exercise check shift           runs it on real ranks; --watch checks again whenever the file is saved
    minipar exercise hint shift            one of three hints
    minipar exercise solution shift        the source, in minipar.simple or in the library
    minipar exercise cards                 ten problems for pen and paper, with new numbers each time; cards 06: lesson 06's
    minipar exercise project my_framework  a small framework in ten pieces, each checked; it can train after each piece

In reading order:

exercises.toml   every exercise: its specification, its solution, its time, what it builds on, three hints
registry.py      the exercises as Python objects
stubs/           the files that `start` copies
folder.py        the learner's folder: started exercises, progress, which hint comes next
check.py         checks a learner's file against a specification, stage by stage, in the ranks' own processes
examine.py       finds faults before the checks: a missing function, a wrong signature, an error in the file
recording.py     records a learner's run, to draw it
solution.py      the source of a solution, with the helpers it uses
project.toml     the ten steps of the project
project.py       the learner's framework: start, check, train with the pieces written so far
problems.toml    problems for pen and paper: three for each lesson
problems.py      the same, with numbers drawn
cards.py         asks these problems, and writes the page lessons/problems.md
command.py       the command `minipar exercise`
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
