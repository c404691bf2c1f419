"""Further views of `minipar plan`, and the links between ranks. In reading order:

message_plans.py  the bytes that an all-reduce sends between each pair of ranks, by algorithm
topology.py       links as a graph, and the bytes on the slowest of them, by algorithm and placement
rings.py          the widest rings of that graph, and the number that run at once
read_topology.py  the graph of a machine, from nvidia-smi, from NCCL's file or from measured pairs
measure_links.py  the speed of every pair of ranks. links_command.py: `minipar links`
compression.py    bytes, passes and seconds of compressed gradients, and whether they pay
auto_split.py     stages of unequal meshes, by dynamic programming
scaling.py        weak and strong scaling, and the point at which data parallelism is communication bound
unequal.py        GPUs of two kinds: the batch divided by speed
published_runs.py  published training runs, and the cost model's error on each
fit.py            fits the cost model's numbers to half of them, and writes docs/planner.md
published_choices.py  the planner's choices beside their authors', and docs/planner_choices.md
choices.py        the choices of `--view`, and the command
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
