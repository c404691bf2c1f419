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


class Flash(NamedTuple):
    """A run with flash attention: layers, width, heads; tokens a sample, GPUs, samples of a microbatch and a step; MFU."""

    layers: int
    hidden: int
    heads: int
    seq: int
    gpus: int
    microbatch: int
    batch: int
    recompute: str
    percent: float


# MosaicML's llm-foundry, scripts/train/benchmarking/README.md: MPT on A100-80GB with 1600 Gb/s a node, FSDP. Rows of at
# most 4096 tokens; its longer ones ran the first FlashAttention, in Triton.
MPT_A100 = [
    Flash(80, 8192, 64, 2048, 64, 8, 2048, "full", 53.33), Flash(80, 8192, 64, 2048, 32, 2, 1024, "full", 48.56),
    Flash(48, 7168, 56, 4096, 8, 1, 168, "full", 51.37), Flash(48, 7168, 56, 2048, 8, 3, 504, "full", 55.3),
    Flash(48, 7168, 56, 1024, 8, 6, 1008, "full", 55.82), Flash(40, 5120, 40, 4096, 8, 10, 240, "full", 57.62),
    Flash(40, 5120, 40, 2048, 8, 2, 48, "none", 59.57), Flash(40, 5120, 40, 1024, 8, 40, 960, "full", 59.48),
    Flash(32, 4096, 32, 4096, 8, 16, 256, "full", 54.84), Flash(32, 4096, 32, 2048, 8, 6, 96, "none", 64.23),
    Flash(32, 4096, 32, 1024, 8, 64, 1024, "full", 58.01), Flash(32, 2560, 20, 4096, 8, 5, 240, "none", 60.53),
    Flash(32, 2560, 20, 2048, 8, 10, 160, "none", 62.11), Flash(24, 2048, 16, 2048, 8, 14, 448, "none", 59.86),
]  # fmt: skip

# Llama 3 405B, arXiv:2407.21783, table 4: dp, cp, tokens a sample, samples a step, TFLOP/s a GPU; tp 8 and pp 16 in all.
LLAMA3_405B = [(64, 1, 8192, 2048, 430), (128, 1, 8192, 2048, 400), (8, 16, 131072, 128, 380)]
