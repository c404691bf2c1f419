"""A small Llama whose base is frozen, with low-rank adapters: right in every way, and with one mistake each."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from minipar.tensor_parallel import Column
from tests.train.verification.scripts.base import (
    RIGHT,
    OursDDP,
    OursTP,
    OursZero,
    Plain,
    Script,
    right,
    train,
    wrong,
)

VOCAB, DIM, HEAD_DIM, WIDTH, LENGTH, SAMPLES, RANK, ALPHA = 16, 8, 4, 16, 6, 4, 2, 4.0


class LoRA(nn.Module):
    """A frozen linear layer and its adapter: y = x W^T + alpha/r x A^T B^T."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.base_layer = nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(inputs, RANK, bias=False), nn.Linear(RANK, outputs, bias=False)
        nn.init.zeros_(self.lora_B.weight)
        self.scale = ALPHA / RANK

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.scale * self.lora_B(self.lora_A(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(DIM).requires_grad_(False) for _ in range(2))
        self.q_proj, self.v_proj = LoRA(DIM, DIM), LoRA(DIM, DIM)
        self.k_proj, self.o_proj, self.gate_proj = (
            nn.Linear(DIM, outputs, bias=False).requires_grad_(False) for outputs in (DIM, DIM, WIDTH)
        )
        self.up_proj, self.down_proj = LoRA(DIM, WIDTH), LoRA(WIDTH, DIM)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (
            f(h).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(heads.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, DIM).requires_grad_(False)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.RMSNorm(DIM).requires_grad_(False)
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False).requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def is_adapter(name: str) -> bool:
    return "lora_" in name


@right
class Lora(Script):
    units, max_norm = (Layer,), 0.05
    plan = {"layers.*.[qv]_proj.base_layer": Column(unit=HEAD_DIM), "layers.*.[qv]_proj.lora_B": Column(unit=HEAD_DIM),
            "layers.*.k_proj": Column(unit=HEAD_DIM), "layers.*.o_proj": "row", "layers.*.gate_proj": "column",
            "layers.*.up_proj.base_layer": "column", "layers.*.up_proj.lora_B": "column",
            "layers.*.down_proj.base_layer": "row", "layers.*.down_proj.lora_A": "row"}  # fmt: skip

    def build(self) -> nn.Module:
        return Model()

    def batch(self, k: int) -> tuple[Tensor, ...]:
        texts = torch.randint(VOCAB, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(200 + k))
        return texts[:, :-1], texts[:, 1:]

    def loss_sum(self, model: nn.Module, *samples: Tensor) -> Tensor:
        tokens, targets = samples
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")

    def count(self, *samples: Tensor) -> Tensor:
        return torch.tensor(samples[1].numel())


# Tensor parallelism by plain calls, of the MLPs alone ----------------------------------------------------------------


class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class SplitUp(nn.Module):
    """Column-parallel: every rank has its rows of W and B, and all of A. The gradient of x A^T is summed over ranks."""

    def __init__(self, whole: LoRA, rank: int, size: int):
        super().__init__()
        self.base_layer, self.lora_A, self.lora_B, self.scale = (
            cut(whole.base_layer, 0, rank, size), whole.lora_A, cut(whole.lora_B, 0, rank, size), whole.scale
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        low = CopyToRanks.apply(self.lora_A(x))
        return self.base_layer(CopyToRanks.apply(x)) + self.scale * self.lora_B(low)


class SplitDown(nn.Module):
    """Row-parallel: every rank has its columns of W and A, and all of B."""

    def __init__(self, whole: LoRA, rank: int, size: int):
        super().__init__()
        self.base_layer, self.lora_A, self.lora_B, self.scale = (
            cut(whole.base_layer, 1, rank, size), cut(whole.lora_A, 1, rank, size), whole.lora_B, whole.scale
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        low = SumOverRanks.apply(self.lora_A(x))
        return SumOverRanks.apply(self.base_layer(x)) + self.scale * self.lora_B(low)


class SplitGate(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(CopyToRanks.apply(x))


def cut(linear: nn.Linear, dim: int, rank: int, size: int, to: type = nn.Linear) -> nn.Linear:
    weight = linear.weight.detach().chunk(size, dim)[rank].clone()
    part = to(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    part.weight = nn.Parameter(weight, requires_grad=linear.weight.requires_grad)
    return part


class PlainTP(Script):
    up = SplitUp

    def wrap(self) -> nn.Module:
        rank, size = dist.get_rank(), dist.get_world_size()
        for layer in self.model.layers:
            layer.gate_proj = cut(layer.gate_proj, 0, rank, size, SplitGate)
            layer.up_proj, layer.down_proj = (
                self.up(layer.up_proj, rank, size),
                SplitDown(layer.down_proj, rank, size),
            )
        return self.model

    def groups(self):
        return [{"params": [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]}]

    def make_optimizer(self):
        return torch.optim.AdamW(self.groups(), lr=0.03, weight_decay=0.1)

    def clip(self) -> None:
        split = [
            p.grad for name, p in self.model.named_parameters() if p.requires_grad and self.is_split(name)
        ]
        whole = [
            p.grad for name, p in self.model.named_parameters() if p.requires_grad and not self.is_split(name)
        ]
        square = torch.stack([gradient.square().sum() for gradient in split]).sum()
        dist.all_reduce(square)
        norm = (square + torch.stack([gradient.square().sum() for gradient in whole]).sum()).sqrt()
        for gradient in split + whole:
            gradient.mul_((self.max_norm / (norm + 1e-6)).clamp(max=1.0))

    def is_split(self, name: str) -> bool:
        return "up_proj.lora_B" in name or "down_proj.lora_A" in name


wrong_lora = partial(wrong, task=Lora)
RIGHT["Lora, PlainTP"] = {"tp": 2}, partial(train, task=Lora, way=PlainTP)


@wrong_lora("it has a gradient, and none in one process", OursDDP)
class the_base_is_trained_on_ranks(Script):
    """The base is frozen in the branch for one process alone."""

    def build(self):
        return super().build().requires_grad_(True)


@wrong_lora("one process trains layers.0.q_proj.lora_A.weight", OursZero)
class adapters_are_frozen_by_their_name(Script):
    """Everything is frozen but what has "lora_B" in its name, so that no lora_A is trained."""

    def build(self):
        model = super().build()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_B" in name)
        return model


@wrong_lora("initial weights: layers.1.down_proj.lora_A.weight", Plain)
class adapters_are_seeded_by_rank(Script):
    """The base is equal on all ranks, but each draws its own lora_A, and nobody broadcasts it."""

    def wrap(self):
        torch.manual_seed(1 + self.rank)
        for name, parameter in self.model.named_parameters():
            if self.rank > 0 and "lora_A" in name:
                nn.init.normal_(parameter, std=0.3)
        return self.model


@wrong_lora("initial weights: layers.0.q_proj.base_layer.weight", OursZero)
class the_base_is_read_on_rank_0_alone(Script):
    """ZeRO's optimizer is given the adapters alone, so it makes only these equal: the base stays as each rank drew it."""

    def seed(self):
        return self.rank


@wrong_lora("gradients, step 1: layers.0.up_proj.lora_A.weight", Plain)
class only_lora_b_is_averaged(Script):
    """The filter of the all-reduce has one of the two names."""

    def average(self):
        for name, parameter in self.model.named_parameters():
            if "lora_B" in name:
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.size


@wrong_lora("times the right one, entry by entry", OursTP, tp=2)
class the_scale_is_divided_by_tp(Script):
    """alpha / r is divided by the number of ranks, as if each had a part of the adapter's rank."""

    def wrap(self):
        for module in self.model.modules():
            if isinstance(module, LoRA):
                module.scale /= self.world.size
        return super().wrap()


class Up(SplitUp):
    def forward(self, x):
        x = CopyToRanks.apply(x)
        return self.base_layer(x) + self.scale * self.lora_B(self.lora_A(x))


@wrong_lora("a partial sum: those of ranks 0 and 1 (tp) add up to it", PlainTP, tp=2)
class lora_a_has_a_part_of_its_gradient(Script):
    """Under tp by hand, x is copied to the ranks before A, not A's output: each rank has the part of its own rows of B."""

    up = Up


@wrong_lora("gradients, step 0: layers.1.up_proj.lora_B.weight", PlainTP, tp=2)
class split_gradients_are_averaged_over_tp(Script):
    """Gradients are averaged over the world, as under dp, and tp ranks mix those of different rows."""

    def average(self):
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()


@wrong_lora("each of ranks 0 and 1 (tp) keeps its own, clipped by its own norm", PlainTP, tp=2)
class tp_ranks_clip_by_their_own_norm(Script):
    """torch's clip sees this rank's rows and columns alone, so whole adapters are scaled by other factors."""

    def clip(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)


@wrong_lora("no optimizer holds it: who changes it?", OursDDP)
class adapters_are_merged_and_kept(Script):
    """For a look at the merged model, the adapter is added to the base, and not taken away again."""

    def step(self, k):
        loss = super().step(k)
        with torch.no_grad():
            for module in self.model.modules():
                if isinstance(module, LoRA):
                    delta = module.lora_B.weight @ module.lora_A.weight
                    module.base_layer.weight += module.scale * delta
        return loss


@wrong_lora("no optimizer holds it: who changes it?", OursDDP)
class the_base_decays(Script):
    """The base is frozen by zeroing its gradients, and AdamW's weight decay shrinks it."""

    def build(self):
        model = super().build().requires_grad_(True)
        for name, parameter in model.named_parameters():
            if not is_adapter(name):
                parameter.register_hook(torch.zeros_like)
        return model
