"""Cheap messages in a run's configuration: one table of methods, what each serves and uses, and what is refused.

Imports no torch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from minipar.errors import divisors, one_of, require_divides
from minipar.schedules.registry import TWO_DIRECTIONS

MethodName = Literal[
    "none", "sign", "int8", "fp8", "topk", "powersgd", "tagc", "onebit-adam", "zero-one-adam", "onebit-lamb", "local-sgd",
    "diloco",
]  # fmt: skip


class Method(NamedTuple):
    """A method.

    averages   gradient: in place of the all-reduce, with any optimizer. momentum: by an optimizer of its own, in place of
               adamw or lamb. weights: rarely, after steps alone
    uses       its options, besides compress_warmup
    replaces   the value of `optimizer` that it needs; "" for any
    warmup     the default of compress_warmup
    """

    averages: Literal["gradient", "momentum", "weights"]
    uses: tuple[str, ...] = ()
    replaces: str = ""
    warmup: int = 0


NODES = ("compress_node_size",)
METHODS = {
    "sign": Method("gradient", NODES),
    "int8": Method("gradient", NODES),
    "fp8": Method("gradient", NODES),
    "topk": Method("gradient", ("compress_fraction", *NODES)),
    "powersgd": Method("gradient", ("compress_rank",)),
    "tagc": Method("gradient", ("compress_fraction", *NODES)),
    "onebit-adam": Method("momentum", NODES, "adamw", 30),
    "zero-one-adam": Method("momentum", ("compress_every", *NODES), "adamw", 30),
    "onebit-lamb": Method("momentum", NODES, "lamb", 30),
    "local-sgd": Method("weights", ("compress_every",), "adamw"),
    "diloco": Method("weights", ("compress_every",), "adamw"),
}
assert ("none", *METHODS) == get_args(MethodName)
DEFAULTS = {"compress_rank": 4, "compress_fraction": 0.01, "compress_every": 10, "compress_node_size": None}


def walks_alone(config) -> bool:
    """Whether the replicas' weights differ between agreements."""
    return "compress_every" in METHODS[config.compress].uses


def warmup_of(config) -> int:
    """The first steps whose gradients are averaged as they are."""
    return METHODS[config.compress].warmup if config.compress_warmup is None else config.compress_warmup


def check_compression(config) -> None:
    """Raise ValueError where the method, its options, the mesh and the rest of a TrainConfig do not fit each other."""
    _check_options(config)
    if config.compress == "none":
        return
    method = METHODS[config.compress]
    _check_optimizer(config, method)
    _check_mesh(config, method)
    if walks_alone(config):
        for name in ("steps", "checkpoint_every"):
            if (value := getattr(config, name)) % config.compress_every:
                raise ValueError(
                    f"{name}={value} is no multiple of compress_every={config.compress_every}: the replicas of "
                    f"compress={config.compress} would still differ then; use one, or compress_every="
                    f"{one_of([d for d in divisors(value) if d > 1] or [1])}"
                )


def _check_options(config) -> None:
    used = METHODS[config.compress].uses if config.compress != "none" else ()
    for name, default in DEFAULTS.items():
        if getattr(config, name) != default and name not in used:
            users = one_of([m for m, method in METHODS.items() if name in method.uses])
            raise ValueError(
                f"{name}={getattr(config, name)} is for compress={users}, and compress={config.compress}; leave it out"
            )
    if config.compress == "none" and config.compress_warmup is not None:
        raise ValueError(
            f"compress_warmup={config.compress_warmup}, and compress=none; leave it out, or name a method"
        )
    if config.compress_warmup is not None:
        least = 1 if config.compress != "none" and METHODS[config.compress].averages == "momentum" else 0
        if config.compress_warmup < least:
            raise ValueError(f"compress_warmup={config.compress_warmup} is out of range; use {least} or more")
    if config.compress_rank < 1 or config.compress_every < 1:
        name = "compress_rank" if config.compress_rank < 1 else "compress_every"
        raise ValueError(f"{name}={getattr(config, name)} is out of range; use 1 or more")
    if not 0 < config.compress_fraction <= 1:
        raise ValueError(
            f"compress_fraction={config.compress_fraction}: k would be 0, or above n; use above 0, at most 1"
        )


def _check_optimizer(config, method: Method) -> None:
    of = f"compress={config.compress}"
    if method.replaces and config.optimizer != method.replaces:
        raise ValueError(
            f"{of} is a form of {method.replaces}, and optimizer={config.optimizer}; use {method.replaces}"
        )
    if config.dtype == "float16" or config.on_nan == "skip":
        raise ValueError(
            f"{of} never encodes nan or inf: it stops there, and dtype={config.dtype}, on_nan={config.on_nan} would go on; "
            "use bfloat16 or float32, and on_nan=stop"
        )
    if method.averages != "gradient" and config.mixed_precision:
        raise ValueError(
            f"{of} updates the weights themselves, and dtype={config.dtype} has masters; use float32"
        )
    if method.averages == "gradient" and config.zero > 1:
        raise ValueError(
            f"{of} keeps a residual of every gradient on every rank, which zero={config.zero} exists to avoid; use 0 or 1"
        )
    if method.averages != "gradient" and config.zero:
        raise ValueError(
            f"{of} needs all of the optimizer's state on every rank, which zero={config.zero} cuts; use zero=0"
        )


def _check_mesh(config, method: Method) -> None:
    of = f"compress={config.compress}"
    if method.averages != "gradient" and config.model.tie_embeddings and config.pp > 1:
        raise ValueError(
            f"{of} averages each stage by itself: with pp={config.pp} the two copies of the tied embedding would drift "
            "apart; use pp=1, or untie the embeddings"
        )
    if walks_alone(config) and (config.cp > 1 or config.ep > 1):
        axis = "cp" if config.cp > 1 else "ep"
        raise ValueError(
            f"{of}: {axis}={getattr(config, axis)} ranks compute one sample together, and their weights would differ; "
            f"use {axis}=1"
        )
    if walks_alone(config) and _two_directions(config):
        raise ValueError(
            f"{of}: the two copies of the model in schedule={config.schedule!r} compute one batch together, and their "
            "weights would differ; use a schedule with one copy, such as dualpipe-v"
        )
    if config.compress == "onebit-lamb" and (config.tp > 1 or config.ep > 1):
        axis = "tp" if config.tp > 1 else "ep"
        raise ValueError(
            f"{of} needs the norms of whole layers, which {axis}={getattr(config, axis)} cuts; use {axis}=1"
        )
    if config.compress_node_size is not None:
        ranks, what = _ranks_of_a_parameter(config) // config.ep, f"dp*cp{'*2' * _two_directions(config)}/ep"
        require_divides(
            "compress_node_size", config.compress_node_size, f"the ranks of a parameter ({what})", ranks
        )


def _two_directions(config) -> bool:
    return config.schedule in TWO_DIRECTIONS


def _ranks_of_a_parameter(config) -> int:
    """The ranks whose gradients of a parameter that is no expert's are averaged: of both copies of the model, if any."""
    return config.dp * config.cp * (2 if _two_directions(config) else 1)


# Equality -----------------------------------------------------------------------------------------------------------


def exact_steps(config) -> int:
    """The first steps whose numbers are those of one process to rounding: all, or the warm-up, or none."""
    if config.compress == "none" or _loses_nothing(config):
        return config.steps
    return 0 if config.compress == "zero-one-adam" else min(config.steps, warmup_of(config))


def _loses_nothing(config) -> bool:
    if config.compress in ("topk", "tagc") and config.compress_fraction == 1:
        return True
    if config.compress == "powersgd" and config.compress_rank >= max(
        config.model.dim, config.model.num_experts
    ):
        return True
    return _ranks_of_a_parameter(config) == 1 and (
        METHODS[config.compress].averages == "gradient" or config.compress == "local-sgd"
    )


def require_exact(config) -> None:
    """Raise ValueError, with what would work, where a lossy method has no numbers to compare with one process's."""
    if exact_steps(config) < config.steps:
        full = {"topk": "compress_fraction=1", "tagc": "compress_fraction=1"}
        full |= {"powersgd": f"compress_rank={config.model.dim} (full rank)"}
        works = [full[config.compress]] if config.compress in full else []
        if METHODS[config.compress].averages == "gradient" or config.compress == "local-sgd":
            works.append("dp=1 and cp=1" + ", in one direction" * _two_directions(config))
        if config.compress != "zero-one-adam":
            works.append(f"compress_warmup={config.steps}, the uncompressed steps")
        ways = f"what can be compared is {one_of(works)}" if works else "it has no uncompressed step"
        raise ValueError(f"compress={config.compress} is lossy: its numbers are not one process's; {ways}")


# Resuming -----------------------------------------------------------------------------------------------------------


def require_resumable(config, stored: dict, of: str) -> None:
    """Raise ValueError where the compression's state in a checkpoint, with these settings, has no meaning in this run."""
    before = stored.get("compress", "none")
    begins = (
        before == "none" and config.compress != "none" and METHODS[config.compress].averages == "gradient"
    )
    if config.compress != before and not begins:
        raise ValueError(
            f"compress={config.compress}, but {of} with compress={before}, whose state is of another kind; use that"
        )
    fixed = () if before == "none" else NODES + (("compress_rank", "tp") if before == "powersgd" else ())
    for name in fixed:
        if getattr(config, name) != stored.get(name, DEFAULTS.get(name)):
            raise ValueError(
                f"{name}={getattr(config, name)}, but {of} with {name}={stored.get(name)}, and the residuals and factors "
                f"of compress={before} belong to that; use it"
            )
