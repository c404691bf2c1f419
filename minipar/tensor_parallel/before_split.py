"""Checks before `tensor_parallel` changes anything: of options, of layers, and that all ranks agree."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from minipar.comm import Comm
from minipar.comm.agreement import require_equal
from minipar.config.mesh_rules import check_tensor_parallel
from minipar.model.transformer import Transformer
from minipar.support.errors import one_of
from minipar.tensor_parallel.by_plan import Plan
from minipar.tensor_parallel.plan_checks import described


def checked(
    model: nn.Module, comm: Comm, plan: Plan | str | None, known: Sequence[type[nn.Module]],
    sequence_parallel: bool, chunked: bool, pad_vocab: bool,
) -> dict[str, nn.Parameter]:  # fmt: skip
    """Return the parameters by name. Raises ValueError if the model cannot be split so, or ranks differ in it.

    known  the types of layers of a block that can be split
    """
    if plan is not None:
        if sequence_parallel or chunked or pad_vocab:
            raise ValueError(
                "sequence_parallel, chunked and pad_vocab are for minipar's Transformer; leave them out"
            )
        require_not_wrapped(model)
        return _same_on_every_rank(model, comm, {"plan": plan} if isinstance(plan, str) else plan)
    if not isinstance(model, Transformer):
        raise ValueError(
            f"a {type(model).__name__} is split by a plan of its modules; use plan={{...}}, see by_plan.py"
        )
    if chunked and not sequence_parallel:
        raise ValueError(
            "chunked=True needs sequence_parallel=True: it is its gathers that are cut in pieces"
        )
    check_tensor_parallel(model.config, comm.size, pad_vocab)
    require_not_wrapped(model)
    _require_known_layers(model, known)
    before = _same_on_every_rank(model, comm, {"config": model.config})
    _warn_if_padded(model.config.vocab_size, comm)
    return before


def _warn_if_padded(vocab_size: int, comm: Comm) -> None:
    if vocab_size % comm.size and comm.rank == 0:
        padded = -(-vocab_size // comm.size) * comm.size
        warnings.warn(
            f"vocab_size={vocab_size} is cut over tp={comm.size} as if padded to {padded}", stacklevel=4
        )


def _require_known_layers(model: Transformer, known: Sequence[type[nn.Module]]) -> None:
    for number, block in model.layers.items():
        for name, layer in block.named_children():
            if type(layer) not in known:
                kinds = one_of(kind.__name__ for kind in known)
                what = f"layers.{number}.{name} is a {type(layer).__name__}"
                raise ValueError(f"{what}, for which there is no cut; use {kinds}")


def _same_on_every_rank(model: nn.Module, comm: Comm, how: Mapping[str, object]) -> dict[str, nn.Parameter]:
    """Return the parameters by name. Raises ValueError where ranks differ in values or in how to cut the model."""
    before = dict(model.named_parameters())
    entries = {**{f"the cut of {name}": repr(cut) for name, cut in how.items()}, **before}
    said = {name: described(x) if isinstance(x, Tensor) else x for name, x in entries.items()}
    require_equal(
        comm, "models", said, "give all tp ranks the same plan and the same weights, as one seed makes them"
    )
    return before


def require_not_wrapped(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        placement = getattr(parameter, "placement", None)
        if placement is not None and placement.is_part and placement.flat is None and not placement.expert:
            raise ValueError(f"{name} is split already; split each model once, with one plan for all of it")
        if placement is not None and (placement.flat is not None or "dp" in placement.replicated):
            raise ValueError(
                f"{name} is in data parallelism already; cut over tp first, then wrap what is left of it"
            )
