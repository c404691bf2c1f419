"""The methods of `--compress`: what each averages, its options, and the configurations it refuses. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from minipar.config.choices import Averaging
from minipar.config.rules import Rule, check, view_of
from minipar.support.errors import divisors, one_of
from minipar.support.options import option

WARMUP = "number of first steps without compression"
EVERY = "number of local steps after which the replicas synchronise"


@dataclass(frozen=True)
class CodecOptions:
    """The options of a method that encodes gradients."""

    warmup: int = option(0, WARMUP)


@dataclass(frozen=True)
class TopKOptions(CodecOptions):
    """The options of top-k, which sends only the largest gradients."""

    fraction: float = option(0.01, "fraction of the gradients that are sent, the largest ones")


@dataclass(frozen=True)
class PowerSGDOptions:
    """The options of PowerSGD, which sends a matrix as two thin factors."""

    rank: int = option(4, "rank of the factors")
    warmup: int = option(0, WARMUP)


@dataclass(frozen=True)
class MomentumOptions:
    """The options of a method that sends the signs of a momentum."""

    warmup: int = option(30, WARMUP)


@dataclass(frozen=True)
class ZeroOneOptions(MomentumOptions):
    """The options of 0/1 Adam, which sends the signs of a momentum less and less often."""

    every: int = option(10, EVERY)


@dataclass(frozen=True)
class LocalOptions:
    """The options of a method that averages weights every few steps."""

    every: int = option(10, EVERY)
    warmup: int = option(0, WARMUP)


class Method(Averaging):
    """A method of `--compress`.

    averages   "gradient": the all-reduce of gradients is compressed, with any optimizer. "momentum": the method's own
               optimizer, which averages momenta, replaces adamw or lamb. "weights": weights are averaged once in `every`
               local steps
    replaces   the value of `optimizer` that the method requires; "" for any
    """

    implementation = "minipar.extras.compress.run_state:Compressed"

    def __init__(
        self,
        averages: Literal["gradient", "momentum", "weights"],
        options: type,
        help: str,
        replaces: str = "",
    ):
        super().__init__(help=help, options=options)
        self.averages, self.replaces = averages, replaces
        self.steps_locally = hasattr(options, "every")
        self.begins_anew = averages == "gradient"
        self.reference = "minipar.extras.compress.lossy_reference" if self.begins_anew else ""
        self.kept = ("rank", "tp") if options is PowerSGDOptions else ()

    def check(self, config: Any) -> None:
        own, of = config.options["compress"], f"compress={config.compress}"
        least = int(self.averages == "momentum")
        view = view_of(config, method=self, least=least, mixed_precision=config.mixed_precision, **vars(own))
        check(view, RULES)
        for name in ("steps", "checkpoint_every"):
            if self.steps_locally and (value := getattr(config, name)) % own.every:
                raise ValueError(
                    f"{name}={value} is no multiple of compress.every={own.every}: the replicas of {of} would still differ "
                    f"then; use one, or compress.every={one_of([d for d in divisors(value) if d > 1] or [1])}"
                )

    def plain_steps(self, config: Any) -> int:
        """Return the number of first steps whose gradients the trainer averages uncompressed.

        It is 0 for 0/1 Adam, which handles its warm-up itself.
        """
        return 0 if config.compress == "zero-one-adam" else int(config.options["compress"].warmup)

    # Equality -----------------------------------------------------------------------------------------------------

    def exact_steps(self, config: Any) -> int:
        steps = config.steps if self._loses_nothing(config) else min(config.steps, self.plain_steps(config))
        return int(steps)

    def _loses_nothing(self, config: Any) -> bool:
        own, widest = config.options["compress"], max(config.model.dim, config.model.num_experts)
        alone = self.averages == "gradient" and config.dp * config.cp == 1
        return bool(alone or getattr(own, "fraction", 0) == 1 or getattr(own, "rank", 0) >= widest)


def _at_least(name: str, lowest: Callable[[Any], int]) -> Rule:
    return Rule(
        lambda v: getattr(v, name, lowest(v)) < lowest(v),
        lambda v: f"compress.{name}={getattr(v, name)} is out of range",
        lambda v: f"; use {lowest(v)} or more",
    )


def _has_own_optimizer(v: Any) -> bool:
    return bool(v.method.averages != "gradient")


def _alone(axis: str, needed: Callable[[Any], object], words: str) -> Rule:
    """Return the rule that an axis has one rank where that is needed. `words` say why, with the axis as "AXIS"."""
    return Rule(
        lambda v: needed(v) and getattr(v, axis) > 1,
        words.replace("AXIS", f"{axis}={{{axis}}}"),
        f"; use {axis}=1",
    )


SAMPLE = "compress={compress}: AXIS ranks compute one sample together, and their weights would differ"
LAYER = "compress={compress} needs the norms of whole layers, which AXIS cuts"


# What the options of a method, and then a run with it, must meet.
RULES = (
    _at_least("warmup", lambda v: v.least),
    _at_least("rank", lambda v: 1),
    _at_least("every", lambda v: 1),
    Rule(
        lambda v: not 0 < getattr(v, "fraction", 1) <= 1,
        "compress.fraction={fraction}: k would be 0, or above n",
        "; use above 0, at most 1",
    ),
    Rule(
        lambda v: v.method.replaces and v.optimizer != v.method.replaces,
        lambda v: f"compress={v.compress} is a form of {v.method.replaces}, and optimizer={v.optimizer}",
        lambda v: f"; use {v.method.replaces}",
    ),
    Rule(
        lambda v: v.dtype == "float16" or v.on_nan == "skip",
        "compress={compress} never encodes nan or inf: it stops there, and dtype={dtype}, on_nan={on_nan} would go on",
        "; use bfloat16 or float32, and on_nan=stop",
    ),
    Rule(
        lambda v: _has_own_optimizer(v) and v.mixed_precision,
        "compress={compress} updates the weights themselves, and dtype={dtype} has masters",
        "; use float32",
    ),
    Rule(
        lambda v: v.replicate > 1,
        "compress={compress} replaces the reduce-scatter, and replicate={replicate} adds an all-reduce between the copies "
        "of a shard",
        "; use replicate=1",
    ),
    Rule(
        lambda v: v.zero > 1 and v.reduce_every == "microbatch",
        "compress={compress} would round every microbatch",
        "; use reduce_every=step",
    ),
    Rule(
        lambda v: _has_own_optimizer(v) and v.zero,
        "compress={compress} needs all of the optimizer's state on every rank, which zero={zero} cuts",
        "; use zero=0",
    ),
    Rule(
        lambda v: _has_own_optimizer(v) and v.tie_embeddings and v.pp > 1,
        "compress={compress} averages each stage by itself: with pp={pp} the two copies of the tied embedding would drift "
        "apart",
        "; use pp=1, or untie the embeddings",
    ),
    *(_alone(axis, lambda v: v.method.steps_locally, SAMPLE) for axis in ("cp", "ep")),
    *(_alone(axis, lambda v: v.compress == "onebit-lamb", LAYER) for axis in ("tp", "ep")),
)


SIGN = Method("gradient", CodecOptions, "signs of gradients, and a scale per block")
INT8 = Method("gradient", CodecOptions, "gradients in 8 bits")
FP8 = Method("gradient", CodecOptions, "gradients in 8-bit floats")
TOPK = Method("gradient", TopKOptions, "the largest gradients")
TAGC = Method("gradient", TopKOptions, "the largest gradients of feed-forward layers; all of the others")
POWERSGD = Method("gradient", PowerSGDOptions, "two thin factors of a gradient")
ONEBIT_ADAM = Method("momentum", MomentumOptions, "signs of Adam's momentum", "adamw")
ZERO_ONE_ADAM = Method("momentum", ZeroOneOptions, "signs of Adam's momentum, less and less often", "adamw")
ONEBIT_LAMB = Method("momentum", MomentumOptions, "signs of LAMB's momentum", "lamb")
DILOCO = Method("weights", LocalOptions, "weights, averaged every few steps by an outer optimizer", "adamw")
