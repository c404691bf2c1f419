"""Further views of `minipar plan`, and the links between ranks. In reading order:

message_plans.py  the bytes that an all-reduce sends between each pair of ranks, by algorithm
topology.py       links as a graph, and the bytes on the slowest of them, by algorithm and placement
rings.py          the widest rings of that graph, and the number that run at once
read_topology.py  the graph of a machine, from nvidia-smi, from NCCL's file or from measured pairs
measure_links.py  measures the speed between every pair of ranks
links_command.py  the command `minipar links`
compression.py    the cost of compressed gradients (bytes, passes over memory, time), and whether compression pays
auto_split.py     pipeline stages with unequal meshes, by dynamic programming
scaling.py        weak and strong scaling, and the point at which data parallelism is communication bound
unequal.py        a layout on GPUs of two kinds, with the batch divided by speed
offloading.py     the time and memory of a step with optimizer states in CPU memory or in a file
published_runs.py     published training runs, and the cost model's error on each
nccl_curves.py        published times of collectives by size, and the cost model's error on each curve
fit.py                fits the cost model's parameters to half of those runs
planner_page.py       the text of docs/generated/planner.md, which compares the predictions with the runs
published_choices.py  compares the planner's layouts with the published ones, and writes docs/generated/planner_choices.md
choices.py        declares the choices of `minipar plan --view`, and the command `minipar links`
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "read_topology": ["from_nccl_xml", "from_nvidia_smi", "from_pairs"],
        "rings": ["rings_at_once", "wide_ring", "widest_ring"],
        "topology": ["Topology", "busiest_link", "link_bytes"],
    },
)
