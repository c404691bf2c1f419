"""GPUs and their nodes: arithmetic, memory, the links between the GPUs of a node, and the network cards that leave it.

Link speeds are bytes per second in *one* direction. Data sheets often give both directions together ("NVLink 900 GB/s" is
450 each way), and network speeds in bits: a 400 Gb/s card carries 50e9 bytes per second.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from minipar.cost.toml_table import find
from minipar.errors import one_of

GIGABIT = 1e9 / 8  # bytes
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send")


@dataclass(frozen=True)
class Machine:
    """One GPU and the node that it is in.

    peak_flops             dense 16-bit matrix products, per second, by the data sheet
    matmul_fraction        of peak_flops that the best measured matrix product reaches
    memory_bytes           of a GPU; decimal, which leaves the driver its part of a card sold in GiB
    hbm_bytes_per_s        of a GPU's memory
    gpus_per_node          GPUs that the fast links join
    link_bytes_per_s       from a GPU to the others of its node, one direction
    cards_per_node         network cards, shared by all GPUs of the node
    card_bytes_per_s       of each card, one direction
    link_latency_s, network_latency_s   of one hop of a ring: NCCL's own constants, protocol Simple
    start_latency_s        of any collective
    attention_fraction     of peak_flops that a flash attention kernel reaches on what the causal mask leaves
    share                  of these rates that a run reaches: what is left of either best where products are not of the best
                           shape, kernels do not fill the GPU, clocks fall under load; 1 where rates were measured in a run
    float32_slowdown       of a product of 32 bits against peak_flops; TF32 is half as fast, float32 far slower
    context_bytes          of the driver, libraries and their workspaces: 0.5 to 2 GiB
    collectives            measured: seconds per message and per byte of each of all_reduce, reduce_scatter, all_gather,
                           all_to_all and send, along a ring, in place of the links
    """

    name: str
    peak_flops: float
    matmul_fraction: float
    memory_bytes: float
    hbm_bytes_per_s: float
    gpus_per_node: int
    link_bytes_per_s: float
    cards_per_node: int
    card_bytes_per_s: float
    link_latency_s: float = 3.4e-6
    network_latency_s: float = 14e-6
    start_latency_s: float = 8.4e-6
    attention_fraction: float = 0.5
    share: float = 0.8
    float32_slowdown: float = 8.0
    context_bytes: float = 2e9
    collectives: dict | None = None
    source: str = ""

    def __post_init__(self):
        for name in (
            "peak_flops", "memory_bytes", "hbm_bytes_per_s", "gpus_per_node", "link_bytes_per_s", "cards_per_node",
            "card_bytes_per_s", "float32_slowdown",
        ):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}; use a number above 0")
        for name in ("matmul_fraction", "attention_fraction", "share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}; use a fraction above 0, at most 1")
        for name in ("link_latency_s", "network_latency_s", "start_latency_s", "context_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}; use 0 or more")
        if self.collectives is not None:
            _check_collectives(self.collectives)


def _check_collectives(table: dict) -> None:
    for kind in COLLECTIVES:
        pair = table.get(kind)
        numbers = isinstance(pair, list | tuple) and all(isinstance(x, int | float) and x >= 0 for x in pair)
        if not numbers or len(pair) != 2:
            raise ValueError(
                f"collectives.{kind}={pair}; use [seconds per message, seconds per byte], 0 or more"
            )
    if unknown := set(table) - set(COLLECTIVES):
        raise ValueError(
            f"collectives.{min(unknown)} is unknown; use {one_of(COLLECTIVES, near=min(unknown))}"
        )


# NVIDIA's data sheets of the GPU and of the DGX that holds it: matrix rate, memory, NVLink (half of the sum of both
# directions), number and speed of the cards of the compute network. matmul_fraction: Stas Bekman, Machine Learning
# Engineering Open Book, "maximum achievable matmul FLOPS": A100 271.2, H100 794.5, B200 1745 TFLOP/s. Latencies: NCCL,
# src/graph/tuning.cc. attention_fraction: FlashAttention-2 reaches 50 to 73 % of an A100 (arXiv:2307.08691, abstract), of
# which the middle is taken, and 35 % of an H100 (arXiv:2407.08608, abstract); where nothing is published, half is assumed.
_A100_80 = Machine(
    "a100-80gb", 312e12, 271.2 / 312, 80e9, 2.0e12, 8, 300e9, 8, 200 * GIGABIT, attention_fraction=0.615,
    source="A100 and DGX A100 data sheets: NVLink 3, 8 HDR cards",
)  # fmt: skip
_H100 = Machine(
    "h100", 989e12, 794.5 / 989, 80e9, 3.35e12, 8, 450e9, 8, 400 * GIGABIT, attention_fraction=0.35,
    source="H100 SXM and DGX H100 data sheets: NVLink 4, 8 NDR cards",
)  # fmt: skip
_ALL = (
    replace(_A100_80, name="a100-40gb", memory_bytes=40e9, hbm_bytes_per_s=1.555e12),
    _A100_80,
    _H100,
    replace(_H100, name="h200", memory_bytes=141e9, hbm_bytes_per_s=4.8e12, source="H200 and DGX H200 data sheets"),
    Machine(
        "b200", 2250e12, 1745 / 2250, 180e9, 8.0e12, 8, 900e9, 8, 400 * GIGABIT,
        source="DGX B200 data sheet: NVLink 5, 8 NDR cards",
    ),
    Machine(
        "v100", 125e12, 0.8, 32e9, 0.9e12, 16, 150e9, 8, 100 * GIGABIT,
        source="DGX-2 data sheet: 16 V100-32GB on NVSwitch, 8 EDR cards; the matrix product's fraction is assumed",
    ),
)  # fmt: skip
MACHINES: dict[str, Machine] = {machine.name: machine for machine in _ALL}


def find_machine(name: str) -> Machine:
    """Return a machine by name, or from a .toml file. Raises ValueError, with the nearest names, if there is none."""
    return find("machine", name, MACHINES, Machine)
