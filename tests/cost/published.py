"""Tables that papers print."""

from typing import NamedTuple


class Row(NamedTuple):
    """A row of Megatron-LM's table 1, arXiv:2104.04473; microbatch and chunks from the scripts of its artifact."""

    billions: float
    heads: int
    hidden: int
    layers: int
    tp: int
    pp: int
    gpus: int
    batch: int
    microbatch: int
    chunks: int
    tflops: int
    percent: int
    petaflops: float

    @property
    def dp(self) -> int:
        return self.gpus // (self.tp * self.pp)


SC21_TABLE1 = [
    Row(1.7, 24, 2304, 24, 1, 1, 32, 512, 16, 1, 137, 44, 4.4),
    Row(3.6, 32, 3072, 30, 2, 1, 64, 512, 16, 1, 138, 44, 8.8),
    Row(7.5, 32, 4096, 36, 4, 1, 128, 512, 16, 1, 142, 46, 18.2),
    Row(18.4, 48, 6144, 40, 8, 1, 256, 1024, 8, 1, 135, 43, 34.6),
    Row(39.1, 64, 8192, 48, 8, 2, 512, 1536, 4, 1, 138, 44, 70.8),
    Row(76.1, 80, 10240, 60, 8, 4, 1024, 1792, 2, 3, 140, 45, 143.8),
    Row(145.6, 96, 12288, 80, 8, 8, 1536, 2304, 2, 2, 148, 47, 227.1),
    Row(310.1, 128, 16384, 96, 8, 16, 1920, 2160, 1, 2, 155, 50, 297.4),
    Row(529.6, 128, 20480, 105, 8, 35, 2520, 2520, 1, 3, 163, 52, 410.2),
    Row(1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 1, 1, 163, 52, 502.0),
]

# ZeRO, arXiv:1910.02054, table 1: GB of model states per device, by parameters and data-parallel degree; stages 1, 2, 3.
ZERO_TABLE1 = {
    7.5e9: {
        1: (120, 120, 120), 4: (52.5, 41.3, 30), 16: (35.6, 21.6, 7.5), 64: (31.4, 16.6, 1.88), 256: (30.4, 15.4, 0.47),
        1024: (30.1, 15.1, 0.12),
    },
    128e9: {
        1: (2048, 2048, 2048), 4: (896, 704, 512), 16: (608, 368, 128), 64: (536, 284, 32), 256: (518, 263, 8),
        1024: (513, 257, 2),
    },
    1e12: {
        1: (16000, 16000, 16000), 4: (7000, 5500, 4000), 16: (4750, 2875, 1000), 64: (4187, 2218, 250),
        256: (4046, 2054, 62.5), 1024: (4011, 2013, 15.6),
    },
}  # fmt: skip

# Zero Bubble, arXiv:2401.10241, tables 5 and 9: stages, microbatches, ms of F, I, W and a message; bubble of 1F1B.
ZB_1F1B = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431), (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240), (8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898), (8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091),
]  # fmt: skip

# gpt-fast's README, "Benchmarks": tokens/s at batch 1 and a prompt of 5 tokens, on A100-80GB limited to 330 W: model, GPUs,
# bits of a weight (4 in groups of 32). Its all-reduce is direct, in one hop.
GPT_FAST = [
    ("llama-7b", 1, 16, 104.9), ("llama-7b", 2, 16, 168.84), ("llama-7b", 4, 16, 254.02), ("llama-7b", 8, 16, 328.43),
    ("llama-70b", 2, 16, 21.32), ("llama-70b", 4, 16, 38.01), ("llama-70b", 8, 16, 62.5),
    ("llama-7b", 1, 8, 155.58), ("llama-7b", 1, 4, 196.8), ("llama-70b", 1, 8, 19.13), ("llama-70b", 1, 4, 25.25),
]  # fmt: skip

# NVIDIA NeMo Framework's user guide, "Performance", Llama-2-7B, 128 tokens of prompt and 20 new ones: batch, tp, ms on
# A100-80GB and on H100. The guide's 13B takes less time than its weights of 16 bits take to read, so it is left out.
NEMO_7B = [
    (1, 1, 234.0, 153.8), (8, 1, 329.5, 199.2), (1, 2, 171.7, 128.6), (8, 2, 237.6, 156.2),
    (1, 4, 143.7, 107.4), (8, 4, 196.4, 134.6), (1, 8, 136.5, 97.6), (8, 8, 181.9, 129.1),
]  # fmt: skip
