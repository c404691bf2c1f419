"""Models as users write them, drawn: frozen parts, tied and reused weights, LoRA, branches that nothing or few rows use.

A `Case` is such a model, how it is wrapped, and how it is trained; `train` runs it on ranks or in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from minipar.comm import Comm
from minipar.comm.objects import all_gather_objects
from minipar.data_parallel import DDP, FSDP, ZeroOptimizer
from minipar.mesh import Mesh, gather, placement_of
from minipar.tensor_parallel import Column, tensor_parallel
from minipar.train import clip_grad_norm_

VOCAB, DIM, HEAD_DIM = 24, 16, 4
ROWS, STEPS = 12, 2
UNUSED, ALL, SOME = "by none", "by all", "by some"


class Case(NamedTuple):
    """A model, its ranks and its training.

    layers      kinds of blocks, in order
    lora        whether attention's q and v have adapters
    frozen      patterns of parameters that are not trained; a parameter of `trained` is, all the same
    side        which rows use the side branch
    reused      whether the first block is also the last
    shared      whether the blocks' first norms are one module
    recomputed  "none", "each" block, or "all" of them in one checkpoint
    ranks       dp x tp
    wrapper     "ddp", "zero1", "zero2" or "fsdp"; None: neither, with tp alone
    options     of the wrapper
    optimizers  one for all parameters, or two, which take turns
    backwards   microbatches of a step
    sync        "each" backward reduces, the "last" alone, or a call after it ("synchronize")
    """

    layers: tuple[str, ...] = ("attention", "mlp")
    norm: str = "layer"
    tied: bool = False
    lora: bool = False
    frozen: tuple[str, ...] = ()
    trained: tuple[str, ...] = ()
    side: str = UNUSED
    reused: bool = False
    shared: bool = False
    recomputed: str = "none"
    tokens: bool = True
    dp: int = 2
    tp: int = 1
    wrapper: str | None = "ddp"
    options: tuple[tuple[str, Any], ...] = ()
    optimizers: tuple[str, ...] = ("SGD",)
    backwards: int = 1
    sync: str = "each"
    clip: bool = False
    dtype: str = "float64"

    @property
    def is_rounded(self) -> bool:
        return self.dtype != "float64"


# The model -----------------------------------------------------------------------------------------------------------


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base, self.a, self.b = base, nn.Linear(DIM, 2, bias=False), nn.Linear(2, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class Attention(nn.Module):
    def __init__(self, case: Case):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))
        if case.lora:
            self.q, self.v = LoRA(self.q), LoRA(self.v)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x)))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, case: Case):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class GatedMLP(nn.Module):
    def __init__(self, case: Case):
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(DIM, DIM),
            nn.Linear(DIM, DIM),
            nn.Linear(DIM, DIM, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


KINDS = {"attention": Attention, "mlp": MLP, "gated": GatedMLP}
NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "none": lambda dim: nn.Identity()}


class Block(nn.Module):
    def __init__(self, kind: str, case: Case):
        super().__init__()
        self.norm, self.inside = NORMS[case.norm](DIM), KINDS[kind](case)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inside(self.norm(x))


class Side(nn.Module):
    """A branch that adds to the rows of `used`, and is not run where there are none."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, used: Tensor) -> Tensor:
        return x + used[:, None, None] * torch.tanh(self.linear(x)) if used.any() else x


class Model(nn.Module):
    def __init__(self, case: Case):
        super().__init__()
        self.case = case
        self.emb = nn.Embedding(VOCAB, DIM) if case.tokens else nn.Linear(3, DIM)
        self.h = nn.ModuleList(Block(kind, case) for kind in case.layers)
        self.side, self.norm, self.head = Side(), NORMS[case.norm](DIM), nn.Linear(DIM, VOCAB, bias=False)
        if case.tied:
            self.head.weight = self.emb.weight
        if case.shared:
            for block in self.h[1:]:
                block.norm = self.h[0].norm

    def forward(self, x: Tensor, used: Tensor) -> Tensor:
        x = self.emb(x)
        if self.case.recomputed == "all":
            x = checkpoint(self.blocks, x, use_reentrant=False)
        else:
            x = self.blocks(x)
        if self.case.side != UNUSED:
            x = self.side(x, used)
        return self.head(self.norm(x))

    def blocks(self, x: Tensor) -> Tensor:
        for block in [*self.h, *self.h[: self.case.reused]]:
            x = checkpoint(block, x, use_reentrant=False) if self.case.recomputed == "each" else block(x)
        return x


def build(case: Case, dtype: torch.dtype) -> Model:
    """Build the model, whose values are those of bfloat16 if the case computes in it."""
    torch.manual_seed(0)
    model = Model(case).double()
    for name, param in model.named_parameters():
        frozen = any(fnmatchcase(name, pattern) for pattern in case.frozen)
        param.requires_grad_(not frozen or any(fnmatchcase(name, pattern) for pattern in case.trained))
        param.data += 0.1 * torch.randn_like(param)  # norms and LoRA's b are not all ones and zeros
    return (model.bfloat16() if case.is_rounded else model).to(dtype)


def dtype_of(case: Case) -> torch.dtype:
    """Return the dtype of the parameters."""
    dtypes = {"float64": torch.float64, "bfloat16": torch.bfloat16}
    return dtypes.get(case.dtype, torch.float32)


def rounded_dtype_of(case: Case) -> torch.dtype:
    """Return the dtype in which one process rounds as much as the case does."""
    return torch.float32 if case.dtype == "autocast" else torch.bfloat16


def batch(case: Case, number: int, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, the rows that use the side branch, and targets of one microbatch: `rows` of it."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(VOCAB, (ROWS, 5), generator=generator)
    features = torch.randn(ROWS, 4, 3, generator=generator).bfloat16().double()
    used = torch.arange(ROWS) % 12 == number % 3 if case.side == SOME else torch.ones(ROWS, dtype=torch.bool)
    return (tokens[:, :-1] if case.tokens else features)[rows], used[rows], tokens[rows, 1:]


# Its training ----------------------------------------------------------------------------------------------------------


class Trained(NamedTuple):
    """Losses of all backwards, gradients of the first step as they are updated with, and the last parameters."""

    losses: list[Tensor]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def plan_of(case: Case) -> dict[str, Any]:
    plan: dict[str, Any] = {}
    for kind in set(case.layers):
        if kind == "attention":
            plan |= {f"*.inside.{name}": Column(unit=HEAD_DIM) for name in "qkv"} | {"*.inside.o": "row"}
        else:
            plan |= {"*.inside.up": "column", "*.inside.down": "row"}
        if kind == "gated":
            plan["*.inside.gate"] = "column"
    if not case.tied and case.tokens:
        plan |= {"emb": "vocab", "head": "gathered"}
    return plan


UNITS: dict[str, Any] = {
    "blocks": Block,
    "blocks and embedding": (Block, nn.Embedding),
    "leaves": lambda m: not list(m.children()) and bool(list(m.parameters())),
    "everything": None,
}
KINDS_OF_OPTIMIZER = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW, "Adagrad": torch.optim.Adagrad}
OPTIONS: dict[str, dict[str, float]] = {
    "SGD": dict(lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": dict(
        lr=0.01, eps=1e-3
    ),  # with the default eps, rounding would show where the exact gradient is zero
    "Adagrad": dict(lr=0.01, eps=1e-3),
}
MAX_NORM = 0.05


def train(
    case: Case, world: Comm | None, dtype: torch.dtype = torch.float64, lose: str | None = None
) -> Trained:
    """Train on ranks as the case says, or in one process; `lose` names a parameter whose gradient the last rank loses."""
    model = build(case, dtype)
    called, updates, dp = (
        wrap(case, model, world) if world is not None else (model, in_one_process(case, model), None)
    )
    if lose is not None and world.rank == world.size - 1:
        model.get_parameter(lose).register_hook(torch.zeros_like)
    zero = [update for update in updates if isinstance(update, ZeroOptimizer)]
    reducing: list[Any] = [called] if isinstance(called, DDP | FSDP) else zero
    rows = slice(None) if dp is None else slice(dp.rank, None, dp.size)
    losses, gradients = [], {}
    for step in range(STEPS):
        for micro in range(case.backwards):
            is_last = case.sync == "last" and micro + 1 == case.backwards
            with ExitStack() as stack:
                for x in reducing if case.sync != "each" and not is_last else []:
                    stack.enter_context(x.no_sync())
                loss = loss_of(case, called, batch(case, step * case.backwards + micro, rows))
                (loss / case.backwards).backward()
            losses.append(loss.detach() if dp is None else dp.all_reduce(loss.detach(), "mean"))
        for x in reducing if case.sync == "synchronize" else []:
            x.synchronize()
        held = [x for update in zero for x in update.shards] or [
            p for p in model.parameters() if p.requires_grad
        ]
        if case.clip:
            clipped = nn.utils.clip_grad_norm_ if world is None else partial(clip_grad_norm_, comm=world)
            losses.append(clipped(held, MAX_NORM))
        if step == 0:
            gradients = whole(model, held, lambda p: p.grad, world)
        for update in updates:
            update.step()
            update.zero_grad()
    return Trained(losses, gradients, whole(model, list(model.parameters()), Tensor.detach, world))


def wrap(case: Case, model: Model, world: Comm) -> tuple[nn.Module, list[torch.optim.Optimizer], Comm]:
    """Return what to call instead of the model, its optimizers, and the ranks that have other rows."""
    dp = world
    if case.tp > 1 or case.wrapper is None:
        mesh = Mesh(world, dp=case.dp, tp=case.tp)
        tensor_parallel(model, mesh.comm("tp"), plan=plan_of(case))
        dp = mesh.comm("dp")
    options: dict[str, Any] = dict(case.options)
    if case.wrapper == "ddp":
        return (called := DDP(model, dp, **options)), in_one_process(case, called), dp
    if case.wrapper == "fsdp":
        called = FSDP(model, dp, **{**options, "units": UNITS[options["units"]]})
        return called, in_one_process(case, called), dp
    if case.wrapper in ("zero1", "zero2"):
        options["stage"] = int(case.wrapper[-1])
        return model, [ZeroOptimizer(*own, dp, **options, **more) for *own, more in parts_of(case, model)], dp
    return model, in_one_process(case, model), dp


def in_one_process(case: Case, model: nn.Module) -> list[torch.optim.Optimizer]:
    return [kind([p for _, p in named], **more) for named, kind, more in parts_of(case, model)]


def parts_of(case: Case, model: nn.Module) -> Iterator[tuple[Any, Any, dict[str, float]]]:
    """Yield (named parameters, class, its options) of each optimizer: all parameters, or matrices and the rest."""
    named = list(model.named_parameters())
    ways = [True, False] if len(case.optimizers) == 2 else [None]
    for way, name in zip(ways, case.optimizers):
        own = [(n, p) for n, p in named if way is None or ("norm" in n or "bias" in n) != way]
        if own:
            yield own, KINDS_OF_OPTIMIZER[name], OPTIONS[name]


def loss_of(case: Case, called: nn.Module, rows: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    x, used, targets = rows
    dtype = next(called.parameters()).dtype
    with torch.autocast("cpu", torch.bfloat16, enabled=case.dtype == "autocast" and dtype != torch.float64):
        logits = called(x.to(dtype) if x.is_floating_point() else x, used)
    return F.cross_entropy(logits.double().flatten(0, 1), targets.flatten())


def whole(
    model: nn.Module, held: list[Tensor], value_of: Callable[[Tensor], Any], world: Comm | None
) -> dict[str, Tensor]:
    """Return whole values by name, put together by the placements of what each rank holds; copies must be equal."""
    if world is None:
        values = {name: value_of(p) for name, p in model.named_parameters()}
        return {name: value.clone() for name, value in values.items() if value is not None}
    placed = [(placement_of(p), value_of(p)) for p in held]
    own = {place.name: (place, value.as_subclass(Tensor)) for place, value in placed if value is not None}
    parts = all_gather_objects(world, own)
    names = {name for of_rank in parts for name in of_rank}
    return {name: gather([of_rank[name] for of_rank in parts if name in of_rank]) for name in names}


# What is drawn ---------------------------------------------------------------------------------------------------------

FROZEN = ("emb.*", "h.0.*", "h.1.*", "*norm*", "head.*", "*bias", "side.*")
ADAPTED = (("*.a.*", "*.b.*"), ("*.a.*", "*.b.*", "*norm*"), ("*.a.*", "*.b.*", "head.*"))
PARTLY = (
    ("h.*",),
    ("h.1.*",),
    ("*norm*",),
    ("*bias",),
    ("head.*",),
    ("emb.*",),
)  # of a model frozen elsewhere


@st.composite
def models(draw: Any) -> dict[str, Any]:
    """Draw the fields of a Case that are the model's."""
    layers = tuple(draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3)))
    lora = "attention" in layers and draw(st.booleans())
    tokens = draw(st.sampled_from((True, True, False)))
    if lora and draw(st.booleans()):
        frozen, trained = ("*",), draw(st.sampled_from(ADAPTED))
    elif draw(st.booleans()):
        frozen, trained = ("*",), draw(st.sampled_from(PARTLY))
    else:
        frozen, trained = tuple(draw(st.lists(st.sampled_from(FROZEN), max_size=2, unique=True))), ()
    return dict(
        layers=layers, lora=lora, tokens=tokens, frozen=frozen, trained=trained,
        norm=draw(st.sampled_from(sorted(NORMS))),
        tied=tokens and draw(st.booleans()),
        side=draw(st.sampled_from((UNUSED, ALL, SOME))),
        reused=draw(st.booleans()),
        shared=draw(st.booleans()),
        recomputed=draw(st.sampled_from(("none", "none", "each", "all"))),
    )  # fmt: skip


@st.composite
def cases(draw: Any, wrapper: str | None) -> Case:
    tp = draw(st.sampled_from((1, 1, 2))) if wrapper is not None else draw(st.sampled_from((1, 2, 4)))
    dp = draw(st.integers(1, 4 // tp)) if wrapper is not None else 1
    dtype = draw(st.sampled_from(("float64", "float64", "bfloat16", "autocast")))
    options: dict[str, Any] = {}
    if wrapper == "fsdp":
        options["units"] = draw(st.sampled_from(sorted(UNITS)))
        options["shard_rest"], options["reshard_after_forward"] = draw(st.booleans()), draw(st.booleans())
        options["prefetch"] = draw(st.booleans())
        if dtype == "bfloat16" and draw(st.booleans()):
            dtype, options["compute_dtype"] = "compute", torch.bfloat16
    elif wrapper is not None:
        options["bucket_mb"] = draw(st.sampled_from((25.0, 0.001)))
        if wrapper != "ddp" and dtype == "bfloat16" and draw(st.booleans()):
            options["master_dtype"] = torch.float32
    case = Case(
        **draw(models()), dp=dp, tp=tp, wrapper=wrapper, options=tuple(options.items()), dtype=dtype,
        optimizers=tuple(draw(st.lists(st.sampled_from(sorted(OPTIONS)), min_size=1, max_size=2))),
        backwards=draw(st.integers(1, 3)),
        sync=draw(st.sampled_from(("each", "last", "synchronize"))),
        clip=draw(st.booleans()),
    )  # fmt: skip
    several_reducers = wrapper in ("zero1", "zero2") and len(case.optimizers) == 2
    if case.side == SOME and (options.get("units") == "leaves" or several_reducers):
        case = case._replace(
            side=ALL
        )  # ranks that run other units, or reduce in another order, are a deadlock
    assume(_is_trained(case))
    return case


def _is_trained(case: Case) -> bool:
    """Return whether a parameter is trained that every row uses."""
    named = build(case, torch.float64).named_parameters()
    return any(p.requires_grad for name, p in named if not name.startswith("side."))


def refusal_of(case: Case) -> str | None:
    """Return what the refusal names, where the case is one that cannot be right."""
    return "inside.q" if (case.tp > 1 or case.wrapper is None) and case.lora else None
