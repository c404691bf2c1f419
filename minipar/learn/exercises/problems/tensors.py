"""Problems of lessons 04, 05, 13, 16 and 22: matrices and tokens cut over ranks, activations, sixteen bits, grids."""

from __future__ import annotations

from math import ceil, log2

from minipar.cost.activations import bytes_of_units, gpt_layer_bytes
from minipar.cost.collectives import sent_share
from minipar.cost.stages import live_chunks
from minipar.learn.exercises.problems.card import Card, problem

GIGA, TERA = 1e9, 1e12


@problem("04", width=(4096, 8192, 12288), flops=(200, 400, 800), bandwidth=(50, 200, 450))
def largest_tensor_parallel_size(width: int, flops: int, bandwidth: int) -> Card:
    return Card(
        f"Layers of width h = {width} have 12 h^2 weights and two all-reduces of their bf16 activations in the "
        f"forward, on GPUs that reach {flops} TFLOP/s and send {bandwidth} GB/s. Up to which tensor-parallel "
        "size do the messages take at most as long as the products? (No attention core, no latency; it need "
        "not be whole.)",
        1 + 3 * width * bandwidth * GIGA / (flops * TERA),
        "ranks",
        (
            "a token's products: 24 h^2/(t C); its messages: 2 * 2(t-1)/t * 2 h/W",
            "they are equal at t = 1 + 3 h W/C",
            f"1 + 3 * {width} * {bandwidth}e9 / {flops}e12",
        ),
    )


@problem("04", t=(2, 4, 8), width=(4096, 8192), layers=(32, 80), tokens=(2048, 4096, 8192))
def bytes_of_tensor_parallelism(t: int, width: int, layers: int, tokens: int) -> Card:
    return Card(
        f"A Transformer of {layers} layers of width {width}, bf16, is cut over tp = {t}. How many GB does each "
        f"rank send for its layers, forward and backward, for a microbatch of {tokens} tokens?",
        layers * 4 * sent_share("all_reduce", t) * tokens * width * 2 / GIGA,
        "GB",
        (
            "4 all-reduces a layer, of each 2(t-1)/t of the activations",
            f"{layers} * 4 * 2 * {t - 1}/{t} * {tokens} * {width} * 2 / 1e9",
        ),
    )


@problem("04", t=(1, 2, 4, 8), vocabulary=(32000, 128256), tokens=(4096, 8192, 16384))
def logits_of_a_rank(t: int, vocabulary: int, tokens: int) -> Card:
    return Card(
        f"The head of a model with a vocabulary of {vocabulary} is column-parallel over tp = {t}. How many GB "
        f"are a rank's float32 logits of {tokens} tokens?",
        tokens * vocabulary / t * 4 / GIGA,
        "GB",
        ("each rank has V/t columns: 4 N V/t bytes", f"4 * {tokens} * {vocabulary}/{t} / 1e9"),
    )


@problem("05", features=(16384, 28672, 49152), flops=(400, 800), bandwidth=(200, 450))
def largest_size_with_hidden_chunks(features: int, flops: int, bandwidth: int) -> Card:
    return Card(
        f"With sequence parallelism a column-parallel matrix has {features} output features in all. Its "
        "all-gather is cut into one chunk a rank, and each travels behind the product of another, bf16, "
        f"{flops} TFLOP/s, {bandwidth} GB/s. Up to which tp can the messages hide entirely? (It need not be "
        "whole.)",
        features * bandwidth * GIGA / (flops * TERA),
        "ranks",
        (
            "a chunk of n tokens of width h: product 2 n h (F/t)/C, message 2 n h/W",
            "they are equal at t = F W/C",
            f"{features} * {bandwidth}e9 / {flops}e12",
        ),
    )


@problem("05", width=(4096, 8192, 12288), tokens=(2048, 4096, 8192), t=(4, 8))
def activations_of_a_layer(width: int, tokens: int, t: int) -> Card:
    return Card(
        f"A GPT layer of width {width} with flash attention and dropout, bf16, sequence parallelism over tp = "
        f"{t}. How many MB does it keep on each rank for a sample of {tokens} tokens?",
        gpt_layer_bytes(tokens, 1, width, 64, t, True, "selective") / 1e6,
        "MB",
        (
            "34 bytes a token and feature, if no scores are stored; all are divided by t",
            f"34 * {tokens} * {width} / {t} / 1e6",
        ),
    )


@problem("05", width=(4096, 8192), tokens=(4096, 8192), layers=(32, 80), t=(4, 8))
def what_sequence_parallelism_saves(width: int, tokens: int, layers: int, t: int) -> Card:
    plain, split = (gpt_layer_bytes(tokens, 1, width, 64, t, how, "selective") for how in (False, True))
    return Card(
        f"tp = {t} without sequence parallelism keeps 10 bytes a token and feature of each layer whole on "
        "every rank: inputs of norms and matrices, and dropout masks. How many GB does sequence parallelism "
        f"save a rank with {layers} layers of width {width}, for {tokens} tokens?",
        layers * (plain - split) / GIGA,
        "GB",
        (
            "10 s h become 10 s h/t: saved L 10 s h (1 - 1/t)",
            f"{layers} * 10 * {tokens} * {width} * (1 - 1/{t}) / 1e9",
        ),
    )


@problem("13", flops=(200, 400, 600), bandwidth=(12.5, 25, 50))
def width_at_which_offloading_hides(flops: int, bandwidth: float) -> Card:
    return Card(
        f"Each block's bf16 input is carried to CPU memory at {bandwidth:g} GB/s while the block computes at "
        f"{flops} TFLOP/s. A block of width h has 12 h^2 weights. From which width on is that hidden in the "
        "forward, without attention's core?",
        flops * TERA / (12 * bandwidth * GIGA),
        "features",
        (
            "a token: 24 h^2/C of products, 2 h/W of copying",
            "they are equal at h = C/(12 W)",
            f"{flops}e12 / (12 * {bandwidth:g}e9)",
        ),
    )


@problem("13", tokens=(2048, 4096, 8192), t=(4, 8), p=(1, 2, 4))
def activations_of_80_layers(tokens: int, t: int, p: int) -> Card:
    return Card(
        f"A GPT of 80 layers of width 8192, 65 billion parameters, bf16, flash attention and dropout, tp = {t} "
        f"with sequence parallelism, {p} pipeline stages under 1F1B. How many GB of activations do the layers "
        f"of the first stage keep at most, with microbatches of one sample of {tokens} tokens, and many of "
        "them?",
        live_chunks("1f1b", 0, p, 100)
        * 80
        / p
        * gpt_layer_bytes(tokens, 1, 8192, 64, t, True, "selective")
        / GIGA,
        "GB",
        (
            "p microbatches are alive, each in L/p layers: L layers' worth, whatever p is",
            f"80 * 34 * {tokens} * 8192 / {t} / 1e9",
        ),
    )


@problem("13", layers=(32, 48, 96), every=(2, 4, 8), block=(850, 1700), block_input=(50, 100))
def units_of_blocks(layers: int, every: int, block: int, block_input: int) -> Card:
    return Card(
        f"{layers} blocks keep {block} MB each, of which {block_input} MB are the input. They are recomputed "
        f"in units of {every}: only a unit's input is kept. How many GB are alive at most, when a unit has "
        "been computed again?",
        (bytes_of_units(layers, every, block, block_input)[1] - block_input) / 1e3,
        "GB",
        (
            "L/N inputs stay, and the N blocks of one unit, with one of these inputs: (L/N - 1) x + N a",
            f"(({layers}/{every} - 1) * {block_input} + {every} * {block}) / 1e3",
        ),
    )


@problem("16", machine=(("H100", 989, 3.35), ("H200", 989, 4.8), ("B200", 2250, 8.0)), element=(1, 2))
def smallest_product_bound_by_arithmetic(machine: tuple[str, int, float], element: int) -> Card:
    name, flops, terabytes = machine
    peak = flops * 2 // element
    return Card(
        f"A GPU ({name}) computes {peak} TFLOP/s with elements of {element} bytes, and its memory gives "
        f"{terabytes:g} TB/s. From which n on is a product of two n x n matrices bound by arithmetic, if each "
        "matrix is read or written once?",
        3 * element * peak / (2 * terabytes),
        "rows",
        (
            "2 n^3 operations and 3 n^2 elements: 2 n^3/C = 3 n^2 e/W",
            "n = 3 e C/(2 W)",
            f"3 * {element} * {peak}e12 / (2 * {terabytes:g}e12)",
        ),
    )


@problem("16", gradient=(1e-6, 3e-7, 2e-8, 5e-9))
def smallest_loss_scale(gradient: float) -> Card:
    return Card(
        f"Gradients are of the size {gradient:g}. fp16's smallest normal number is 2^-14. Which power of two "
        "is the smallest loss scale that makes them normal? Give the exponent.",
        ceil(-14 - log2(gradient)),
        "(an exponent)",
        (
            "2^k g >= 2^-14, so k >= -14 - log2(g), rounded up",
            f"ceil(-14 - log2({gradient:g}))",
        ),
        0.0,
    )


@problem("16", billions=(1, 7, 70), p=(1, 8, 64), gradient_bytes=(2, 4))
def bytes_beside_sharded_states(billions: int, p: int, gradient_bytes: int) -> Card:
    return Card(
        f"{billions} billion bf16 weights, gradients in {gradient_bytes} bytes, float32 masters and Adam's two "
        f"moments in float32; masters and moments are cut over {p} ranks. How many GB is that on each?",
        (2 + gradient_bytes + 12 / p) * billions,
        "GB",
        (
            "2 of weight, the gradient, and 4 + 4 + 4 over p",
            f"(2 + {gradient_bytes} + 12/{p}) * {billions}",
        ),
    )


@problem("22", q=(4, 8), width=(4096, 8192, 16384))
def rows_from_which_a_grid_sends_less(q: int, width: int) -> Card:
    return Card(
        f"A square matrix of width h = {width} is multiplied by M rows, forward and backward. In 1D, by columns, each of "
        f"t ranks sends 2(t-1)/t M h elements; on a grid of q x q ranks, q = {q}, it sends 3(q-1)(M h + h^2)/q^2. From "
        "how many rows on does the grid send less on as many ranks?",
        3 * width / (2 * q - 1),
        "rows",
        (
            "t - 1 = (q-1)(q+1), so they are equal where 2(q+1) M = 3 (M + h)",
            "M = 3 h/(2 q - 1)",
            f"3 * {width} / (2 * {q} - 1)",
        ),
    )


@problem("22", q=(2, 4, 8), tokens=(8192, 65536), width=(4096, 8192), features=(16384, 32768))
def bytes_of_a_product_on_a_grid(q: int, tokens: int, width: int, features: int) -> Card:
    return Card(
        f"{tokens} tokens of width {width} are multiplied by a matrix with {features} output features, bf16, by SUMMA on "
        f"a grid of {q} x {q}. How many MB does a rank send forward, on average?",
        (q - 1) * (tokens + features) * width * 2 / q**2 / 1e6,
        "MB",
        (
            "each rank's blocks of x and of w go to the q-1 others of its row, and of its column",
            f"{q - 1} * ({tokens} * {width} + {width} * {features}) / {q}**2 * 2 / 1e6",
        ),
    )


@problem("22", p=(2, 4, 8), tokens=(16384, 65536), width=(4096, 8192))
def what_a_rank_of_a_cube_holds(p: int, tokens: int, width: int) -> Card:
    return Card(
        f"A matrix from {width} to {width} features and {tokens} tokens, bf16, on a cube of {p} x {p} x {p} ranks. How "
        "many MB does a rank hold, of the weight, the input and the output together?",
        (width**2 + 2 * tokens * width) * 2 / p**3 / 1e6,
        "MB",
        (
            "nothing is held twice: (D F + M D + M F)/t, two bytes each",
            f"({width}**2 + 2 * {tokens} * {width}) * 2 / {p}**3 / 1e6",
        ),
    )
