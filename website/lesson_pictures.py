"""What the lessons' explorables show: for each position of their sliders and menus, the library's own numbers.

A Recording has a kind, by which `assets/pictures.mjs` draws it; fields, whose values a reader chooses; and an answer for
each choice, under the values' positions joined by spaces: "0 2 1".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from itertools import product
from typing import Any, NamedTuple

from minipar.learn.puzzles import collectives
from minipar.learn.puzzles.network import Network, World
from minipar.learn.puzzles.values import Value, parts_of
from website.answers import layout, mesh, pipeline
from website.recorded import record

# What the sliders and menus of the pipeline offer.
SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "zb-h1": "Zero bubble (ZB-H1)"}
RANKS = (2, 3, 4, 6, 8)
MICROBATCHES = (2, 4, 8, 12, 16)

# Gradients in buckets: layers, each with its backward and its bytes of gradients, on four ranks.
LAYERS, BACKWARD_S, LAYER_BYTES, OVERLAP_RANKS = 12, 1e-3, 10_000_000, 4
BUCKETS = (12, 6, 4, 3, 2, 1)
# seconds a message, and bytes a second
LINKS = {
    "50 GB/s, 10 us a message": (10e-6, 50e9),
    "12.5 GB/s, 100 us a message": (100e-6, 12.5e9),
    "3 GB/s, 100 us a message": (100e-6, 3e9),
}

TOKENS = 4096
TRAINED_STEPS, SHOWN_EVERY = 160, 20
CAPACITY_FACTORS = (1.0, 1.25, 1.5, 2.0)
MESHES = {
    "pp 2, dp 2, tp 4": {"pp": 2, "dp": 2, "tp": 4},
    "dp 4, tp 4": {"dp": 4, "tp": 4},
    "pp 4, dp 4": {"pp": 4, "dp": 4},
    "dp 2, cp 4, tp 2": {"dp": 2, "cp": 4, "tp": 2},
    "dp 8, tp 2, ep 4": {"dp": 8, "tp": 2, "ep": 4},
}


class Field(NamedTuple):
    """A choice of the reader: a slider, or a menu. `values[at]` is chosen at first; labels, if other than the values."""

    name: str
    label: str
    values: tuple[Any, ...]
    at: int = 0
    labels: tuple[str, ...] | None = None
    is_menu: bool = False
    is_key: bool = True  # False: the picture alone uses it, and the answers do not depend on it

    def at_value(self, value: Any) -> Field:
        """Return the field with another first choice."""
        return self._replace(at=self.values.index(value))


class Recording(NamedTuple):
    """Everything that an explorable shows, as plain values."""

    kind: str
    fields: tuple[Field, ...]
    answers: dict[str, Any]
    constants: dict[str, Any] = {}


def recorded(kind: str, fields: Iterable[Field], answer: Callable[..., Any], **constants: Any) -> Recording:
    """Return the recording of `answer(value, ...)` at all combinations of the fields' values."""
    fields = tuple(fields)
    keys = [field for field in fields if field.is_key]
    answers = {
        " ".join(map(str, places)): whole_numbers(answer(*(f.values[i] for f, i in zip(keys, places, strict=True))))
        for places in product(*(range(len(field.values)) for field in keys))
    }  # fmt: skip
    return Recording(kind, fields, answers, constants)


def whole_numbers(value: Any) -> Any:
    """Return the value with floats that are whole numbers as int, which JSON writes shorter."""
    if isinstance(value, dict):
        return {key: whole_numbers(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [whole_numbers(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


# Lesson 01 -------------------------------------------------------------------------------------------------------------


@cache
def ring() -> Recording:
    """Return the ring all-reduce as real ranks sent it, to be gone through step by step."""
    ranks = (2, 3, 4, 5, 6, 8)
    steps = Field("step", "step", tuple(range(2 * (ranks[-1] - 1) + 1)), 1, is_key=False)
    return recorded(
        "collective",
        (Field("p", "ranks", ranks, 2), steps),
        lambda p: record("all-reduce, ring", p),
    )


# Lesson 02 -------------------------------------------------------------------------------------------------------------


@cache
def buckets() -> Recording:
    """Return one rank's backward and all-reduces, by layers in a bucket and by the link's speed."""
    links = Field("link", "network", tuple(LINKS), 1, is_menu=True)
    return recorded("overlap", (Field("bucket", "layers in a bucket", BUCKETS, 3), links), overlap)


def overlap(layers_in_bucket: int, link: str) -> dict:
    """Run a backward and its buckets' all-reduces on the puzzles' simulated network; return rank 0's time, in ms."""
    alpha_s, bytes_per_s = LINKS[link]
    world = World(OVERLAP_RANKS, Network(alpha_s, 1 / bytes_per_s))
    for comm in world.comms:
        comm.collectives = collectives
        world.start(_backward(world, comm, layers_in_bucket), comm.rank)
    world.run()
    own = [span for span in world.spans if span.rank == 0]
    computing = [span for span in own if span.op == "B"]
    sends = [span for span in own if span.op == "S"]
    each = 2 * (OVERLAP_RANKS - 1)  # messages of one ring
    bars = [
        ["A", 1, i, sends[i * each].begin_s * 1e3, sends[(i + 1) * each - 1].end_s * 1e3]
        for i in range(len(sends) // each)
    ]
    return {
        "names": ["backward", "network"],
        "ranks": [[["B", 0, span.label, span.begin_s * 1e3, span.end_s * 1e3] for span in computing], bars],
        "stage_rank": [0, 1],
        "slices": 1,
        "peak_live": [0],
        "backward_ms": computing[-1].end_s * 1e3,
        "step_ms": world.now_s * 1e3,
    }


async def _backward(world: World, comm: Any, layers_in_bucket: int) -> None:
    handles: list[Any] = []

    async def in_turn(before: Any, value: Value) -> None:
        if before is not None:
            await before
        await comm.all_reduce(value)

    for last in range(LAYERS, 0, -layers_in_bucket):
        for layer in reversed(range(last - layers_in_bucket, last)):
            await comm.compute(BACKWARD_S, ("B", layer))
        blocks = [(chunk, parts_of(f"rank {comm.rank}")) for chunk in range(comm.size)]
        num_bytes = layers_in_bucket * LAYER_BYTES // comm.size
        gradients = Value(world.memories[comm.rank], "gradients", blocks, num_bytes)
        handles.append(comm.start(in_turn(handles[-1] if handles else None, gradients)))
    for handle in handles:
        await handle


# Lessons 03, 12 and 17: memory and time as the planner counts them -------------------------------------------------------


@cache
def zero() -> Recording:
    """Return the memory of a rank under ZeRO 0 to 3, by the number of ranks and the model."""
    models = Field("model", "model", ("llama-7b", "llama-13b", "llama-70b"), is_menu=True)
    return recorded("zero", (Field("ranks", "ranks", (1, 2, 4, 8, 16, 32, 64, 128), 3), models), zero_stages)


def zero_stages(ranks: int, model: str) -> dict:
    """Return the memory of each ZeRO stage, with one sample a rank and a whole recomputation, and the card's bytes."""
    asked = {"model": model, "gpus": ranks, "dp": ranks, "seq": TOKENS, "batch": ranks, "recompute": "full"}
    found = [layout(asked | {"zero": stage}) for stage in range(4)]
    return {"stages": [one["memory"] for one in found], "card": found[0]["card"]}


@cache
def before_you_pay() -> Recording:
    """Return memory and time of Llama 70B on 64 GPUs, by tp, pp and ZeRO stage."""
    fields = (
        Field("tp", "tp", (1, 2, 4, 8), 2),
        Field("pp", "pp", (1, 2, 4, 8), 2),
        Field("zero", "ZeRO", (0, 1, 2, 3), 1),
    )
    return recorded("layout", fields, lambda tp, pp, zero: one_layout("llama-70b", "a100-80gb", tp, pp, zero))


@cache
def which_mesh() -> Recording:
    """Return memory and time on 64 GPUs by model, machine, tp and pp, under ZeRO-1."""
    fields = (
        Field("model", "model", ("llama-7b", "llama3-8b", "llama-70b"), 2, is_menu=True),
        Field("machine", "machine", ("a100-80gb", "h100"), is_menu=True),
        Field("tp", "tp", (1, 2, 4, 8), 3),
        Field("pp", "pp", (1, 2, 4, 8), 0),
    )
    return recorded("layout", fields, lambda model, machine, tp, pp: one_layout(model, machine, tp, pp, 1))


def one_layout(model: str, machine: str, tp: int, pp: int, zero: int) -> dict:
    """Return what the planner's page says of one layout on 64 GPUs; {"error": why} where it is not legal."""
    asked = {"model": model, "machine": machine, "tp": tp, "pp": pp, "dp": 64 // (tp * pp), "zero": zero}
    try:
        found = layout(asked)
    except ValueError as error:
        return {"error": str(error)}
    return {name: value for name, value in found.items() if name != "job"}


# Lessons 06, 07 and the home page ----------------------------------------------------------------------------------------


@cache
def pipelines() -> Recording:
    """Return the timelines of three schedules by ranks and microbatches."""
    menu = Field("schedule", "schedule", tuple(SCHEDULES), 1, tuple(SCHEDULES.values()), is_menu=True)
    fields = (menu, Field("p", "ranks", RANKS, 2), Field("m", "microbatches", MICROBATCHES, 2))
    return recorded("pipeline", fields, _timeline, names=SCHEDULES)


def _timeline(name: str, p: int, m: int) -> dict:
    found = pipeline({"schedule": name, "p": p, "m": m})
    return {key: found[key] for key in ("ranks", "stage_rank", "bubble_over_total", "peak_live", "slices")}


# Lesson 08 ---------------------------------------------------------------------------------------------------------------


@cache
def experts() -> Recording:
    """Return the load of eight experts while a small model trains, with the balance loss and without."""
    histories = {"with": trained_loads(1e-2), "without": trained_loads(0.0)}
    steps = tuple(range(0, TRAINED_STEPS + 1, SHOWN_EVERY))
    ways = Field("balance", "balance loss", tuple(histories), 1, is_menu=True)
    factors = Field("capacity", "capacity factor", CAPACITY_FACTORS, 1)

    def answer(way: str, step: int, factor: float) -> dict:
        return load_and_dropped(histories[way][step], factor)

    return recorded("loads", (ways, Field("step", "step", steps, len(steps) // 2), factors), answer)


def load_and_dropped(load: list[int], factor: float) -> dict:
    """Return each expert's choices, its capacity, and how many choices find no room: max(0, load - capacity) of each."""
    from minipar.config.moe_config import MoEConfig

    capacity = MoEConfig(num_experts=len(load), capacity_factor=factor).capacity(sum(load))
    return {"load": load, "capacity": capacity, "dropped": sum(max(0, n - capacity) for n in load)}


def trained_loads(balance_coef: float) -> dict[int, list[int]]:
    """Train lesson 08's small model; return, at every shown step, how many of 256 tokens choose each of 8 experts.

    The 256 tokens are the same at every step, and are not trained on.
    """
    import torch

    from minipar.config.model_config import ModelConfig
    from minipar.model import Transformer
    from minipar.model.moe import take_metrics
    from minipar.train.data.text import batch_of_step, load_text

    text, loads = load_text(None), {}
    config = ModelConfig(
        dim=32, num_layers=2, num_heads=2, hidden_dim=88, max_seq_len=256, num_experts=8,
        capacity_factor=1.5, balance_coef=balance_coef,
    )  # fmt: skip
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the same additions in the same order, however many cores there are
    model = Transformer(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    for step in range(TRAINED_STEPS + 1):
        if step % SHOWN_EVERY == 0:
            with torch.no_grad():  # its metrics are taken at once; those of training are taken below
                model(batch_of_step(text, 0, TRAINED_STEPS + 1, 1, 256).tokens)
            loads[step] = [int(n) for n in take_metrics(model)["layers.1.mlp"].load]
        batch = batch_of_step(text, 0, step, 4, 256)
        optimizer.zero_grad()
        model.loss(batch.tokens, batch.targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        take_metrics(model)
    torch.set_num_threads(threads)
    return loads


# Lessons 09 and 10 -------------------------------------------------------------------------------------------------------


@cache
def zigzag() -> Recording:
    """Return which rank has which query under a causal mask, and how many scores each computes."""
    layouts = ("contiguous", "zigzag", "striped")
    fields = (Field("layout", "layout", layouts, is_menu=True), Field("p", "ranks", (2, 4, 8), 1))
    return recorded("causal", fields, causal)


def causal(layout_name: str, p: int, seq_len: int = 32) -> dict:
    """Return owner[query], the rank that has it; and the scores that each rank computes."""
    from minipar.config.context_limits import local_ranges
    from minipar.context.token_layout import causal_work

    owner = [0] * seq_len
    for rank in range(p):
        for run in local_ranges(seq_len, rank, p, layout_name):
            for query in run:
                owner[query] = rank
    return {"owner": owner, "work": [causal_work(seq_len, rank, p, layout_name) for rank in range(p)]}


@cache
def meshes() -> Recording:
    """Return one rank's groups, for each of 16 ranks in two nodes, on several meshes."""
    shapes = Field("mesh", "mesh", tuple(MESHES), is_menu=True)
    fields = (shapes, Field("rank", "rank", tuple(range(16)), 5))

    def answer(name: str, rank: int) -> dict:
        found = mesh(MESHES[name] | {"ranks_per_node": 8, "rank": rank})
        return {key: value for key, value in found.items() if key != "all_coordinates"}

    places = {name: mesh(sizes)["all_coordinates"] for name, sizes in MESHES.items()}
    return recorded("mesh", fields, answer, all_coordinates=places)
