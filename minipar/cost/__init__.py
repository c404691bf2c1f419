"""Memory, traffic and time of a run, by formula. Imports neither torch nor numpy.

In reading order:

machines.py     GPUs, the links inside a node and the cards that leave it, with their sources
models.py       sizes of a model; parameters and FLOPs that follow from them. model_table.py: those of known models
toml_table.py   either from a TOML file
layout.py       Layout: how a job is split; Job: model, machine, batch; which layouts are legal
slices.py       samples cut into slices: tokens, bytes kept, how many are alive
stages.py       layers of each pipeline rank, live activations and idle time of each schedule, in closed form
ranks.py        contents of each pipeline rank
activations.py  bytes that a layer keeps for its backward
memory.py       bytes per rank, itemised: states, activations, logits, gathered units, buffers
collectives.py  seconds of a collective, latency and bandwidth
links.py        the links that a mesh axis really has: members per node, cards per node
message_plans.py  who sends how many bytes to whom in an all-reduce, by algorithm
topology.py     links as a graph, and the bytes on the busiest of them, by algorithm and placement
rings.py        the widest rings of that graph, and how many run at once
traffic.py      bytes sent per step and rank, by axis, and how many of them leave the node
work.py         seconds of a layer's and the head's arithmetic: one efficiency rule
compression.py  bytes, passes and seconds of compressed gradients, and whether they pay
timing.py       seconds of a step, by part; MFU and HFU
planner.py      every legal layout, pruned and ranked
reasons.py      why the other layouts lost; what would help where nothing fits
auto_split.py   stages of unlike meshes, by dynamic programming
scaling.py      weak and strong scaling, and where data parallelism becomes communication bound
report.py       the text of `minipar plan`
plan_command.py the command
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
        "rings": ["rings_at_once", "widest_ring"],
        "timing": ["step_time"],
        "topology": ["Topology", "busiest_link", "link_bytes"],
        "traffic": ["step_traffic"],
    },
)
