"""Pages of docs/ whose figures are computed by `minipar.cost`, or were measured once and stored.

    python -m minipar.learn.guide docs

strategies.py, strategies.toml         writes docs/strategies.md: what each strategy splits, sends and saves
workloads.py, workloads.toml           writes docs/workloads.md: typical workloads, what limits each, the planner's layout
routing.py, routing.toml               trains small mixtures with one routing option changed at a time
tuning.py, tuning.toml, measured.toml  writes docs/tuning.md: a run that is tuned step by step, with measured times
routing.py, routing.toml               writes docs/routing.md: what a router's options do to loss, drops and bytes
"""
