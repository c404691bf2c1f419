"""Learning by doing: exercises to write, bugs to find, questions to answer.

exercises  functions and classes for a learner to write, checked by the specifications
museum     real bugs that can be run, and the checks that find them
puzzles    one rank's program to write, run on a simulated network; the verdict is in words
quiz       the interview book, and a quiz from it
ideas.py   the map of ideas: `minipar ideas`, README's table, the heads of the lessons
facts.py   numbers and formulas that several texts state, each computed in one place; texts quote them by name
expressions.py  the functions, machines and models that facts, problems and claims compute with
"""
