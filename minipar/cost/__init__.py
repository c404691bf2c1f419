"""Memory, traffic and time of a run, by formula. Imports neither torch nor numpy.

In reading order:

machines.py     GPUs, their links inside a node, and the network cards between nodes, with the sources of the numbers
models.py       sizes of a model; parameters and FLOPs that follow from them. model_table.py: sizes of known models
toml_table.py   reads a machine or a model from a TOML file
layout.py       Layout: how a job is split; Job: model, machine, batch; which layouts are legal
stages.py       layers of each pipeline rank, live activations and idle time of each schedule, in closed form
ranks.py        contents of each pipeline rank
activations.py  bytes that a layer keeps for its backward
memory.py       bytes per rank, itemised: states, activations, logits, gathered units, buffers
collectives.py  time of a collective, from latency and bandwidth
links.py        the bandwidth that a group along a mesh axis gets, inside a node and between nodes
traffic.py      bytes sent per step and rank, by axis, and how many of them leave the node
work.py         time of the arithmetic of a layer and of the head, by one efficiency rule
timing.py       time of a step, by part; MFU and HFU
programs.py     training programs with published runs: what each overlaps, and the few numbers of their own
doubt.py        how far four of five runs of another program lie from a prediction; what is unusual
serving.py      time and memory of serving: decode steps, prefill, the number of requests that fit
serving_plan.py replicas for a request rate and two latency targets, and the text of `minipar plan --serve`
planner.py      the search: every legal layout, pruned and ranked
reasons.py      why the other layouts lost; what would help if nothing fits
report.py       the text of `minipar plan`
plan_command.py the work of `minipar plan`, except for drawing
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "layout": ["Implementation", "Job", "Layout", "parse_layout"],
        "machines": ["MACHINES", "Machine", "find_machine"],
        "memory": ["model_state_bytes", "rank_memory", "worst_rank_memory"],
        "model_table": ["MODELS", "find_model"],
        "models": ["ModelShape"],
        "planner": ["plan"],
        "timing": ["step_time"],
        "traffic": ["step_traffic"],
    },
)
