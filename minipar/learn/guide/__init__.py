"""Pages of docs/ whose numbers are computed by `minipar.cost`, or measured once and kept.

    python -m minipar.learn.guide docs

strategies.py, strategies.toml  what each strategy splits, sends and saves: docs/strategies.md
workloads.py, workloads.toml    typical workloads, what limits each, and the planner's layout: docs/workloads.md
tuning.py, tuning.toml, measured.toml  a run tuned step by step, as measured: docs/tuning.md
"""
