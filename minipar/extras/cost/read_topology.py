"""Make a Topology from the output of `nvidia-smi topo -m`, from NCCL's topology file, or from measured pairs.

nvidia-smi prints one word for each pair of GPUs, which says how they are connected:

    NV#    # NVLinks between the two GPUs, or from each GPU to a switch
    PIX    one PCIe bridge                    PXB    several PCIe bridges
    PHB    a PCIe host bridge (a processor)   NODE   host bridges of one NUMA node
    SYS    the link between NUMA nodes

NCCL writes its topology to the file that NCCL_TOPO_DUMP_FILE names: processors, the PCI devices below them with their
speeds, and the NVLinks of each GPU. Both sources give the types and numbers of links; the speed of an NVLink or of a link
between processors is an argument.
Sources: `nvidia-smi topo -m`, its legend; NCCL's src/graph/xml.cc and topo.cc.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree

from minipar.extras.cost.topology import Link, Topology, Vertex, cables
from minipar.support.errors import one_of, require_positive

NVLINK_BYTES_PER_S = 25e9  # one link in one direction, for NVLink 2 to 4; NVLink 5 has 50e9
PCIE_BYTES_PER_S, PROCESSOR_BYTES_PER_S = 32e9, 20e9
# From the nearest to the farthest. At each distance, GPUs that are at most that far apart form a group, which consists of
# groups of the nearer distance.
DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")
# A GPU has at most this many NVLinks. If the numbers of its pairs add up to more, each of its links goes to a switch.
MOST_NVLINKS = 18
# GT/s of a PCIe generation -> bytes per second of a lane.
LANE_BYTES_PER_S = {
    2.5: 0.25e9,
    5.0: 0.5e9,
    8.0: 0.985e9,
    16.0: 1.969e9,
    32.0: 3.938e9,
    64.0: 7.563e9,
}
SWITCH_CLASS, ESCAPES = "0x0680", re.compile(r"\x1b\[[0-9;]*m")


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


def from_nccl_xml(
    text: str,
    nvlink_bytes_per_s: float = NVLINK_BYTES_PER_S,
    processor_bytes_per_s: float = PROCESSOR_BYTES_PER_S,
) -> Topology:
    """Return the links between a node's GPUs, given NCCL's topology file; GPU `dev` is rank `dev`.

    Raises ValueError if the text is not such a file, has no GPU, or does not number GPUs 0, 1, ...
    """
    try:
        system = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ValueError(f"not XML: {error}; use the file that NCCL_TOPO_DUMP_FILE names") from None
    ranks: dict[str, int] = {}  # bus id -> rank
    speeds: dict[Link, float] = {}
    nvlinks: list[tuple[int, str, int, bool]] = []

    def read(element: ElementTree.Element, above: Vertex) -> None:
        for device in element.findall("pci"):
            bus, gpu = device.get("busid", "?"), device.find("gpu")
            if gpu is None and device.find(".//gpu") is None:
                continue  # a network card
            here: Vertex = f"pci {bus}"
            if gpu is not None:
                here = ranks[bus] = int(gpu.get("dev", -1))
                for link in gpu.findall("nvlink"):
                    is_switch = link.get("tclass", "").startswith(SWITCH_CLASS)
                    nvlinks.append((here, link.get("target", ""), int(link.get("count", 1)), is_switch))
            speeds[here, above] = _pcie_speed(device)
            read(device, here)

    processors = system.findall("cpu")
    for number, processor in enumerate(processors):
        name = f"processor {processor.get('numaid', number)}"
        if len(processors) > 1:
            speeds[name, "processors"] = processor_bytes_per_s
        read(processor, name)
    if sorted(ranks.values()) != list(range(len(ranks))) or not ranks:
        raise ValueError(f"GPUs {sorted(ranks.values())}: use a topology file of NCCL's, with dev from 0 on")
    for rank, target, links, is_switch in nvlinks:
        if is_switch:
            end: Vertex = "nvswitch"
        elif target in ranks:
            end = ranks[target]
        else:
            continue
        if (end, rank) not in speeds:  # the file lists a link at both of its ends
            speeds[rank, end] = speeds.get((rank, end), 0.0) + links * nvlink_bytes_per_s
    return cables(len(ranks), speeds)


def _pcie_speed(device: ElementTree.Element) -> float:
    """Return the bytes per second of a device's PCIe link. If the file does not give them, assume 16 lanes of PCIe 3."""
    found = re.match(r"[\d.]+", device.get("link_speed", ""))
    transfers, lanes = float(found[0]) if found else 8.0, int(device.get("link_width") or 16) or 16
    if transfers not in LANE_BYTES_PER_S:
        raise ValueError(
            f"link_speed={device.get('link_speed')!r} of {device.get('busid')} is no PCIe speed; "
            f"use {one_of(f'{speed} GT/s' for speed in LANE_BYTES_PER_S)}"
        )
    return LANE_BYTES_PER_S[transfers] * lanes


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
