"""Make a Topology from the output of `nvidia-smi topo -m`, or from measured pairs.

nvidia-smi prints one word for each pair of GPUs, which says how they are connected:

    NV#    # NVLinks between the two GPUs, or from each GPU to a switch
    PIX    one PCIe bridge                    PXB    several PCIe bridges
    PHB    a PCIe host bridge (a processor)   NODE   host bridges of one NUMA node
    SYS    the link between NUMA nodes

It says nothing of speeds: that of an NVLink, of PCIe or of the link between processors is an argument.
Source: `nvidia-smi topo -m`, its legend.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from minipar.extras.cost.topology import Link, Topology, Vertex, cables
from minipar.support.errors import one_of, require_positive

NVLINK_BYTES_PER_S = 25e9  # one link in one direction, for NVLink 2 to 4; NVLink 5 has 50e9
PCIE_BYTES_PER_S, PROCESSOR_BYTES_PER_S = 32e9, 20e9
# From the nearest to the farthest. At each distance, GPUs that are at most that far apart form a group, which consists of
# groups of the nearer distance.
DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")
# A GPU has at most this many NVLinks. If the numbers of its pairs add up to more, each of its links goes to a switch.
MOST_NVLINKS = 18
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def from_nvidia_smi(
    text: str,
    nvlink_bytes_per_s: float = NVLINK_BYTES_PER_S,
    pcie_bytes_per_s: float = PCIE_BYTES_PER_S,
    processor_bytes_per_s: float = PROCESSOR_BYTES_PER_S,
) -> Topology:
    """Return the links between a node's GPUs, given the output of `nvidia-smi topo -m`; network cards are left out.

    PCIe switches and processors become vertices, so that GPUs below the same switch share its bandwidth.
    Raises ValueError if the text has no table of GPUs, a row is incomplete, or a word is not in the legend.
    """
    words = _pairs(text)
    num_gpus = len(words)
    counts = [
        int(word[2:])
        for i, row in enumerate(words)
        for j, word in enumerate(row)
        if i != j and word[:2] == "NV"
    ]
    speeds: dict[Link, float] = {}
    has_switch = (
        len(counts) == num_gpus * (num_gpus - 1)
        and len(set(counts)) == 1
        and counts[0] * (num_gpus - 1) > MOST_NVLINKS
    )
    if has_switch:
        return cables(
            num_gpus, {(gpu, "nvswitch"): counts[0] * nvlink_bytes_per_s for gpu in range(num_gpus)}
        )
    for i in range(num_gpus):
        for j in range(i + 1, num_gpus):
            if words[i][j].startswith("NV"):
                speeds[i, j] = int(words[i][j][2:]) * nvlink_bytes_per_s
    below: list[Vertex] = list(range(num_gpus))  # GPU -> the highest vertex above it so far
    for level, distance in enumerate(DISTANCES):
        near = DISTANCES[: level + 1]
        speed = processor_bytes_per_s if distance == "SYS" else pcie_bytes_per_s
        for i in range(num_gpus):
            group = [j for j in range(num_gpus) if j == i or words[i][j] in near]
            if i == group[0] and len({below[j] for j in group}) > 1:
                vertex = f"{distance} {i}"
                speeds |= {(low, vertex): speed for low in {below[j] for j in group}}
                for j in group:
                    below[j] = vertex
    return cables(num_gpus, dict(sorted(speeds.items(), key=str)))


def _pairs(text: str) -> list[list[str]]:
    """Return the table's word for each pair of GPUs."""
    lines = [ESCAPES.sub("", line).split() for line in text.splitlines()]
    header = next((line for line in lines if line[:1] == ["GPU0"] and line[1:2] != ["X"]), None)
    if header is None:
        raise ValueError(
            "no line begins with GPU0 and names the columns: use what `nvidia-smi topo -m` prints"
        )
    columns = [name for name in header if re.fullmatch(r"(GPU|NIC)\d+|mlx\w+", name)]
    gpus = [name for name in columns if name.startswith("GPU")]
    rows = {line[0]: line[1:] for line in lines if line and line[0] in gpus and line is not header}
    found = []
    for gpu in gpus:
        cells = rows.get(gpu, [])
        if len(cells) < len(columns):
            raise ValueError(
                f"the row of {gpu} has {len(cells)} words for {len(columns)} columns; use the whole table"
            )
        words = [word for word, column in zip(cells, columns) if column in gpus]
        for word in words:
            if word != "X" and word not in DISTANCES and not re.fullmatch(r"NV\d+", word):
                raise ValueError(
                    f"{word!r} in the row of {gpu} is unknown; use {one_of(('X', 'NV#', *DISTANCES))}"
                )
        found.append(words)
    return found


def from_pairs(bytes_per_s: Sequence[Sequence[float]]) -> Topology:
    """Return a Topology with a direct link for every pair of ranks; row i, column j has the speed measured from i to j.

    Pairs are measured one at a time, so this Topology does not know which links they share.
    Raises ValueError if the matrix is not square, or a speed is not above 0.
    """
    p = len(bytes_per_s)
    require_positive(ranks=p)
    if any(len(row) != p for row in bytes_per_s):
        raise ValueError(f"a row has not {p} speeds, one for each rank; use a square matrix")
    speeds = tuple(((i, j), float(bytes_per_s[i][j])) for i in range(p) for j in range(p) if i != j)
    return Topology(p, speeds, p)
