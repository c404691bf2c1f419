"""The planner held against published figures. In reading order:

published_runs.py     published training runs, and the cost model's error on each
nccl_curves.py        published times of collectives by size, and the cost model's error on each curve
fit.py                fits the cost model's few numbers to half of those runs, and counts what its doubt holds
roofline.py           a model of six numbers, to compare with
ablation.py           the errors without each term of the cost model
planner_page.py       the text and picture of docs/generated/planner.md, which compares the predictions with the runs
published_choices.py  compares the planner's layouts with the published ones, and writes docs/generated/planner_choices.md
"""
