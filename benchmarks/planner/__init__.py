"""The planner held against published figures. In reading order:

published_runs.py     published training runs, and the cost model's error on each
nccl_curves.py        published times of collectives by size, and the cost model's error on each curve
fit.py                fits the cost model's parameters to half of those runs
planner_page.py       the text of docs/generated/planner.md, which compares the predictions with the runs
published_choices.py  compares the planner's layouts with the published ones, and writes docs/generated/planner_choices.md
"""
