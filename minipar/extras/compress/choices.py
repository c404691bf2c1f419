"""The methods of `--compress`: what each averages, its options, and the configurations it refuses. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from minipar.config.choices import Averaging
from minipar.config.rules import refuse
from minipar.support.errors import divisors, one_of, require_divides
from minipar.support.options import option

WARMUP = "number of first steps without compression"
NODE_SIZE = "compress only between nodes of this many dp x cp ranks; none: between all ranks"
EVERY = "number of local steps after which the replicas synchronise"


@dataclass(frozen=True)
class CodecOptions:
    """The options of a method that encodes gradients."""

    warmup: int = option(0, WARMUP)
    node_size: int | None = option(None, NODE_SIZE)
    feedback: bool = option(
        True,
        "add what was not sent to the next step's gradients, for 4 bytes a parameter on every rank; no-feedback forgets it",
    )


@dataclass(frozen=True)
class TopKOptions(CodecOptions):
    """The options of top-k, which sends only the largest gradients."""

    fraction: float = option(0.01, "fraction of the gradients that are sent, the largest ones")


@dataclass(frozen=True)
class TagcOptions(TopKOptions):
    """The options of TAGC, which sends only the largest gradients of feed-forward layers."""

    sketch: float = option(
        0.0,
        "floats of a sketch for each gradient, in which ranks' gradients are added on the way; 0: values and indices",
    )
    threshold: bool = option(
        False,
        "with a sketch: send all above the largest of 1, 2, 5, 10, ... that keeps `fraction`; no-threshold: exactly these",
    )


@dataclass(frozen=True)
class PowerSGDOptions:
    """The options of PowerSGD, which sends a matrix as two thin factors."""

    rank: int = option(4, "rank of the factors")
    warmup: int = option(0, WARMUP)


@dataclass(frozen=True)
class MomentumOptions:
    """The options of a method that sends the signs of a momentum."""

    warmup: int = option(30, WARMUP)
    node_size: int | None = option(None, NODE_SIZE)


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
    reference = "minipar.extras.compress.lossy_reference"

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
        self.kept = tuple(name for name in ("node_size", "rank", "feedback") if hasattr(options, name))
        if options is PowerSGDOptions:
            self.kept += ("tp",)

    def check(self, config: Any) -> None:
        own, model, of = config.options["compress"], config.model, f"compress={config.compress}"
        gradient = self.averages == "gradient"
        zero, cut = (
            f"zero={config.zero}",
            gradient and config.zero > 1,
        )  # the mean is scattered over the ranks
        node_size, axis = getattr(own, "node_size", None), "cp" if config.cp > 1 else "ep"
        layers = "tp" if config.tp > 1 else "ep"
        _check_options(own, least=1 if self.averages == "momentum" else 0)
        refuse("", {
            f"{of} is a form of {self.replaces}, and optimizer={config.optimizer}; use {self.replaces}": (
                self.replaces and config.optimizer != self.replaces
            ),
            f"{of} never encodes nan or inf: it stops there, and dtype={config.dtype}, on_nan={config.on_nan} would go "
            "on; use bfloat16 or float32, and on_nan=stop": config.dtype == "float16" or config.on_nan == "skip",
            f"{of} updates the weights themselves, and dtype={config.dtype} has masters; use float32": (
                not gradient and config.mixed_precision
            ),
            f"{of} needs whole matrices of gradients, of which {zero} leaves a rank a piece; use zero=0 or 1, or another "
            "method": cut and config.compress == "powersgd",
            f"compress.node_size={node_size} ends in an all-gather, and {zero} in a reduce-scatter; use none, or zero=1": (
                cut and node_size is not None
            ),
            f"{of} replaces the reduce-scatter, and replicate={config.replicate} adds an all-reduce between the copies of "
            "a shard; use replicate=1": cut and config.replicate > 1,
            f"{of} would round every microbatch; use reduce_every=step": cut and config.reduce_every == "microbatch",
            f"{of} needs all of the optimizer's state on every rank, which {zero} cuts; use zero=0": (
                not gradient and config.zero
            ),
            f"{of} averages each stage by itself: with pp={config.pp} the two copies of the tied embedding would drift "
            "apart; use pp=1, or untie the embeddings": not gradient and model.tie_embeddings and config.pp > 1,
            f"{of}: {axis}={getattr(config, axis)} ranks compute one sample together, and their weights would differ; use "
            f"{axis}=1": self.steps_locally and getattr(config, axis) > 1,
            f"{of} needs the norms of whole layers, which {layers}={getattr(config, layers)} cuts; use {layers}=1": (
                config.compress == "onebit-lamb" and getattr(config, layers) > 1
            ),
        })  # fmt: skip
        if node_size is not None:
            ranks = _ranks_of_a_parameter(config) // config.ep
            require_divides("compress.node_size", node_size, "the ranks of a parameter (dp*cp/ep)", ranks)
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

    def keeps_own_gradients(self, config: Any, step: int) -> bool:
        return self.averages != "gradient" and step >= self.plain_steps(config)

    # Equality -----------------------------------------------------------------------------------------------------

    def exact_steps(self, config: Any) -> int:
        if self._loses_nothing(config):
            exact = config.steps
        elif config.compress == "zero-one-adam":
            exact = 0
        else:
            exact = min(config.steps, config.options["compress"].warmup)
        return int(exact)

    def _loses_nothing(self, config: Any) -> bool:
        own = config.options["compress"]
        if isinstance(own, TopKOptions) and own.fraction == 1 and not getattr(own, "sketch", 0):
            return True
        if isinstance(own, PowerSGDOptions) and own.rank >= max(config.model.dim, config.model.num_experts):
            return True
        return self.averages == "gradient" and _ranks_of_a_parameter(config) == 1


# Of a sketch's cells, the fraction of elements that can be recovered; see sketch.py.
LOAD = 0.818


def _check_options(own: Any, least: int) -> None:
    """Raise ValueError if an option is out of range; the warm-up must have at least `least` steps."""
    for name, lowest in (("warmup", least), ("rank", 1), ("every", 1)):
        if getattr(own, name, lowest) < lowest:
            raise ValueError(f"compress.{name}={getattr(own, name)} is out of range; use {lowest} or more")
    if isinstance(own, TopKOptions) and not 0 < own.fraction <= 1:
        raise ValueError(
            f"compress.fraction={own.fraction}: k would be 0, or above n; use above 0, at most 1"
        )
    if isinstance(own, TagcOptions):
        refuse("compress.", {
            f"sketch={own.sketch} is no number of floats for each gradient; use 0 to 1, such as 0.5": (
                not 0 <= own.sketch <= 1
            ),
            "threshold keeps another number of gradients on each rank, but values and indices go in messages of one size; "
            "use no-threshold, or add compress.sketch, such as 0.5": own.threshold and not own.sketch,
            f"fraction={own.fraction} of the gradients cannot be recovered from compress.sketch={own.sketch}, not even of "
            f"one rank's: at most {LOAD * own.sketch:.3g} can; use a lower fraction, or a larger sketch": (
                own.sketch and own.fraction > LOAD * own.sketch
            ),
            f"node_size={own.node_size} sends codes between nodes, and compress.sketch adds up sketches of all ranks; use "
            "none, or sketch=0": own.sketch and own.node_size is not None,
        })  # fmt: skip


def _ranks_of_a_parameter(config: Any) -> int:
    """Return the number of ranks over which a dense gradient is averaged."""
    return int(config.dp * config.cp)


SIGN = Method("gradient", CodecOptions, "signs of gradients, and a scale per block")
INT8 = Method("gradient", CodecOptions, "gradients in 8 bits")
FP8 = Method("gradient", CodecOptions, "gradients in 8-bit floats")
TOPK = Method("gradient", TopKOptions, "the largest gradients")
TAGC = Method("gradient", TagcOptions, "the largest gradients of feed-forward layers; all of the others")
POWERSGD = Method("gradient", PowerSGDOptions, "two thin factors of a gradient")
ONEBIT_ADAM = Method("momentum", MomentumOptions, "signs of Adam's momentum", "adamw")
ZERO_ONE_ADAM = Method("momentum", ZeroOneOptions, "signs of Adam's momentum, less and less often", "adamw")
ONEBIT_LAMB = Method("momentum", MomentumOptions, "signs of LAMB's momentum", "lamb")
DILOCO = Method("weights", LocalOptions, "weights, averaged every few steps by an outer optimizer", "adamw")
