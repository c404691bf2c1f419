"""Pages of docs/ whose figures are computed by `minipar.cost`, or were measured once and stored.

    python -m benchmarks.guide docs/generated

strategies.py, strategies.toml         writes strategies.md: what each strategy splits, sends and saves
workloads.py, workloads.toml           writes workloads.md: typical workloads, what limits each, the planner's layout
tuning.py, tuning.toml, measured.toml  writes tuning.md: a run that is tuned step by step, with measured times
routing.py, routing.toml               trains small mixtures; routing.md: a router's options in loss, drops and bytes
"""
