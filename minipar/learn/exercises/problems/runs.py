"""Problems of lessons 10 to 12, 15, 17, 21 and 24: meshes, checkpoints, what a run costs, torch, traces, faults."""

from __future__ import annotations

from math import ceil, sqrt

from minipar.cost.collectives import sent_share
from minipar.cost.links import links_of
from minipar.cost.machines import find_machine
from minipar.cost.memory import model_state_bytes
from minipar.learn.exercises.problems.card import Card, problem

GIGA, TERA, DAY_S = 1e9, 1e12, 86400


@problem("10", millions=(1, 4, 16), gpus=(256, 512, 2048), features=(14336, 28672))
def best_split_of_fsdp_and_tensor_parallelism(millions: int, gpus: int, features: int) -> Card:
    return Card(
        f"{gpus} GPUs are split into x of FSDP and y = {gpus}/x of tensor parallelism. A layer's MLP of h x F, "
        f"F = {features}, sends about 4 h F/y elements of weights for FSDP, and 4 B h/x of activations for "
        f"tensor parallelism, with B = {millions} million tokens a step. Which x sends the least? (It need not "
        "be whole.)",
        sqrt(millions * 1e6 * gpus / features),
        "GPUs",
        (
            "x F/N + B/x is least where both are equal: x^2 = B N/F",
            f"sqrt({millions}e6 * {gpus} / {features})",
        ),
    )


@problem("10", pp=(2, 4), dp=(2, 4, 8), tp=(2, 4, 8), stage=(0, 1), replica=(0, 1), part=(0, 1))
def rank_at_a_place(pp: int, dp: int, tp: int, stage: int, replica: int, part: int) -> Card:
    return Card(
        f"A mesh of pp {pp}, dp {dp} and tp {tp}, pp slowest and tp fastest. Which rank has stage {stage}, "
        f"replica {replica} and part {part} of tp, all counted from 0?",
        (stage * dp + replica) * tp + part,
        "(a rank)",
        (
            "(stage * dp + replica) * tp + part",
            f"({stage} * {dp} + {replica}) * {tp} + {part}",
        ),
        0.0,
    )


@problem("10", pp=(2, 4, 8), dp=(2, 4, 16), tp=(2, 4, 8))
def groups_of_a_mesh(pp: int, dp: int, tp: int) -> Card:
    return Card(
        f"How many groups does a mesh of pp {pp}, dp {dp} and tp {tp} have in all: tensor-parallel, "
        "data-parallel and pipeline groups?",
        dp * pp + tp * pp + tp * dp,
        "groups",
        (
            "an axis has as many groups as the other two have places",
            f"{dp} * {pp} + {tp} * {pp} + {tp} * {dp}",
        ),
        0.0,
    )


@problem("11", billions=(7, 70, 405), writers=(1, 8, 64, 512), gigabytes=(0.5, 2, 5))
def seconds_of_a_save(billions: int, writers: int, gigabytes: float) -> Card:
    return Card(
        f"A checkpoint of {billions} billion parameters has 2 bytes of weight and 12 of master and moments "
        f"each. {writers} ranks write their parts at {gigabytes:g} GB/s each, at the same time. How many "
        "seconds does it take?",
        14 * billions / (writers * gigabytes),
        "s",
        ("14 P bytes over what all write in a second", f"14 * {billions}e9 / ({writers} * {gigabytes:g}e9)"),
    )


@problem("11", writers=(3, 5, 6, 12), readers=(2, 4, 8), rank=(0, 1))
def files_that_a_rank_opens(writers: int, readers: int, rank: int) -> Card:
    return Card(
        f"A matrix was saved by rows, in equal parts, by {writers} ranks, a file each. {readers} ranks read it, again by "
        f"rows in equal parts. How many files does rank {rank} (from 0) open, if it reads only what overlaps its part?",
        ceil((rank + 1) * writers / readers) - rank * writers // readers,
        "files",
        (
            "in files, its part goes from r a/b to (r+1) a/b",
            f"ceil({rank + 1} * {writers} / {readers}) - {rank} * {writers} // {readers}",
        ),
        0.0,
    )


@problem("11", billions=(70, 405, 1000), nodes=(128, 384), minutes=(5, 10), gigabytes=(1, 2))
def memory_of_saves_under_way(billions: int, nodes: int, minutes: int, gigabytes: int) -> Card:
    return Card(
        f"{billions} billion parameters, 14 bytes each in a checkpoint, are saved every {minutes} minutes by {nodes} "
        f"nodes. Each node copies its part to CPU memory, from where a thread writes it at {gigabytes} GB/s. In which "
        "part of the time, in %, does that memory hold a copy?",
        100 * 14 * billions / nodes / gigabytes / (60 * minutes),
        "%",
        (
            "a node writes 14 P/N bytes at W, once every T",
            f"100 * 14 * {billions} / {nodes} / {gigabytes} / (60 * {minutes})",
        ),
    )


@problem("24", gpus=(256, 1024, 4096, 16384), years=(3, 5), write=(10, 30, 60, 120))
def checkpoint_interval(gpus: int, years: int, write: int) -> Card:
    apart_s = years * 365 * DAY_S / gpus
    return Card(
        f"{gpus} GPUs, each of which fails once in {years} years; a checkpoint stops training for {write} s. "
        "How many minutes between checkpoints lose the least time (Young)?",
        sqrt(2 * write * apart_s) / 60,
        "minutes",
        (
            f"failures are {years} * 365 * 86400 / {gpus} = {apart_s:.6g} s apart",
            "the least of c/t + t/(2 M) is at t = sqrt(2 c M)",
            f"sqrt(2 * {write} * {apart_s:.6g}) / 60",
        ),
    )


@problem("24", every=(10, 20, 40), write=(30, 60), hours=(3, 6, 12), restart=(5, 10))
def time_lost_to_failures(every: int, write: int, hours: int, restart: int) -> Card:
    return Card(
        f"A run saves after every {every} minutes of work, which takes {write} s; it fails every {hours} "
        f"hours, and a restart takes {restart} minutes. About which part of the time is lost, in %: in saves, "
        "in work done twice, in restarts?",
        100 * (write / 60 / every + every / 2 / (60 * hours) + restart / (60 * hours)),
        "%",
        (
            "c/t in saves; half an interval is lost at each failure, t/(2 M); restarts r/M",
            f"100 * ({write}/60/{every} + {every}/2/{60 * hours} + {restart}/{60 * hours})",
        ),
    )


@problem("12", billions=(7, 70, 405), trillions=(2, 15), gpus=(512, 2048, 16384), mfu=(35, 40, 50))
def days_of_a_training(billions: int, trillions: int, gpus: int, mfu: int) -> Card:
    return Card(
        f"{billions} billion parameters are trained on {trillions} trillion tokens by {gpus} GPUs of 989 "
        f"TFLOP/s peak, at an MFU of {mfu} %. How many days does it take?",
        6 * billions * GIGA * trillions * TERA / (gpus * mfu / 100 * 989 * TERA) / DAY_S,
        "days",
        (
            "6 operations a parameter and token: 6 P D/(N MFU C)",
            f"6 * {billions}e9 * {trillions}e12 / ({gpus} * {mfu}/100 * 989e12) / 86400",
        ),
    )


@problem("12", model=((7, 4000), (13, 2100), (70, 380)), percent=(80, 100, 120), peak=(312, 989))
def utilization(model: tuple[int, int], percent: int, peak: int) -> Card:
    billions, usual = model
    tokens = usual * percent // 100 * (1 if peak == 312 else 2)
    return Card(
        f"A dense model of {billions} billion parameters trains at {tokens} tokens a second and GPU, on GPUs "
        f"of {peak} TFLOP/s peak. What is the MFU in %, without attention's own products?",
        100 * 6 * billions * GIGA * tokens / (peak * TERA),
        "%",
        (
            "6 operations a parameter and token, over the peak",
            f"100 * 6 * {billions}e9 * {tokens} / {peak}e12",
        ),
    )


@problem("12", billions=(13, 30, 70, 180), memory=(80, 141, 192), percent=(50, 60))
def fewest_gpus_for_states(billions: int, memory: int, percent: int) -> Card:
    room = memory * percent / 100 * GIGA
    return Card(
        f"ZeRO-3, mixed-precision Adam, {billions} billion parameters, GPUs of {memory} GB, of which states "
        f"may take {percent} %. How many GPUs does it take at least?",
        next(n for n in range(1, 10_000) if model_state_bytes(billions * GIGA, n, 3) <= room),
        "GPUs",
        (
            "16 P/n bytes at most: n >= 16 P over the room, rounded up",
            f"ceil(16 * {billions} / ({memory} * {percent}/100))",
        ),
        0.0,
    )


@problem("15", billions=(7, 13, 30), layers=(32, 40, 64), p=(8, 16, 64))
def peak_of_fully_shard(billions: int, layers: int, p: int) -> Card:
    return Card(
        f"`fully_shard` on each of {layers} equal layers and on the root, {billions} billion parameters in the "
        f"layers, {p} ranks: 16 bytes a parameter are sharded, and two layers are gathered in bf16 at the same "
        "time, one that computes and one that is prefetched. How many GB is that?",
        model_state_bytes(billions, p, 3) + 2 * 2 * billions / layers,
        "GB",
        ("16 P/N + 2 * 2 P/L", f"16 * {billions}/{p} + 2 * 2 * {billions}/{layers}"),
    )


@problem("15", p=(4, 8), rows=(4096, 8192), columns=(4096, 14336))
def bytes_from_rows_to_columns(p: int, rows: int, columns: int) -> Card:
    return Card(
        f"A bf16 DTensor of {rows} x {columns} over {p} ranks is redistributed from Shard(0) to Shard(1), by "
        "an all-to-all. How many MB does a rank send?",
        rows * columns * 2 / p * sent_share("all_to_all", p) / 1e6,
        "MB",
        (
            "a rank has n/p bytes, and keeps a p-th of them: (p-1)/p^2 n",
            f"{rows} * {columns} * 2 * {p - 1}/{p}**2 / 1e6",
        ),
    )


@problem("15", p=(2, 4, 8), chunks=(1, 2, 4), microbatches=(8, 16))
def messages_of_an_interleaved_step(p: int, chunks: int, microbatches: int) -> Card:
    return Card(
        f"Interleaved 1F1B with {p} ranks, {chunks} stages a rank and {microbatches} microbatches. How many "
        "messages are sent between ranks in a step, of activations and of their gradients?",
        2 * microbatches * (p * chunks - 1),
        "messages",
        (
            "p v stages have p v - 1 boundaries, all between different ranks; each is crossed twice by every microbatch",
            f"2 * {microbatches} * ({p} * {chunks} - 1)",
        ),
        0.0,
    )


@problem("17", t=(8, 16, 32), tokens=(4096, 8192), width=(8192, 16384))
def all_reduces_that_leave_the_node(t: int, tokens: int, width: int) -> Card:
    links = links_of(find_machine("h100"), t, 1)
    per_s, slowest = (450, "the node, 450") if links.nodes == 1 else (400, "8 cards for 8 members, 400")
    return Card(
        f"Nodes of 8 GPUs: 450 GB/s inside, and 8 network cards of 50 GB/s. A tensor-parallel group has {t} "
        f"neighbouring GPUs. How many ms do the two all-reduces of a layer's forward take, {tokens} tokens of "
        f"width {width} in bf16, by bytes alone?",
        2 * sent_share("all_reduce", t) * tokens * width * 2 / (per_s * GIGA) * 1e3,
        "ms",
        (
            f"a ring is as fast as its slowest part: {slowest} GB/s",
            "2 all-reduces, each 2(t-1)/t N h e/W",
            f"2 * 2 * {t - 1}/{t} * {tokens} * {width} * 2 / {per_s}e9 * 1e3",
        ),
    )


@problem("17", billions=(30, 70, 405), tp=(4, 8), pp=(2, 4, 16), dp=(4, 8, 32))
def states_on_a_mesh(billions: int, tp: int, pp: int, dp: int) -> Card:
    return Card(
        f"{billions} billion parameters on tp {tp}, pp {pp}, dp {dp} with ZeRO-1, mixed-precision Adam, evenly "
        "cut. How many GB of states does a rank hold?",
        model_state_bytes(billions / (tp * pp), dp, 1),
        "GB",
        ("P/(t p) parameters, 4 + 12/d bytes each", f"{billions} / ({tp} * {pp}) * (4 + 12/{dp})"),
    )


@problem("17", batch=(512, 1024, 2048), dp=(8, 32, 64), pp=(4, 8, 16), microbatch=(1, 2))
def bubble_of_a_mesh(batch: int, dp: int, pp: int, microbatch: int) -> Card:
    m = batch // (dp * microbatch)
    return Card(
        f"A batch of {batch} sequences on dp {dp} and pp {pp}, microbatches of {microbatch}, 1F1B. Which part "
        "of the whole step is bubble, in %?",
        100 * (pp - 1) / (m + pp - 1),
        "%",
        (
            f"m = {batch} / ({dp} * {microbatch}) = {m} microbatches a rank",
            "of the whole time: (p-1)/(m+p-1)",
            f"100 * {pp - 1} / ({m} + {pp - 1})",
        ),
    )


@problem("21", tflop=(80, 120, 160), rate=(400, 500), milliseconds=(500, 600, 900))
def what_products_do_not_explain(tflop: int, rate: int, milliseconds: int) -> Card:
    return Card(
        f"A GPU computes {tflop} TFLOP a step, and its products reach {rate} TFLOP/s. The trace shows steps of "
        f"{milliseconds} ms. Which part of a step, in %, must something other than products explain?",
        100 * (1 - 1000 * tflop / rate / milliseconds),
        "%",
        (
            "products take operations/rate, whatever else happens; the rest is waits and other kernels",
            f"100 * (1 - {tflop} / {rate} * 1000 / {milliseconds})",
        ),
    )


@problem("21", p=(8, 64), compute=(200, 400), slower=(1.5, 2, 3), exposed=(20, 50, 100))
def gain_of_mending_a_straggler(p: int, compute: int, slower: float, exposed: int) -> Card:
    return Card(
        f"In a trace of {p} data-parallel ranks, all compute {compute} ms a step, but one takes {slower:g} times "
        f"as long. Messages add {exposed} ms that nothing hides. How many times as fast is the run when that "
        "rank is mended?",
        (slower * compute + exposed) / (compute + exposed),
        "times",
        (
            "the slowest rank sets the pace, however many others there are",
            f"({slower:g} * {compute} + {exposed}) / ({compute} + {exposed})",
        ),
    )


@problem("21", p=(4, 8), m=(4, 8, 16), compute=(120, 240, 480), pieces=(2, 4))
def time_saved_by_smaller_microbatches(p: int, m: int, compute: int, pieces: int) -> Card:
    return Card(
        f"The trace of a pipeline shows one bubble and nothing else: {p} stages, {m} microbatches, and each rank "
        f"computes {compute} ms a step. Every microbatch is cut into {pieces}, and kernels stay as fast. By how "
        "many ms is a step shorter?",
        compute * (p - 1) / m * (1 - 1 / pieces),
        "ms",
        (
            "the bubble is (p-1)/m of the computing; with k times the microbatches a k-th of that",
            f"{compute} * {p - 1}/{m} * (1 - 1/{pieces})",
        ),
    )


@problem("24", gpus=(1024, 16384), every=(20, 30), write=(2, 5), restart=(5, 10))
def gpu_hours_of_a_failure(gpus: int, every: int, write: int, restart: int) -> Card:
    return Card(
        f"{gpus} GPUs copy their state every {every} minutes, and a thread writes it for {write} minutes more; until "
        f"then the checkpoint does not count. A restart takes {restart} minutes. How many GPU-hours does a failure cost on "
        "average?",
        gpus * (every / 2 + write + restart) / 60,
        "GPU-hours",
        (
            "lost is half an interval, T/2, and W, for what is being written is not there yet; then R",
            f"{gpus} * ({every}/2 + {write} + {restart}) / 60",
        ),
    )
