"""Learning by doing: exercises to write, bugs to find, questions to answer.

exercises  pieces for a learner to write, checked by the specifications
museum     real bugs that one can run, and the checks that find them
puzzles    one rank's program to write, on a simulated network, with the verdict in words
quiz       the interview book, and a quiz from it
facts.py   numbers and formulas that several texts state, each computed once; texts quote them by name
claims.py  numbers that are widely repeated, each computed: docs/claims.md
expressions.py  the functions, machines and models that facts and claims compute with
guide      what each strategy splits and sends, what limits typical workloads, a run tuned step by step: pages of docs/
"""
