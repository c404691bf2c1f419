"""Further views of `minipar plan`, and the links between ranks. In reading order:

message_plans.py  the bytes that an all-reduce sends between each pair of ranks, by algorithm
topology.py       links as a graph, and the bytes on the slowest of them, by algorithm and placement
rings.py          the widest rings of that graph, and the number that run at once
read_topology.py  the graph of a machine, from nvidia-smi or from measured pairs
measure_links.py  measures the speed between every pair of ranks
links_command.py  the command `minipar links`
compression.py    the cost of compressed gradients (bytes, passes over memory, time), and whether compression pays
auto_split.py     pipeline stages with unequal meshes, by dynamic programming
scaling.py        weak and strong scaling, and the point at which data parallelism is communication bound
unequal.py        a layout on GPUs of two kinds, with the batch divided by speed
choices.py        declares the choices of `minipar plan --view`, and the command `minipar links`
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "read_topology": ["from_nvidia_smi", "from_pairs"],
        "rings": ["rings_at_once", "wide_ring", "widest_ring"],
        "topology": ["Topology", "busiest_link", "link_bytes"],
    },
)
