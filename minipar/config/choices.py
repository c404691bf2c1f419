"""The fields of TrainConfig whose value is the name of a choice. Extras add choices to minipar's own, which are here.

A field's value is a name; `config.options[field]` holds the options of the choice with that name, if it has any.
Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minipar.config.mesh_rules import check_tensor_parallel
from minipar.schedules.registry import SCHEDULES
from minipar.support.errors import require_divides
from minipar.support.options import option
from minipar.support.registry import Choice, Kind


class Averaging(Choice):
    """A way to average gradients over dp x cp; minipar's own choice averages them uncompressed.

    `load` returns a subclass of `minipar.train.averaging.Averager`, or that class itself.

    steps_locally  True if replicas take local steps, so that their weights differ until they next synchronise
    reference      the module that compares a lossy run with one process, for verify.py; "": there is none
    begins_anew    True if a run may resume with it from a checkpoint of a run with compress=none
    kept           the options and settings that a resumed run cannot change, since the stored state belongs to them
    """

    steps_locally = False
    reference = ""
    begins_anew = False
    kept: tuple[str, ...] = ()

    def exact_steps(self, config: Any) -> int:
        """Return how many steps from the start give the same results as one process, up to rounding."""
        steps: int = config.steps
        return steps

    def require_resumable(self, config: Any, stored: dict[str, Any], of: str) -> None:
        """Raise ValueError if this run cannot use the averaging state of a checkpoint with the settings `stored`."""
        name, before = config.compress, stored.get("compress", "none")
        if name != before and not (self.begins_anew and before == "none"):
            raise ValueError(
                f"compress={name}, but {of} with compress={before}, whose state is of another kind; use that"
            )
        if before == "none":
            return
        own, then = config.options.get("compress"), stored["options"].get("compress", {})
        for kept in self.kept:
            if hasattr(own, kept):  # a checkpoint from before there was this option: its default
                what, value = f"compress.{kept}", getattr(own, kept)
                stored_value = then.get(kept, getattr(type(own), kept))
            else:
                what, value, stored_value = kept, getattr(config, kept), stored.get(kept)
            if value != stored_value:
                raise ValueError(
                    f"{what}={value}, but {of} with {what}={stored_value}, and the state of compress={before} belongs to "
                    "that; use it"
                )


class TensorLayout(Choice):
    """A way for tp to cut matrices. `load` returns a function (stage, tp, config) that cuts a stage's matrices in place."""

    def ranks_of_heads(self, config: Any) -> int:
        """Return the number of tp ranks over which a sample's heads are split."""
        tp: int = config.tp
        return tp

    def mesh_suffix(self, config: Any) -> str:
        """Return the text that the layout adds to a mesh's name."""
        return "" if config.tp_layout == "1d" else f"-{config.tp_layout}"


class OneDim(TensorLayout):
    implementation = "minipar.tensor_parallel.split_model:cut_stage"

    def check(self, config: Any) -> None:
        check_tensor_parallel(config.model, config.tp, config.pad_vocab)


@dataclass(frozen=True)
class NodeOptions:
    """The options of the all-to-all: one level, or two."""

    node_size: int | None = option(
        None,
        "send tokens in two levels, first inside nodes of this many ep ranks, then across; none: one level",
    )


class Dispatch(Choice):
    """A way to send tokens to their experts. `load` returns a function (moe, ep, options) that installs it in `moe`."""

    unpriced: str | None = "node_size"

    def check_options(self, options: Any, ep: int) -> None:
        """Raise ValueError if the options do not fit each other, or do not fit `ep` ranks."""

    def end_step(self, config: Any, state: Any, step: int) -> None:
        """Run on every rank after a step's update; `state` is the run's RankState. A dispatch may move experts here."""

    def check(self, config: Any) -> None:
        node_size = getattr(config.options.get("dispatch"), "node_size", None)
        given = config.dispatch != "all-to-all" or node_size is not None
        if given and not config.model.num_experts:
            name = (
                f"dispatch={config.dispatch}" if config.dispatch != "all-to-all" else f"node_size={node_size}"
            )
            raise ValueError(
                f"{name} brings tokens to experts, and num_experts=0: the model has none; leave it out"
            )
        if node_size is not None:
            require_divides("dispatch.node_size", node_size, "ep", config.ep)
        self.check_options(config.options["dispatch"], config.ep)


ALGORITHMS: Kind[Choice] = Kind(
    "algorithm",
    {
        "auto": Choice(help="the fastest for the vector's size"),
        "ring": Choice(help="p - 1 messages to the right neighbour, fewest bytes"),
        "halving_doubling": Choice(help="log p steps, fewest bytes"),
        "doubling": Choice(help="log p steps, each with the whole vector"),
        "tree": Choice(help="a binomial tree"),
        "hierarchical": Choice(help="inside nodes first, then across them"),
        "native": Choice(help="torch's own"),
    },
)
OPTIMIZERS: Kind[Choice] = Kind("optimizer", {"adamw": Choice("minipar.train.optim:ADAMW", "AdamW")})
AVERAGINGS: Kind[Averaging] = Kind(
    "compress", {"none": Averaging("minipar.train.averaging:Averager", "full gradients")}
)
MEMORIES: Kind[Choice] = Kind(
    "offload", {"none": Choice("minipar.data_parallel.memory:ON_DEVICE", "on the device")}
)
TENSOR_LAYOUTS: Kind[TensorLayout] = Kind("tp_layout", {"1d": OneDim(help="along one dim")})
DISPATCHES: Kind[Dispatch] = Kind(
    "dispatch", {"all-to-all": Dispatch("minipar.expert.dispatch:install", "in one all-to-all", NodeOptions)}
)
PRODUCTS: Kind[Choice] = Kind(
    "products", {"plain": Choice("minipar.model.products:keep", "of numbers as they are")}
)
MEMBERSHIPS: Kind[Choice] = Kind(
    "membership", {"fixed": Choice("minipar.train.trainer:train_on_given_ranks", "the ranks it starts with")}
)

# Every `Kind` of choice, by the field of TrainConfig that it belongs to.
CHOSEN: dict[str, Kind[Any]] = {
    kind.name: kind
    for kind in (
        SCHEDULES, ALGORITHMS, OPTIMIZERS, AVERAGINGS, MEMORIES, TENSOR_LAYOUTS, DISPATCHES, PRODUCTS, MEMBERSHIPS,
    )
}  # fmt: skip
