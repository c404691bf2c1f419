"""The rules of what fits together, said once. Imports no torch.

TrainConfig asks them when it is made, so that trainer, sweep and dry run have met them; `cost/layout.py` asks them for the
planner, and `check_tensor_parallel` and `check_context_parallel` for a function that cuts a model.

A rule is asked of a `View`, which has the settings of a run, the sizes of its model and what follows from them as
attributes, whoever made it: a TrainConfig, the planner, or a function that cuts a model. No text is made until a rule is
broken. The advice of a refusal is computed: the values of a setting that break no rule.

TENSOR        tp and the sizes of a model                STAGES    pp and the number of layers
EXPERTS       ep, the experts and the ranks              TOKENS, GROUPS    cp and tp, and a sample's tokens and heads
DATA, BATCH   a run's data and batch                     RUN       what else a TrainConfig must meet, its tp layout apart
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

from minipar.config.context_limits import (
    length_multiple,
    local_ranges,
)
from minipar.config.moe_config import require_whole_groups
from minipar.support.errors import divisors, one_of

RECOMPUTE = ("none", "selective", "full")


class View:
    """Values by name, as attributes and for text. A subclass may have more of them as its own."""

    def __init__(self, values: dict[str, Any]):
        self.__dict__ = values

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


def view_of(config: Any, **more: Any) -> View:
    """Return a run's settings and its model's sizes, and what else a rule asks for."""
    return View(vars(config.model) | vars(config) | more)


Text = str | Callable[[Any], str]
Condition = Callable[[Any], object]


class Rule(NamedTuple):
    """A rule, and what to say where it is broken.

    broken  whether a view breaks it
    words   what is wrong: text in which {tp} stands for the view's tp, or a function of the view
    advice  what would work, in the same way; {works} stands for the values of `name` that mend it, "" if none does
    name    a setting that could mend it
    values  values of this setting to try
    """

    broken: Condition
    words: Text
    advice: Text = "; use {works}"
    name: str = ""
    values: Callable[[Any], list[Any]] = lambda v: []


Rules = tuple[Rule, ...]


def broken(view: View, rules: Rules) -> Rule | None:
    """Return the first of these rules that the view breaks; None if it meets them all."""
    for rule in rules:
        if rule.broken(view):
            return rule
    return None


def works(view: View, name: str, values: list[Any], rules: Rules) -> list[Any]:
    """Return those of these values of a setting with which the view meets all rules."""
    return [n for n in values if broken(type(view)(vars(view) | {name: n}), rules) is None]


def say(text: Text, view: View) -> str:
    return text.format_map(view) if isinstance(text, str) else text(view)


def check(view: View, rules: Rules) -> None:
    """Raise ValueError if the view breaks a rule: which values do not fit, and what would work.

    If no value can mend all rules, because another one is broken, too, the advice is about the first one.
    """
    rule = broken(view, rules)
    if rule is not None:
        values = rule.values(view)
        found = works(view, rule.name, values, rules) or values
        advised = View(vars(view) | {"works": one_of(found) if found else ""})
        raise ValueError(say(rule.words, view) + say(rule.advice, advised))


def divides(
    name: str,
    whole: str,
    of: Callable[[Any], int] | None = None,
    when: Condition | None = None,
    advice: Text = "; use {works}",
) -> Rule:
    """Return the rule that a setting divides a size: `tp=3 does not divide num_heads=8; use 1, 2, 4 or 8`.

    whole  what the size is called          of  the function that computes it; None: the view's value of that name
    """
    size = of or attrgetter(whole)

    def uneven(v: Any) -> object:
        d = getattr(v, name)
        return d != 1 and (when is None or when(v)) and (d < 1 or size(v) % d)

    return Rule(
        uneven,
        lambda v: f"{name}={getattr(v, name)} does not divide {whole}={size(v)}",
        advice,
        name,
        lambda v: divisors(size(v)),
    )


def first(reasons: dict[str, object]) -> str | None:
    """Return the first reason that holds."""
    return next((reason for reason, holds in reasons.items() if holds), None)


# A model on a mesh -----------------------------------------------------------------------------------------------


def _rows_left(v: Any) -> Any:
    """Return whether every tp rank has a row of a padded vocabulary."""
    return -(-v.vocab_size // v.tp) * (v.tp - 1) < v.vocab_size


def _tp_sizes(v: Any) -> list[int]:
    return divisors(v.num_heads)


TENSOR = (
    divides("tp", "num_heads"),
    divides("tp", "hidden_dim"),
    divides("tp", "shared_dim", when=attrgetter("num_experts")),
    Rule(
        lambda v: v.tp % v.num_kv_heads and v.num_kv_heads % v.tp,
        "tp={tp} neither divides num_kv_heads={num_kv_heads} nor is a multiple of it",
        name="tp",
        values=_tp_sizes,
    ),
    Rule(
        lambda v: v.vocab_size % v.tp and not _rows_left(v),
        "tp={tp} leaves a rank without a row of vocab_size={vocab_size}",
        name="tp",
        values=_tp_sizes,
    ),
    divides("tp", "vocab_size", when=lambda v: not v.pad_vocab, advice="; use {works}, or pad_vocab=True"),
)


STAGES = (
    Rule(
        lambda v: v.num_stages > v.num_layers,
        "pp={pp} with schedule={schedule!r} has {num_stages} stages, and num_layers={num_layers}; use at most "
        "{num_layers} stages",
        "",
    ),
)


def expert_ranks(dp: int, cp: int, tp: int, fold_experts: bool = False) -> int:
    """Return the number of ranks of a pipeline stage over which experts may be spread; folded, those of tp are more."""
    return dp * cp * (tp if fold_experts else 1)


EP_RANKS = divides("ep", "dp*cp", lambda v: expert_ranks(v.dp, v.cp, v.tp, v.fold_experts))
EXPERTS = (
    Rule(
        lambda v: v.num_experts and v.moe_every > v.num_layers,
        "num_experts={num_experts}: of num_layers={num_layers} layers, none has experts with moe_every={moe_every}",
        "; use moe_every={num_layers} or less",
    ),
    Rule(
        lambda v: v.ep > 1 and not v.num_experts,
        "ep={ep} spreads experts, and num_experts=0: the model has none",
        "; leave it out",
    ),
    divides("ep", "num_experts"),
    EP_RANKS,
)

# A sample's tokens on cp and tp ranks ----------------------------------------------------------------------------


def _length_advice(v: Any) -> str:
    multiple = length_multiple(v.cp, v.cp_layout, v.cp_ulysses)
    fits = min(v.max_seq_len, v.seq_len + multiple - 1) // multiple * multiple
    return f"; use seq_len={fits}" if fits else f"; use seq_len and model.max_seq_len={multiple}"


def _own_heads(v: Any) -> Any:
    return v.num_heads // v.ranks_of_heads


def _splits_heads(name: str, attention: str) -> Rule:
    """Return the rule that the ranks which exchange heads for tokens, as many as `name` says, divide a rank's heads."""
    return Rule(
        lambda v: v.cp_attention == attention and _own_heads(v) % getattr(v, name),
        lambda v: (
            f"{name}={getattr(v, name)} does not divide num_heads{'/tp' if v.ranks_of_heads > 1 else ''}={_own_heads(v)}"
        ),
        lambda v: "; use " + (f"{name}={v.works}, or " if v.works else "") + "cp_attention=ring",
        name,
        lambda v: [n for n in divisors(_own_heads(v)) if name == "cp" or (n > 1 and v.cp % n == 0)],
    )


TOKENS = (
    Rule(
        lambda v: v.cp_ulysses > 1 and v.cp_attention != "usp",
        "cp_ulysses={cp_ulysses} is for cp_attention=usp, not {cp_attention}",
        "; use that, or cp_ulysses=1",
    ),
    Rule(
        lambda v: v.cp > 1 and v.cp_attention == "usp" and v.cp_ulysses == 1,
        "cp_attention=usp with cp_ulysses=1 is a ring",
        "; use cp_ulysses={works}, or cp_attention=ring",
        "cp_ulysses",
        lambda v: divisors(v.cp)[1:],
    ),
    divides("cp_ulysses", "cp", advice=lambda v: f"; use {one_of(divisors(v.cp))}"),
    Rule(
        lambda v: v.seq_len % length_multiple(v.cp, v.cp_layout, v.cp_ulysses),
        "cp={cp} with cp_layout={cp_layout!r} does not divide seq_len={seq_len}",
        _length_advice,
    ),
    _splits_heads("cp", "ulysses"),
    _splits_heads("cp_ulysses", "usp"),
    divides(
        "tp",
        "a rank's tokens of a sample (seq_len/cp)",
        lambda v: v.seq_len // v.cp,
        attrgetter("sequence_parallel"),
    ),
)


def _cuts_group(v: Any) -> Any:
    if v.cp == 1 or not v.num_experts or v.group_tokens is None or v.seq_len is None:
        return None
    return _cut(v.seq_len, v.group_tokens, v.cp, v.cp_layout, v.cp_ulysses)


@lru_cache(maxsize=256)  # the planner asks for many layouts with the same cp
def _cut(seq_len: int, group_tokens: int, *layout: Any) -> str | None:
    """Return why some cp rank has part of a routing group; None if all groups are whole."""
    for rank in range(layout[0]):
        try:
            require_whole_groups(list(chain(*local_ranges(seq_len, rank, *layout))), group_tokens)
        except ValueError as error:
            return str(error)
    return None


WHOLE_GROUPS = Rule(_cuts_group, _cuts_group, "")  # its words have the advice
GROUPS = (
    Rule(
        lambda v: v.num_experts and v.cp > 1 and v.group_tokens is None,
        "group_tokens=None makes a sequence one routing group, which cp={cp} would cut",
        "; use group_tokens={works}",
        "group_tokens",
        lambda v: works(v, "group_tokens", divisors((v.seq_len or v.cp) // v.cp), (WHOLE_GROUPS,)),
    ),
    WHOLE_GROUPS,
)


# A run -------------------------------------------------------------------------------------------------------------


def blocks_per_unit(recompute: str) -> int | None:
    """Return N for recompute="every:N", or None for one of RECOMPUTE. Raises ValueError for anything else."""
    if found := re.fullmatch(r"every:([1-9]\d*)", recompute):
        return int(found[1])
    if recompute in RECOMPUTE:
        return None
    choices = f"{', '.join(RECOMPUTE)} or every:N, with N blocks a unit, 1 or more"
    near = difflib.get_close_matches(recompute, RECOMPUTE, 1)
    raise ValueError(
        f"recompute={recompute!r} is unknown; use {choices}" + (f"; did you mean {near[0]}?" if near else "")
    )


DATA = (
    Rule(
        lambda v: v.seq_len > v.max_seq_len,
        "seq_len={seq_len} exceeds max_seq_len={max_seq_len}",
        "; use {max_seq_len} or fewer",
    ),
    Rule(
        lambda v: v.tokens is not None and v.text is not None,
        "tokens={tokens} is used in place of text={text}",
        "; use one of the two",
    ),
    Rule(
        lambda v: v.tokens is None and v.tokenizer is None and v.vocab_size < 256,
        "vocab_size={vocab_size} does not hold every byte",
        "; use 256 or more",
    ),
    Rule(
        lambda v: v.lr_batch_size is not None and v.lr_batch_size < 1,
        "lr_batch_size={lr_batch_size} is out of range",
        "; use 1 or more",
    ),
    Rule(
        lambda v: (v.lr_scale == "none") != (v.lr_batch_size is None),
        "lr_scale={lr_scale} with lr_batch_size={lr_batch_size}: lr is scaled from the batch size it was found for",
        "; use both, lr_scale=linear or sqrt, or neither",
    ),
)


def _unequal(v: Any) -> Any:
    """Return whether dp ranks have samples in proportion to their speeds, in equally many microbatches."""
    return v.dp_speeds is not None and v.equal_microbatches


def samples_of_rank(v: Any) -> Any:
    return v.batch_size // v.dp


SAMPLES = "a rank's samples (batch_size/dp)"
BATCH = (
    Rule(
        lambda v: v.dp_speeds is not None and (len(v.dp_speeds) != v.dp or min(v.dp_speeds) <= 0),
        lambda v: f"dp_speeds={list(v.dp_speeds)} for dp={v.dp}",
        "; give a number above 0 per dp rank",
    ),
    Rule(
        lambda v: v.dp_speeds is not None and v.compress != "none",
        "compress={compress} averages dp ranks with equal parts of the batch, and dp_speeds gives them unequal ones",
        "; use one of the two",
    ),
    divides("microbatches", "batch_size", when=_unequal),
    Rule(
        lambda v: _unequal(v) and v.batch_size // v.microbatches < v.dp,
        "batch_size={batch_size} in {microbatches} microbatches leaves some of dp={dp} ranks without a sample",
        lambda v: f"; use batch_size={v.dp * v.microbatches} or more",
    ),
    divides("dp", "batch_size", when=lambda v: not _unequal(v)),
    divides("microbatches", SAMPLES, samples_of_rank, lambda v: not _unequal(v)),
    EP_RANKS,
)


def _defers_products(v: Any) -> bool:
    """Return whether the schedule computes weight gradients apart, in W."""
    return any(action.op == "W" for own in v.order.actions for action in own)


def _whole_blocks(v: Any) -> Any:
    return v.recompute == "full" or blocks_per_unit(v.recompute) is not None


def _lacks_gradients(v: Any) -> Any:
    """Return why some gradients are not complete after each backward, where they are to be reduced then."""
    return v.reduce_every == "microbatch" and first(
        {
            "computes weight gradients apart": _defers_products(v),
            "has several stages on a rank": v.num_stages > v.pp,
            "sums tied embeddings at the end of a step": v.tie_embeddings and v.pp > 1,
        }
    )


def _breaks_graph(v: Any) -> Any:
    """Return why `compile` cannot make one graph of a block.

    Messages, host reads and deferred products would break the graph, or would run only while it is traced.
    """
    return v.compile != "none" and first(
        {
            f"tp={v.tp} sends messages": v.tp > 1,
            f"cp={v.cp} sends messages": v.cp > 1,
            "experts read their numbers of rows": v.num_experts > 0,
            "zero=3 swaps the weights": v.zero == 3,
            f"recompute={v.recompute} runs a block again": v.recompute != "none",
            "offload_activations moves what is saved": v.offload_activations,
            f"schedule={v.schedule} defers products": _defers_products(v),
        }
    )


RUN = (
    *STAGES,
    *EXPERTS,
    Rule(
        lambda v: v.replicate > 1 and v.zero != 3,
        "replicate={replicate} copies the shards of zero=3, and zero={zero}",
        "; use zero=3",
    ),
    divides("replicate", "dp*cp", lambda v: v.dp * v.cp),
    divides(
        "replicate",
        "an expert's ranks (dp*cp/ep)",
        lambda v: v.dp * v.cp // v.ep,
        attrgetter("num_experts"),
    ),
    Rule(
        lambda v: v.reduce_dtype == "float16" and v.dtype != "float16",
        "reduce_dtype=float16 overflows without a loss scale, and dtype={dtype} has none",
        "; use dtype=float16, or reduce_dtype=bfloat16",
    ),
    Rule(
        lambda v: v.gather_every != "microbatch" and v.zero != 3,
        "gather_every={gather_every} is for zero=3, which alone gathers parameters, and zero={zero}",
        "; use zero=3, or leave it out",
    ),
    Rule(
        lambda v: v.reduce_every == "microbatch" and v.zero != 2,
        "reduce_every=microbatch is for zero=2, and zero={zero}",
        "; use zero=2, or step",
    ),
    Rule(
        _lacks_gradients,
        lambda v: (
            "reduce_every=microbatch needs every gradient after each backward, but "
            f"schedule={v.schedule!r} on pp={v.pp} {_lacks_gradients(v)}"
        ),
        "; use reduce_every=step",
    ),
    *TOKENS,
    *GROUPS,
    Rule(
        lambda v: v.tp_chunked and not v.sequence_parallel,
        "tp_chunked=True cuts sequence_parallel's messages, and sequence_parallel=False",
        "; use both, or neither",
    ),
    Rule(
        lambda v: not _whole_blocks(v) and v.keep_messages,
        "keep_messages spares the messages of recomputed blocks, and recompute={recompute} recomputes none",
        "; use recompute=full or every:N",
    ),
    Rule(
        lambda v: v.partition_activations and not _whole_blocks(v),
        "partition_activations cuts the inputs that recompute=full keeps, and recompute={recompute}",
        "; use recompute=full or every:N",
    ),
    Rule(
        lambda v: v.partition_activations and v.sequence_parallel,
        "partition_activations: with sequence_parallel a rank keeps only its part of these inputs anyway",
        "; use one of the two",
    ),
    Rule(
        _breaks_graph,
        lambda v: f"compile={v.compile} makes one graph of a block, and in it {_breaks_graph(v)}",
        "; use compile=none, or only dp, pp with a schedule without W, and zero=0, 1 or 2",
    ),
)
