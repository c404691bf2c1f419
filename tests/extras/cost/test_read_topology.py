"""What a machine says of its links becomes the graph that was drawn for it; what it cannot say is refused."""

import pytest

from minipar.extras.cost.read_topology import from_nvidia_smi, from_pairs
from minipar.extras.cost.rings import ring_width, widest_ring
from minipar.extras.cost.topology import cables, nvswitch_nodes, pcie_pairs
from tests.extras.cost.test_topology import H100

GB = 1e9

# Two processors with two PCIe switches of two GPUs each; one NVLink bridge.
PAIRS = """\
\x1b[4m\tGPU0\tGPU1\tGPU2\tGPU3\tGPU4\tGPU5\tGPU6\tGPU7\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV4\tPHB\tPHB\tSYS\tSYS\tSYS\tSYS\tPIX\t0-15\t0
GPU1\tNV4\t X \tPHB\tPHB\tSYS\tSYS\tSYS\tSYS\tPIX\t0-15\t0
GPU2\tPHB\tPHB\t X \tPIX\tSYS\tSYS\tSYS\tSYS\tPHB\t0-15\t0
GPU3\tPHB\tPHB\tPIX\t X \tSYS\tSYS\tSYS\tSYS\tPHB\t0-15\t0
GPU4\tSYS\tSYS\tSYS\tSYS\t X \tPIX\tPHB\tPHB\tSYS\t16-31\t1
GPU5\tSYS\tSYS\tSYS\tSYS\tPIX\t X \tPHB\tPHB\tSYS\t16-31\t1
GPU6\tSYS\tSYS\tSYS\tSYS\tPHB\tPHB\t X \tPIX\tSYS\t16-31\t1
GPU7\tSYS\tSYS\tSYS\tSYS\tPHB\tPHB\tPIX\t X \tSYS\t16-31\t1
NIC0\tPIX\tPIX\tPHB\tPHB\tSYS\tSYS\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the interconnect between NUMA nodes
"""


def all_to_all_by_nvlink(num_gpus: int, links: int) -> str:
    names = [f"GPU{i}" for i in range(num_gpus)]
    rows = [
        " ".join([name, *("X" if name == other else f"NV{links}" for other in names), "0-9", "N/A"])
        for name in names
    ]
    return "\n".join([" ".join([*names, "CPU", "Affinity"]), *rows])


def hop_speeds(topology) -> dict:
    """Of each pair of ranks, the slowest link of its route."""
    speeds = dict(topology.speeds)
    return {pair: min(speeds[link] for link in route) for pair, route in topology.routes().items()}


def test_the_table_of_nvidia_smi_is_the_graph_that_was_drawn():
    found = from_nvidia_smi(PAIRS, pcie_bytes_per_s=32 * GB, processor_bytes_per_s=20 * GB)
    drawn = hop_speeds(pcie_pairs(8, 32 * GB, 20 * GB))
    drawn |= {(0, 1): 100 * GB, (1, 0): 100 * GB}
    assert hop_speeds(found) == drawn
    # GPUs 2 and 3 share their switch's link to the processor.
    routes = found.routes()
    assert set(routes[2, 4]) & set(routes[3, 5])
    assert not set(routes[2, 3]) & set(routes[4, 5])


def test_equal_links_are_direct_if_they_fit_and_else_a_switch():
    direct = from_nvidia_smi(all_to_all_by_nvlink(4, 4))
    assert hop_speeds(direct) == {(a, b): 100 * GB for a in range(4) for b in range(4) if a != b}
    assert all(len(route) == 1 for route in direct.routes().values())
    switched = from_nvidia_smi(all_to_all_by_nvlink(8, 18))
    assert all(route[0][1] == "nvswitch" for route in switched.routes().values())
    assert widest_ring(switched).width == 450 * GB == widest_ring(nvswitch_nodes(H100)).width


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nothing here", "no line begins with GPU0"),
        (PAIRS.replace("GPU3\tPHB\tPHB\tPIX\t X \tSYS\tSYS\tSYS\tSYS\tPHB\t0-15\t0", "GPU3\tPHB"), "the row of GPU3 has 1"),
        (PAIRS.replace("GPU5\tSYS\tSYS", "GPU5\tSIS\tSYS"), "'SIS' in the row of GPU5 is unknown; use X, NV#, PIX"),
    ],
)  # fmt: skip
def test_a_table_that_is_not_whole_is_refused(text, says):
    with pytest.raises(ValueError, match=says):
        from_nvidia_smi(text)


def test_measured_pairs_are_cables_of_their_speeds_in_each_direction():
    speeds = [[0, 5, 1], [4, 0, 3], [2, 6, 0]]
    found = from_pairs(speeds)
    assert hop_speeds(found) == {(i, j): speeds[i][j] for i in range(3) for j in range(3) if i != j}
    assert widest_ring(found).ranks == (0, 1, 2)
    assert ring_width(found, (0, 1, 2)) == 2
    for matrix, says in (
        ([[0, 1], [1]], "a row has not 2 speeds"),
        ([[0, 0], [1, 0]], "from 0 to 1 has 0.0 bytes"),
    ):
        with pytest.raises(ValueError, match=says):
            from_pairs(matrix)


def test_a_cable_read_once_too_often_would_be_noticed():
    """The planted fault: both ends of an NVLink count, and it seems twice as wide."""
    twice = cables(2, {(0, 1): 2 * 50 * GB})
    once = from_nvidia_smi(all_to_all_by_nvlink(2, 2))
    assert hop_speeds(once)[0, 1] == 50 * GB != hop_speeds(twice)[0, 1]
