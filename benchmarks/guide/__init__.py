"""Writers of pages: those of docs/generated whose figures are computed or were measured once, and of lessons/interview.

    python -m benchmarks.guide docs/generated
    python -m benchmarks.guide.claims docs/generated/claims.md
    python -m benchmarks.guide.interview lessons/interview

strategies.py, strategies.toml         writes strategies.md: what each strategy splits, sends and saves
workloads.py, workloads.toml           writes workloads.md: typical workloads, what limits each, the planner's layout
tuning.py, tuning.toml, measured.toml  writes tuning.md: a run that is tuned step by step, with measured times
routing.py, routing.toml               trains small mixtures; routing.md: a router's options in loss, drops and bytes
foreign.py, foreign.toml               judges docs/adapters: foreign_code.md: what torch's and others' code meets
claims.py, claims.toml                 writes claims.md: widely repeated numbers, each computed anew
boards.py, walkthroughs.toml, designs.toml  whiteboard walkthroughs and system designs
interview.py                           the interview book: its questions, and these boards
"""
