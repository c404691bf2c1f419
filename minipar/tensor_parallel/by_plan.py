"""Tensor parallelism of any model, by a plan: which of its modules are split, and how.

    plan = {"*.q_proj": Column(unit=head_dim), "*.k_proj": ..., "*.v_proj": ..., "*.o_proj": "row",
            "*.gate_proj": "column", "*.up_proj": "column", "*.down_proj": "row"}

    "column"    the output features of a linear layer: each rank computes its own     one all-reduce backward
    "row"       the input features of a linear layer, computed by column layers       one all-reduce forward
    "gathered"  as "column", for a head: the output is gathered                       also one all-gather forward
    "vocab"     the rows of an embedding                                              one all-reduce forward
    "summed"    parameters, or a module's, used between a column and a row layer      one all-reduce backward each
    Divided     attributes of a module that are divided by tp, such as the sizes into which it splits its input

A module that the plan does not name is not split, and computes the same on every rank. Between a column and a row layer a
model must act on each feature, or each head, separately, where a parameter such as the weight of a norm of each head is
"summed"; and it must ask its tensors, not its configuration, how many heads there are. `plan_checks.py` finds at the first
call and the first backward what a plan forgets. Dropout outside these layers needs the same torch.manual_seed on every tp
rank, or the first backward raises; dropout between the two layers draws masks that differ from those of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from minipar.comm import Comm, autograd
from minipar.mesh import Placement, place_whole, placement_of, set_placement
from minipar.support.errors import one_of
from minipar.tensor_parallel.column import ShardedWeight, column_parallel
from minipar.tensor_parallel.parallel_linear import ColumnParallelLinear, RowParallelLinear
from minipar.tensor_parallel.plan_checks import FirstCall, GradientCheck, watch_gradient
from minipar.tensor_parallel.shards import replicate_parameter, shard_parameter
from minipar.tensor_parallel.vocab import VocabParallelEmbedding


@dataclass(frozen=True)
class Column:
    """The cut "column", where output features may be split only between units, such as heads.

    unit   number of features that stay together, such as those of a head
    parts  number of layers that are stored as one, such as 3 for a layer that computes q, k and v. Each is split separately
    """

    unit: int = 1
    parts: int = 1


@dataclass(frozen=True)
class Divided:
    """Attributes of a module that hold whole numbers, each to be divided by tp."""

    attributes: tuple[str, ...]


Cut = Literal["column", "row", "gathered", "vocab", "summed"] | Column | Divided
Plan = Mapping[str, Cut]


def split_by_plan(model: nn.Module, comm: Comm, plan: Plan | str) -> None:
    """Turn a model into this rank's shard, in place. `tensor_parallel(model, comm, plan=plan)` calls this.

    plan  shell-style pattern of module names ("summed": also of parameters) -> cut; or "llama" or "gpt2": see `PLANS`

    Raises ValueError, before anything is changed, if a pattern matches no module, a module is matched twice, this number of
    ranks cannot cut a module that way, a module to be cut does more than its class in torch or has options that the cut
    would drop, a weight to be cut is tied to another module's, or the model is already wrapped.
    """
    cuts = _cuts_of(model, _named_plan(plan, model) if isinstance(plan, str) else plan)
    summed = [name for name, cut in cuts.items() if cut == "summed"]
    split = {name: cut for name, cut in cuts.items() if cut != "summed"}
    _require_untied(model, split)
    for name in summed:
        _require_whole(name, split)
    for name, cut in split.items():
        _require_cuttable(name, model.get_submodule(name), cut, comm.size)
    place_whole(model)
    divided = []
    for name, cut in split.items():
        theirs = model.get_submodule(name)
        if isinstance(cut, Divided):
            for attribute in cut.attributes:
                divided.append((name, attribute))
                setattr(theirs, attribute, getattr(theirs, attribute) // comm.size)
        else:
            model.set_submodule(name, _split(theirs, cut, comm))
    whole = {name: p for name, p in model.named_parameters() if not placement_of(p).is_part}
    for parameter in whole.values():
        replicate_parameter(parameter)
    of_heads = [name for name in whole if any(f"{name}.".startswith(f"{other}.") for other in summed)]
    if comm.size > 1:
        for module in model.modules():
            if any(placement_of(p).is_part for p in module.parameters()):
                module.register_state_dict_pre_hook(_refuse_state_of_parts)
        gathered = {name: model.get_submodule(name) for name, cut in split.items() if cut == "gathered"}
        GradientCheck(comm, whole, gathered, of_heads)
        columns = {name: cut.parts for name, cut in split.items() if isinstance(cut, Column)}
        FirstCall(model, comm, columns, [name for name, cut in split.items() if cut == "row"], divided)
    for name in of_heads:
        watch_gradient(whole[name], comm.all_reduce)


def _refuse_state_of_parts(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if not keep_vars:  # keep_vars=True asks for the parameters themselves
        raise RuntimeError(
            f"state_dict() of {type(module).__name__}, which is split over tp, would be this rank's part alone; use "
            "minipar.tensor_parallel.full_state_dict(model, comm), called on every rank (save_pretrained takes it as "
            "state_dict=)"
        )


def _split(module: Any, cut: Cut, comm: Comm) -> nn.Module:
    if isinstance(module, nn.Embedding):
        return VocabParallelEmbedding.from_embedding(module, comm)
    if cut == "row":
        return (
            TransposedRow(module, comm)
            if _is_transposed(module)
            else RowParallelLinear.from_linear(module, comm)
        )
    parts = cut.parts if isinstance(cut, Column) else 1
    if parts > 1 or _is_transposed(module):
        return StoredTogether(module, comm, parts, gather_output=cut == "gathered")
    return ColumnParallelLinear.from_linear(module, comm, gather_output=cut == "gathered")


class StoredTogether(nn.Module):
    """Column-parallel layers with one input, stored as one layer, as q, k and v often are. The weight keeps its layout.

    weight  [parts, F/tp, D] of a Linear with parts * F features; [D, parts, F/tp] where the weight is stored transposed
    y       [..., parts * F/tp], this rank's features of each part; [..., parts * F] with `gather_output`

    Sends what `column_parallel` sends for one weight.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, layer: Any, comm: Comm, parts: int, gather_output: bool = False):
        super().__init__()
        self.comm, self.gather_output, self.transposed = comm, gather_output, _is_transposed(layer)
        self.weight = _shard_in_parts(layer.weight, 1 if self.transposed else 0, parts, comm)
        bias = None if layer.bias is None else _shard_in_parts(layer.bias, 0, parts, comm)
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.flatten(1, 2).t() if self.transposed else self.weight.flatten(0, 1)
        (y,) = column_parallel(self.comm, x, [ShardedWeight(weight)])
        if self.bias is not None:
            y = y + self.bias.flatten().to(y.dtype)
        return autograd.gather(self.comm, y, dim=-1) if self.gather_output else y


class TransposedRow(nn.Module):
    """A row-parallel layer whose weight is stored transposed, [D/tp, F]: y = sum over ranks of x w, and b added once."""

    bias: nn.Parameter | None

    def __init__(self, layer: Any, comm: Comm):
        super().__init__()
        self.comm = comm
        self.weight = shard_parameter(layer.weight, 0, comm.rank, comm.size)
        self.register_parameter("bias", layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = autograd.all_reduce(self.comm, x @ self.weight)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def _shard_in_parts(parameter: nn.Parameter, dim: int, parts: int, comm: Comm) -> nn.Parameter:
    """View dimension `dim` as [parts, F], and keep this rank's range of F; `full_state_dict` restores the shape."""
    whole = parameter.detach().unflatten(dim, (parts, -1))
    placement = Placement.whole(placement_of(parameter).name, whole.shape).shard(
        dim + 1, comm.rank, comm.size
    )
    part = nn.Parameter(placement.slice_of(whole).clone(), requires_grad=parameter.requires_grad)
    set_placement(part, placement)
    part.stored_shape = parameter.shape  # type: ignore[attr-defined]
    return part


# Checks of a plan -----------------------------------------------------------------------------------------


def _cuts_of(model: nn.Module, plan: Plan) -> dict[str, Cut]:
    """Return the cut of each module that the plan names."""
    modules = [name for name, _ in model.named_modules() if name]
    parameters = [name for name, _ in model.named_parameters()]
    endings = dict.fromkeys(last for name in modules if not (last := name.rpartition(".")[2]).isdecimal())
    cuts: dict[str, Cut] = {}
    for pattern, cut in plan.items():
        names = [*modules, *parameters] if cut == "summed" else modules
        matches = [name for name in names if fnmatchcase(name, pattern)]
        if not matches:
            known = one_of(endings or modules, near=pattern.rpartition(".")[2])
            raise ValueError(f"plan: {pattern!r} matches no module; their names end in {known}")
        for name in matches:
            if name in cuts:
                raise ValueError(
                    f"plan: two patterns match {name}, the second is {pattern!r}; let one match it"
                )
            cuts[name] = Column() if cut == "column" else cut
    return cuts


def _require_untied(model: nn.Module, cuts: Mapping[str, Cut]) -> None:
    owners: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = owners.setdefault(parameter, name)
        for owner in (first, name):
            if first != name and owner.rpartition(".")[0] in cuts:
                raise ValueError(
                    f"{name} is tied to {first}: leave both out of the plan, or untie them first"
                )


def _require_whole(summed: str, split: Mapping[str, Cut]) -> None:
    for name, cut in split.items():
        if not isinstance(cut, Divided) and (
            f"{name}.".startswith(f"{summed}.") or summed.startswith(f"{name}.")
        ):
            raise ValueError(
                f'plan: {summed} is "summed" but {name} is split; name only parameters that are whole'
            )


def _require_cuttable(name: str, module: Any, cut: Cut, tp: int) -> None:
    if isinstance(cut, Divided):
        for attribute in cut.attributes:
            value = getattr(module, attribute, None)
            if not isinstance(value, int) or value % tp:
                raise ValueError(
                    f"{name}.{attribute} is {value}, which tp={tp} does not divide; use another tp or plan"
                )
        return
    if cut != "vocab" and not isinstance(cut, Column) and cut not in ("row", "gathered"):
        kinds = one_of(("column", "row", "gathered", "vocab", "summed"))
        raise ValueError(f"plan: {cut!r} for {name} is unknown; use {kinds}, Column(...) or Divided(...)")
    if (cut == "vocab") != isinstance(module, nn.Embedding) or not (
        isinstance(module, nn.Embedding | nn.Linear) or _is_transposed(module)
    ):
        what = "an Embedding" if cut == "vocab" else "a torch.nn.Linear, or a Conv1D as in GPT-2"
        if hasattr(module, "base_layer"):
            raise ValueError(
                f"{name} wraps {name}.base_layer, as LoRA does; plan {name}.base_layer in its place and, of two low-rank "
                'factors, only the second as "column", or only the first as "row"'
            )
        kind = f"{type(module).__module__}.{type(module).__name__}"
        raise ValueError(f"{name} is a {kind}; the cut {_named(cut)} is for {what}")
    _require_plain(name, module)
    dim = 1 if (cut == "row") != _is_transposed(module) else 0
    size, unit = module.weight.shape[dim], cut.parts * cut.unit if isinstance(cut, Column) else 1
    if size % unit or size // unit % tp:
        units = f"{size} features" if unit == 1 else f"{size} features in units of {unit}"
        raise ValueError(
            f"{name} has {units}, which tp={tp} ranks cannot share equally; use another tp or plan"
        )


def _require_plain(name: str, module: Any) -> None:
    """Raise ValueError if the module that replaces this one would not do all that this one does."""
    for plain in (nn.Embedding, nn.Linear):
        if isinstance(module, plain) and type(module).forward is not plain.forward:
            raise ValueError(
                f"{name} is a {type(module).__name__} with a forward of its own, which a cut would drop; leave it out of "
                "the plan"
            )
    hooks = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    if (
        "forward" in vars(module)
        or is_parametrized(module)
        or any(getattr(module, hook, None) for hook in hooks)
    ):
        raise ValueError(
            f"{name} has a hook, a parametrization or a forward of its own, which a cut would drop; split the model first"
        )
    for option in ("max_norm", "scale_grad_by_freq", "sparse") if isinstance(module, nn.Embedding) else ():
        value = getattr(module, option)
        if value is not None and value is not False:
            raise ValueError(f"{name} has {option}={value}, which a cut would drop; leave it out of the plan")


def _named(cut: Cut) -> str:
    return repr("column" if isinstance(cut, Column) else cut)


def _is_transposed(module: nn.Module) -> bool:
    """Return whether this is GPT-2's linear layer, which stores its weight [D, F] and is called Conv1D."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


# Plans of well-known models ---------------------------------------------------------------------------------------------


def _llama(model: Any) -> Plan:
    """Plan the blocks of Hugging Face's Llama and similar models. Embedding and head are not split: they may be tied.

    Raises ValueError where a norm of queries or keys, which Qwen3 and Gemma3 have, acts on several heads together.
    """
    config = model.config
    unit = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention: dict[str, Cut] = {f"*.{which}_proj": Column(unit=unit) for which in "qkv"}
    mlp: dict[str, Cut] = {"*.gate_proj": "column", "*.up_proj": "column", "*.down_proj": "row"}
    norms: dict[str, Cut] = {}
    for name, parameter in model.named_parameters():
        if (pattern := f"*.{name.split('.')[-2]}" if "." in name else "") in ("*.q_norm", "*.k_norm"):
            if parameter.shape != (unit,):
                raise ValueError(
                    f'plan="llama": {name} has shape {list(parameter.shape)}, not [{unit}] as a norm of each head has; '
                    "a norm of all heads together cannot be split, so leave attention out of a plan of your own"
                )
            norms[pattern] = "summed"
    return {**attention, "*.o_proj": "row", **mlp, **norms}


def _gpt2(model: Any) -> Plan:
    """Plan the blocks of Hugging Face's GPT-2, whose attention stores q, k and v as one layer and splits its output."""
    config = model.config
    unit = config.hidden_size // config.num_attention_heads
    return {
        "*.attn": Divided(("split_size",)),
        "*.attn.c_attn": Column(unit=unit, parts=3),
        "*.attn.c_proj": "row",
        "*.mlp.c_fc": "column",
        "*.mlp.c_proj": "row",
    }


# Name -> the plan for a model of Hugging Face.
PLANS: Mapping[str, Callable[[Any], Plan]] = {"llama": _llama, "gpt2": _gpt2}


def _named_plan(name: str, model: nn.Module) -> Plan:
    if name not in PLANS:
        raise ValueError(f"plan={name!r} is unknown; use {one_of(PLANS)}, or module names and their cuts")
    if not hasattr(model, "config"):
        raise ValueError(
            f"plan={name!r} reads the sizes of heads from model.config, which this model lacks; set it"
        )
    return PLANS[name](model)
