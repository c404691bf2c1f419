"""Offloaded weights: stored in CPU memory or in a file, and loaded layer by layer, each while the layer before it computes.

    memory    | load 2 |   | load 3 |   | load 0 |          for the next forward, during the head
    device    | layer 1    | layer 2    | layer 3 | head

So a model can run whose layers do not all fit in memory with the cache. At most two of them are resident: the one that
computes, and the next. The embedding, the head and the last norm stay where they are.

A forward loads all layers, however many rows it has. In decode, a layer computes far faster than it is loaded, so a forward
takes as long as loading the weights:

    tokens per second <= rows * bandwidth / bytes of the layers

For 7 billion weights in bfloat16, loaded from a disk at 5 GB/s, that is 0.36 tokens per second for one request. In 4 bits,
with groups of 64, they are loaded 3.8 times as fast; and 100 requests together get 100 tokens per forward.

`--offload` chooses where the weights are stored, as it does for optimizer states in training. "disk" loads in a thread of
its own. With "cpu", the copy to a GPU is queued on the GPU among its kernels; on a CPU there is nothing to copy.

The full stage is loaded first, and then its layers are moved.

Source: FlexGen, arXiv:2303.06865, section 4, which also chooses how much of each tensor is stored where.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minipar.config.choices import MEMORIES
from minipar.data_parallel.memory import Memory
from minipar.model.transformer import Transformer

ALIGNMENT_BYTES = 64


class Place(NamedTuple):
    """A weight of a layer, and its offset in the layer's bytes."""

    weight: Tensor
    start: int
    shape: torch.Size

    def of(self, layer: Tensor) -> Tensor:
        num_bytes = self.shape.numel() * self.weight.itemsize
        return layer[self.start : self.start + num_bytes].view(self.weight.dtype).view(self.shape)


class StreamedLayer:
    """The weights of a layer, stored in `memory` as one tensor of bytes; until it has arrived, the weights are empty."""

    def __init__(self, block: nn.Module, memory: Memory):
        self.places, self.num_bytes = [], 0
        for weight in [*block.parameters(), *block.buffers()]:
            self.places.append(Place(weight, self.num_bytes, weight.shape))
            self.num_bytes += -(-weight.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        together = torch.zeros(self.num_bytes, dtype=torch.uint8, device=self.places[0].weight.device)
        for place in self.places:
            place.of(together).copy_(place.weight.detach())
        self.resting = {"layer": memory.copy_of(together, torch.uint8)}
        self.leave()

    def arrive(self, layer: Tensor) -> None:
        layer = layer.to(self.places[0].weight.device)
        for place in self.places:
            place.weight.data = place.of(layer)

    def leave(self) -> None:
        for place in self.places:
            place.weight.data = place.weight.data.new_empty(0)


class StreamedWeights:
    """The layers of a model or a stage, moved to `memory` and loaded from there in every forward. Replaces `run_blocks`.

    read_bytes  bytes that all forwards have loaded so far

    A layer that has not arrived has empty weights, so that using them raises an error instead of generating a wrong text.
    """

    def __init__(self, model: Transformer, memory: Memory):
        self.memory, self.read_bytes = memory, 0
        self.layers = [StreamedLayer(block, memory) for block in model.layers.values()]
        model.overrides.run_blocks = self

    def __call__(self, blocks: Sequence[nn.Module], x: Tensor, *args: object) -> Tensor:
        """Run the blocks one after another, each once its weights have arrived."""
        for number, block in enumerate(blocks):
            layer, after = self.layers[number], self.layers[(number + 1) % len(blocks)]
            layer.arrive(self.memory.load(layer.resting)["layer"])
            self.read_bytes += layer.num_bytes
            try:
                if after is not layer:
                    self.memory.prefetch(after.resting)
                x = block(x, *args)
            finally:
                layer.leave()
                self.memory.release(layer.resting)
        return x


def stream_weights(model: Transformer, where: str, folder: str | None = None) -> None:
    """Move the layers of a model or a stage to the storage that `--offload` names, irreversibly; "none" does nothing.

    A copy of the model, if needed, must be made before. A model whose layers are already moved is left as it is.
    """
    if where != "none" and not isinstance(model.overrides.run_blocks, StreamedWeights):
        StreamedWeights(model, MEMORIES[where].load().memory(folder))


def check_streaming(where: str, folder: str | None) -> None:
    """Raise ValueError if `--offload` has no such choice, or if the folder does not exist."""
    MEMORIES[where]
    if folder is not None and where != "disk":
        raise ValueError(f"offload_folder={folder} is for offload=disk, and offload={where}; leave it out")
    if folder is not None and not (os.path.isdir(folder) and os.access(folder, os.W_OK)):
        raise ValueError(f"offload_folder={folder} is no folder to write to; use one that is there")
