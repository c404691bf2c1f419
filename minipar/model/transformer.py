"""The whole model, or a pipeline stage: some of the layers, with or without the embedding and the head."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from minipar.config.model_config import ModelConfig
from minipar.model.block import Block, run_blocks
from minipar.model.deferrable_linear import Linear, TiedHead
from minipar.model.groups import check_whole_groups
from minipar.model.init import initialize
from minipar.model.norm import RMSNorm
from minipar.model.overrides import TransformerOverrides
from minipar.model.vocabulary import check_vocabulary
from minipar.support.errors import one_of

IGNORE_INDEX = -100  # a target with this value does not count in the loss


class Transformer(nn.Module):
    """A Llama-style language model or, by `layers`, `first` and `last`, one stage of it with the same parameter names.

    first       the stage has the embedding: its input is tokens [B, T] int64; else hidden [B, T, D]
    layers      layer numbers in the whole model, ascending; None: all
    last        the stage has the final norm and the head: its output is logits [B, T, V]; else hidden [B, T, D]
    positions   [T] or [B, T]  each token's position in its sample, or with `config.documents` in its document; default
                               0 ... T-1
    sample_ids  [B]            each row's number in the step's batch; default 0 ... B-1
    step        the training step; with `seed`, sample_ids and each token's index in its sample, it keys dropout and the
                routers' noise
    targets     [B, T] int64; given these, the last stage returns the sum of cross-entropies instead of the logits

    Parameters are named `embedding.weight`, `layers.{i}.attention_norm.weight`,
    `layers.{i}.attention.{q,k,v,o}.weight`, `layers.{i}.mlp_norm.weight`, `layers.{i}.mlp.{gate,up,down}.weight`,
    `norm.weight` and `head.weight`; a layer with experts has `mlp.router.weight` and `mlp.experts.{gate,up,down}`
    [E, ...]. With `qkv_bias` q, k and v have a bias, with `qk_norm` attention has `{q,k}_norm.weight`, and with
    `kv_latent_dim` the parameters of `LatentAttention`. A tied model has no head.weight: its head multiplies by
    embedding.weight. A tied last stage that is not the first holds a copy of the embedding under the name head.weight,
    listed in `tied_copies`.

    A stage's initial weights are those of the whole model. On device="meta" no weights are filled.
    Raises ValueError if shapes do not fit, or tokens or targets are not in the vocabulary.
    """

    def __init__(
        self,
        config: ModelConfig,
        seed: int = 0,
        layers: Iterable[int] | None = None,
        first: bool = True,
        last: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.config, self.seed, self.first, self.last = config, seed, first, last
        self.overrides = TransformerOverrides()
        if first:
            # torch.get_default_device() fails in torch 2.9 if the default was set to None, as every rank does.
            shape, where = (config.vocab_size, config.dim), device or torch.empty(0).device
            self.embedding = nn.utils.skip_init(nn.Embedding, *shape, device=where, dtype=dtype)
        self.layers = nn.ModuleDict(
            {
                str(i): Block(config, i, seed, device, dtype)
                for i in _checked_layers(layers, config.num_layers)
            }
        )
        if last:
            self.norm = RMSNorm(config.dim, config.norm_eps, device, dtype)
            self.head: TiedHead | Linear
            if config.tie_embeddings and first:
                self.head = TiedHead()
            else:
                self.head = Linear(config.dim, config.vocab_size, device=device, dtype=dtype)
        if not any(p.is_meta for p in self.parameters()):
            initialize(self, config, seed)

    @property
    def tied_copies(self) -> dict[str, str]:
        """This stage's copies of another stage's parameters: name here -> canonical name."""
        is_copy = self.last and not self.first and self.config.tie_embeddings
        return {"head.weight": "embedding.weight"} if is_copy else {}

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        sample_ids: Tensor | None = None,
        step: int = 0,
        targets: Tensor | None = None,
    ) -> Tensor:
        self._check_input(x)
        B, T = self.whole_shape(x)[0], self.sequence_length(x)
        indices = self._indices(T, x.device, positions)
        positions = indices if positions is None else positions
        sample_ids = torch.arange(B, device=x.device) if sample_ids is None else sample_ids
        _check_shape("positions", positions, [(T,), (B, T)])
        _check_shape("sample_ids", sample_ids, [(B,)])
        if self.first:
            x = self.embedding(x)
        run = self.overrides.run_blocks or run_blocks
        x = run(list(self.layers.values()), x, positions, sample_ids, step, indices)
        if not self.last:
            return x
        x = self.norm(x)
        shares = self.first and self.config.tie_embeddings
        logits = self.head(x, self.embedding.weight) if shares else self.head(x)
        return (self.overrides.output or self.output)(logits, targets)

    def output(self, logits: Tensor, targets: Tensor | None) -> Tensor:
        """Return the logits or, given targets, the sum of their cross-entropies."""
        return logits if targets is None else cross_entropy_sum(logits, targets)

    def default_positions(self, T: int, device: torch.device) -> Tensor:
        """Return each token's index in its sample."""
        return torch.arange(T, device=device)

    def _indices(self, T: int, device: torch.device, positions: Tensor | None) -> Tensor:
        """Return each token's index in its sample: the given position, unless positions start at 0 in each document."""
        if positions is None or self.config.documents:
            return (self.overrides.default_positions or self.default_positions)(T, device)
        if self.config.num_experts:
            check_whole_groups(positions, self.config.group_tokens)
        return positions

    def whole_shape(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape that this stage's input would have in one process."""
        own = None if self.first else self.overrides.whole_shape
        return tuple(x.shape) if own is None else own(x)

    def sequence_length(self, x: Tensor) -> int:
        """Return the number of tokens per sample, given this stage's input."""
        own = self.overrides.sequence_length
        return x.shape[1] if own is None else own(x)

    def loss(
        self,
        x: Tensor,
        targets: Tensor,
        positions: Tensor | None = None,
        sample_ids: Tensor | None = None,
        step: int = 0,
        count: int | Tensor | None = None,
    ) -> Tensor:
        """Return the mean cross-entropy over the targets that are not -100.

        x        tokens [B, T], or hidden [B, T, D] if this is not the first stage
        targets  [B, T] int64
        count    divides the sum; default: the number of targets in `targets` that are not -100. For a part of a batch,
                 pass the whole batch's count; losses and gradients of the parts then sum to those of the whole batch.

        If all targets are -100, the loss is 0, and so is every gradient that does not come from an auxiliary loss.

        A model with experts also trains on their auxiliary losses. They are in this loss's gradients but not in its value,
        since the last stage of a pipeline does not run the other stages' layers. `take_metrics` returns their values.
        For a part of a batch, also call `set_num_groups`.
        """
        if not self.last:
            raise ValueError("last=False: this stage has no head and computes no loss; ask the last stage")
        _check_shape("targets", targets, [(self.whole_shape(x)[0], self.sequence_length(x))])
        if count is None:
            count = (targets != IGNORE_INDEX).sum()
        total: Tensor = self(x, positions, sample_ids, step, targets)
        return total / torch.as_tensor(count).clamp(min=1)

    def stage(self, layers: Iterable[int], first: bool, last: bool) -> Transformer:
        """Return a stage of this model with *copies* of its present values; this model is unchanged.

        Cut stages before applying other strategies: the copies lose what a strategy has attached to the parameters.
        Raises ValueError if this model lacks a requested layer, or the requested embedding or head.
        """
        layers = _checked_layers(layers, self.config.num_layers)
        lacking = [str(i) for i in layers if str(i) not in self.layers]
        if lacking or (first and not self.first) or (last and not self.last):
            have = f"layers {', '.join(self.layers)}, first={self.first}, last={self.last}"
            raise ValueError(
                f"stage(layers={layers}, first={first}, last={last}) is not within this model: {have}"
            )
        part = Transformer(self.config, self.seed, layers, first, last, device="meta")
        for i in layers:
            part.layers[str(i)] = copy.deepcopy(self.layers[str(i)])
        if first:
            part.embedding = copy.deepcopy(self.embedding)
        if last:
            part.norm = copy.deepcopy(self.norm)
            if not (self.first and self.config.tie_embeddings):
                part.head = copy.deepcopy(self.head)
            elif not first:
                part.head.weight = copy.deepcopy(self.embedding.weight)
        modes = {name: module.training for name, module in self.named_modules()}
        for name, module in part.named_modules():
            module.training = modes[name]
        return part

    def _check_input(self, x: Tensor) -> None:
        if self.first and (x.dim() != 2 or x.dtype != torch.int64):
            raise ValueError(f"tokens are {_describe(x)}; this stage embeds int64 tokens [B, T]")
        if self.first:
            check_vocabulary("tokens", x, self.config.vocab_size)
        fits = self.first or x.dim() == 3 and self.whole_shape(x)[2] == self.config.dim
        if not self.first and (not fits or not x.is_floating_point()):
            raise ValueError(
                f"hidden is {_describe(x)}; this stage takes floats [B, T, dim={self.config.dim}]"
            )
        if (T := self.sequence_length(x)) > self.config.max_seq_len:
            raise ValueError(
                f"{T} tokens a sample exceed max_seq_len={self.config.max_seq_len}; "
                f"use {self.config.max_seq_len} or fewer"
            )


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of logsumexp(logits) - logits[target] over targets that are not -100, in float32 or wider.

    logits [..., V]    targets [...] int64

    Raises ValueError if a target is not in the vocabulary.
    """
    check_vocabulary("targets", targets, logits.shape[-1], IGNORE_INDEX)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, -2), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def _checked_layers(layers: Iterable[int] | None, num_layers: int) -> list[int]:
    numbers = list(range(num_layers) if layers is None else layers)
    ascending = all(a < b for a, b in zip(numbers, numbers[1:]))
    if not ascending or (numbers and not 0 <= numbers[0] <= numbers[-1] < num_layers):
        raise ValueError(
            f"layers={numbers} are not layers of num_layers={num_layers}; use ascending numbers from 0"
        )
    return numbers


def _check_shape(name: str, x: Tensor, allowed: list[tuple[int, ...]]) -> None:
    if tuple(x.shape) not in allowed:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; use {one_of(allowed)}")


def _describe(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
