"""GPUs and their nodes: arithmetic, memory, the links between the GPUs of a node, and the network cards between nodes.

Link speeds are bytes per second in *one* direction. Data sheets often give both directions together ("NVLink 900 GB/s" is
450 each way), and network speeds in bits: a 400 Gb/s card carries 50e9 bytes per second.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from minipar.cost.toml_table import find
from minipar.support.errors import one_of

GIGABIT = 1e9 / 8  # bytes
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send")


@dataclass(frozen=True)
class Machine:
    """One GPU and the node that it is in.

    peak_flops             dense 16-bit matrix products, per second, by the data sheet
    matmul_fraction        fraction of peak_flops that the best measured matrix product reaches
    memory_bytes           usable memory: a card sold as 80 GB has 80 GiB, of which the driver leaves 80e9 bytes
    hbm_bytes_per_s        bandwidth of a GPU's memory
    gpus_per_node          GPUs joined by the fast links
    link_bytes_per_s       bandwidth from a GPU to all other GPUs of its node together, in one direction
    pairs                  whether each pair of GPUs in a node has its own link, and there is no switch: in a group of n, a
                           GPU then uses n - 1 of its gpus_per_node - 1 links
    switch_speedup         factor by which a node's all-reduces get faster as the switch does the sums; 1: it does not
    cards_per_node         network cards, shared by all GPUs of the node
    card_bytes_per_s       speed of each card, in one direction
    link_latency_s, network_latency_s   latency of one hop of a ring: NCCL's own constants for protocol Simple
    start_latency_s        time to start a collective
    attention_fraction     fraction of peak_flops that a flash attention kernel reaches, counting only unmasked scores
    cudnn_speeds           rates of cuDNN's attention kernel with heads of 64 and of 128 features, in multiples of
                           attention_fraction; 1: not known to differ
    share                  fraction of these rates that a run reaches, because its products have other shapes, kernels do
                           not fill the GPU and clocks fall under load; 1 if the rates were measured in a run
    float32_slowdown       peak_flops divided by the rate of 32-bit products; TF32 is 2, plain float32 much more
    context_bytes          memory of the driver, libraries and their workspaces: 0.5 to 2 GiB
    collectives            measured (seconds per message, seconds per byte) along a ring for each of all_reduce,
                           reduce_scatter, all_gather, all_to_all and send; replaces the predictions from links
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
    cudnn_speeds: tuple[float, float] = (1.0, 1.0)
    share: float = 0.8
    float32_slowdown: float = 8.0
    context_bytes: float = 2e9
    collectives: dict[str, tuple[float, float]] | None = None
    pairs: bool = False
    switch_speedup: float = 1.0
    source: str = ""

    def __post_init__(self) -> None:
        for name in (
            "peak_flops", "memory_bytes", "hbm_bytes_per_s", "gpus_per_node", "link_bytes_per_s", "cards_per_node",
            "card_bytes_per_s", "float32_slowdown",
        ):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}; use a number above 0")
        for name in ("matmul_fraction", "attention_fraction", "share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}; use a fraction above 0, at most 1")
        if not self.switch_speedup >= 1:
            raise ValueError(f"switch_speedup={self.switch_speedup}; use 1 or more")
        for name in ("link_latency_s", "network_latency_s", "start_latency_s", "context_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}; use 0 or more")
        if len(self.cudnn_speeds) != 2 or not all(speed > 0 for speed in self.cudnn_speeds):
            raise ValueError(f"cudnn_speeds={self.cudnn_speeds}; use two numbers above 0")
        object.__setattr__(self, "cudnn_speeds", tuple(self.cudnn_speeds))  # a TOML file gives a list
        if self.collectives is not None:
            _check_collectives(self.collectives)
            pairs = {
                kind: (alpha, beta) for kind, (alpha, beta) in self.collectives.items()
            }  # a TOML file gives each pair as a list
            object.__setattr__(self, "collectives", pairs)


def _check_collectives(table: dict[str, tuple[float, float]]) -> None:
    for kind in COLLECTIVES:
        pair = table.get(kind)
        numbers = pair if isinstance(pair, list | tuple) else ()
        if len(numbers) != 2 or not all(isinstance(x, int | float) and x >= 0 for x in numbers):
            raise ValueError(
                f"collectives.{kind}={pair}; use [seconds per message, seconds per byte], 0 or more"
            )
    if unknown := set(table) - set(COLLECTIVES):
        raise ValueError(
            f"collectives.{min(unknown)} is unknown; use {one_of(COLLECTIVES, near=min(unknown))}"
        )


# From NVIDIA's data sheets of the GPU and its DGX: matrix rate, memory, NVLink (half of the sum of both directions),
# number and speed of the compute network's cards. matmul_fraction: Stas Bekman, Machine Learning
# Engineering Open Book, "maximum achievable matmul FLOPS": A100 271.2, H100 794.5, B200 1745 TFLOP/s. Latencies: NCCL,
# src/graph/tuning.cc. switch_speedup: the Open Book, network, "SHARP", 8 GPUs with and without it.
# attention_fraction: FlashAttention-2 reaches 50 to 73 % of an A100's peak (arXiv:2307.08691, abstract; the middle is used
# here) and 35 % of an H100's (arXiv:2407.08608, abstract); 0.5 for GPUs without a source.
# cudnn_speeds: the latter's figure 5, forward, causal mask, 4,096 tokens: cuDNN 363 and 518 TFLOP/s, FlashAttention-2 284
# and 319.
_A100_80 = Machine(
    "a100-80gb", 312e12, 271.2 / 312, 80e9, 2.0e12, 8, 300e9, 8, 200 * GIGABIT, attention_fraction=0.615,
    source="A100 and DGX A100 data sheets: NVLink 3, 8 HDR cards",
)  # fmt: skip
_H100 = Machine(
    "h100", 989e12, 794.5 / 989, 80e9, 3.35e12, 8, 450e9, 8, 400 * GIGABIT, attention_fraction=0.35,
    cudnn_speeds=(363 / 284, 518 / 319), switch_speedup=480.0 / 367.2,
    source="H100 SXM and DGX H100 data sheets: NVLink 4, 8 NDR cards",
)  # fmt: skip
_ALL = (
    replace(_A100_80, name="a100-40gb", memory_bytes=40e9, hbm_bytes_per_s=1.555e12),
    _A100_80,
    _H100,
    replace(_H100, name="h200", memory_bytes=141e9, hbm_bytes_per_s=4.8e12, source="H200 and DGX H200 data sheets"),
    replace(_A100_80, name="a800", link_bytes_per_s=200e9, source="an A100 with NVLink of 400 GB/s in both directions"),
    replace(_H100, name="h800", link_bytes_per_s=200e9, source="an H100 with NVLink of 400 GB/s in both directions"),
    Machine(
        "b200", 2250e12, 1745 / 2250, 180e9, 8.0e12, 8, 900e9, 8, 400 * GIGABIT, switch_speedup=838.0 / 682.2,
        source="DGX B200 data sheet: NVLink 5, 8 NDR cards",
    ),
    Machine(
        "gb200", 2500e12, 1745 / 2250, 186e9, 8.0e12, 72, 900e9, 72, 400 * GIGABIT, switch_speedup=838.0 / 682.2,
        source="GB200 NVL72 data sheet: 72 GPUs on one NVLink 5 switch, a card of 400 Gb/s each; the matrix product's "
        "fraction is a B200's",
    ),
    Machine(
        "v100", 125e12, 0.8, 32e9, 0.9e12, 16, 150e9, 8, 100 * GIGABIT,
        source="DGX-2 data sheet: 16 V100-32GB on NVSwitch, 8 EDR cards; the matrix product's fraction is assumed",
    ),
    Machine(
        "mi300x", 1307.4e12, _H100.matmul_fraction, 192e9, 5.3e12, 8, 7 * 64e9, 8, 400 * GIGABIT, pairs=True,
        source="Instinct MI300X data sheet: 7 Infinity Fabric links of 128 GB/s in both directions; 8 cards of 400 Gb/s as "
        "in Azure ND MI300X v5. The matrix product's fraction is an H100's, and no run was compared",
    ),
    Machine(
        "tpu-v5p", 459e12, _H100.matmul_fraction, 95e9, 2.765e12, 4096, 200e9, 4096, 50 * GIGABIT,
        source="https://cloud.google.com/tpu/docs/v5p: 1200 GB/s of links in both directions for the three axes of a "
        "torus, of which a group has one; a slice of 4,096 chips counts as a node, 50 Gb/s a chip leave it. The matrix "
        "product's fraction is an H100's, and no run was compared",
    ),
)  # fmt: skip
MACHINES: dict[str, Machine] = {machine.name: machine for machine in _ALL}
ALIASES = {
    "h100-80gb": "h100",
    "h200-141gb": "h200",
    "b200-180gb": "b200",
    "v100-32gb": "v100",
    "mi300x-192gb": "mi300x",
}  # names that include the memory's size, like those of the A100s


LOCAL = Path("local.toml")  # `minipar calibrate local.toml` writes it


def find_machine(name: str) -> Machine:
    """Return a machine by name or from a .toml file; "local" is this machine, described by LOCAL.

    Raises ValueError, with the nearest names, if there is no such machine.
    """
    if name != "local":
        return find("machine", ALIASES.get(name, name), MACHINES, Machine)
    if not LOCAL.exists():
        raise ValueError(
            f"machine=local is described by {LOCAL}, which is not here; run `minipar calibrate {LOCAL}`"
        )
    return find("machine", str(LOCAL), MACHINES, Machine)
