"""Each problem on paper, answered another way: by counting, by searching, by simulating, never by its own formula.

ANOTHER_WAY has a function of each problem's name and numbers.
"""

import itertools

import torch

from minipar.cost.collectives import collective_s
from minipar.cost.stages import idle_s
from minipar.extras.schedules.sequence_slices import seq1f1b
from minipar.extras.schedules.two_directions import chimera
from minipar.extras.tensor_grids import linear_costs
from minipar.schedules import Costs, interleaved, one_f_one_b, simulate, zb_h1, zb_h2

ANOTHER_WAY = {}
T, G = 1e12, 1e9


def another_way(function):
    ANOTHER_WAY[function.__name__] = function
    return function


def where_equal(rising, falling, low=1e-9, high=1e12):
    """The x at which a rising function meets a falling one, by bisection of its logarithm."""
    for _ in range(200):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if rising(middle) > falling(middle) else (middle, high)
    return low


def ring_bytes(p, num_bytes, times=1):
    """What a rank sends in `times` passes around a ring, chunk by chunk."""
    return sum(num_bytes / p for _ in range(times) for _ in range(p - 1))


def seconds_of_ring(p, num_bytes, bandwidth, times=2):
    return ring_bytes(p, num_bytes, times) / bandwidth


def bytes_of(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta").nbytes


# 00, 01, 14: messages -------------------------------------------------------------------------------------------------


@another_way
def message_of_half_bandwidth(latency, bandwidth):
    def rate(kilobytes):
        return kilobytes * 1e3 / (latency * 1e-6 + kilobytes * 1e3 / (bandwidth * G))

    return where_equal(rate, lambda kilobytes: bandwidth * G / 2)


@another_way
def gain_of_one_bucket(tensors, kilobytes, latency, bandwidth):
    apart = sum(latency * 1e-6 + kilobytes * 1e3 / (bandwidth * G) for _ in range(tensors))
    return apart / (apart - (tensors - 1) * latency * 1e-6)


@another_way
def sum_on_one_rank(p, megabytes, bandwidth):
    return sum(megabytes / 1e3 / bandwidth * 1e3 for _ in ("in", "out") for _ in range(1, p))


@another_way
def ring_of_half_latency(p, latency, bandwidth):
    return where_equal(
        lambda megabytes: collective_s("all_reduce", p, megabytes * 1e6, 0, 1 / (bandwidth * G)),
        lambda megabytes: collective_s("all_reduce", p, megabytes * 1e6, latency * 1e-6, 0),
    )


@another_way
def all_reduce_over_nodes(nodes, gigabytes, inside, outside):
    first_and_last = seconds_of_ring(8, gigabytes, inside)
    return (first_and_last + seconds_of_ring(nodes, gigabytes / 8, outside)) * 1e3


@another_way
def bus_bandwidth(p, gigabytes, milliseconds):
    return ring_bytes(p, gigabytes, 2) * 1e3 / milliseconds


@another_way
def slowest_useful_codec(p, ratio, bandwidth):
    plain, short = (seconds_of_ring(p, num_bytes, bandwidth) for num_bytes in (1, 1 / ratio))
    return where_equal(lambda rate: plain, lambda rate: short + 1 / rate)


@another_way
def bytes_of_powersgd(rows, columns, rank):
    return bytes_of(rows, columns) / (bytes_of(rows, rank) + bytes_of(columns, rank))


@another_way
def ranks_at_which_top_k_loses(percent, value_bytes):
    return where_equal(
        lambda p: (p - 1) * percent / 100 * (value_bytes + 4),
        lambda p: 2 * (p - 1) / p * value_bytes,
        low=1.01,
    )


# 02, 03, 20: data parallelism -----------------------------------------------------------------------------------------

P = 13e9  # parameters, where the answer does not depend on them


@another_way
def largest_data_parallel_size(millions, flops, bandwidth):
    return where_equal(
        lambda n: collective_s("all_reduce", n, 2 * P, 0, 1 / (bandwidth * G)),
        lambda n: 4 * P * millions * 1e6 / n / (flops * T),
        low=1.0001,
    )


@another_way
def hidden_part_of_an_all_reduce(tokens, p, flops, bandwidth):
    return 100 * (4 * P * tokens / (flops * T)) / seconds_of_ring(p, 2 * P, bandwidth * G)


@another_way
def latency_of_all_buckets(billions, p, latency, megabytes):
    left, total = 2 * billions * 1000, 0.0
    while left > 0:
        left -= megabytes
        total += collective_s("all_reduce", p, 0, latency * 1e-6, 0)
    return total * 1e3


@another_way
def tokens_that_hide_a_gather(p, flops, bandwidth):
    gather = seconds_of_ring(p, 2 * P, bandwidth * G, times=1)
    return where_equal(lambda tokens: 2 * P * tokens / (flops * T), lambda tokens: gather)


@another_way
def memory_of_a_model(billions, p, zero):
    first_stage_that_cuts = {
        "weight": (2, 3),
        "gradient": (2, 2),
        "master": (4, 1),
        "mean": (4, 1),
        "variance": (4, 1),
    }
    return sum(
        size * billions / (p if zero >= stage else 1) for size, stage in first_stage_that_cuts.values()
    )


@another_way
def bytes_of_zero3(billions, p, microbatches):
    gathers = sum(ring_bytes(p, 2 * billions) for _ in range(microbatches) for _ in ("forward", "backward"))
    return gathers + ring_bytes(p, 2 * billions)


@another_way
def loaders_that_keep_up(read, step):
    return next(k for k in itertools.count(1) if k * step >= read)


@another_way
def noise_scale_of_two_batches(small, large, small_norm, large_norm):
    both = torch.tensor([[1, 1 / small], [1, 1 / large]], dtype=torch.float64)
    squared, trace = torch.linalg.solve(both, torch.tensor([small_norm, large_norm], dtype=torch.float64))
    return (trace / squared).item()


@another_way
def data_that_a_larger_batch_costs(noise_scale, batch):
    def samples(size):
        return size / (
            1 / (1 + noise_scale / size)
        )  # steps that each gain less than one, times their samples

    return samples(batch) / samples(1e-6)


# 04, 05, 13, 16: tensors ----------------------------------------------------------------------------------------------


@another_way
def largest_tensor_parallel_size(width, flops, bandwidth):
    tokens = 1000
    return where_equal(
        lambda t: 2 * collective_s("all_reduce", t, 2 * tokens * width, 0, 1 / (bandwidth * G)),
        lambda t: 2 * 12 * width**2 * tokens / t / (flops * T),
        low=1.0001,
    )


@another_way
def bytes_of_tensor_parallelism(t, width, layers, tokens):
    blocks = [(block, way) for block in ("attention", "mlp") for way in ("forward", "backward")]
    return sum(ring_bytes(t, bytes_of(tokens, width), 2) for _ in range(layers) for _ in blocks) / G


@another_way
def logits_of_a_rank(t, vocabulary, tokens):
    return bytes_of(tokens, vocabulary // t, dtype=torch.float32) / G


@another_way
def rows_from_which_a_grid_sends_less(q, width):
    def grid_sends_less(rows):
        one, two = (
            cost(q * q, rows, width, width).sent
            for cost in (linear_costs.column_cost, linear_costs.summa_cost)
        )
        return two < one

    return next(rows for rows in range(width // 10, 10 * width) if grid_sends_less(rows))


@another_way
def bytes_of_a_product_on_a_grid(q, tokens, width, features):
    blocks = bytes_of(tokens // q, width // q), bytes_of(features // q, width // q)
    sent = sum(
        block for block in blocks for _root in range(q) for _line in range(q) for _receiver in range(q - 1)
    )
    return sent / q**2 / 1e6


@another_way
def what_a_rank_of_a_cube_holds(p, tokens, width):
    x, w = bytes_of(tokens // p**2, width // p), bytes_of(width // p**2, width // p)
    return (x + w + x) / 1e6


@another_way
def largest_size_with_hidden_chunks(features, flops, bandwidth):
    width, tokens = 4096, 8192
    return where_equal(
        lambda t: 2 * tokens / t * width / (bandwidth * G),
        lambda t: 2 * tokens / t * width * features / t / (flops * T),
    )


KEPT = {  # bytes a token and feature of a GPT layer with flash attention: where, and of what
    "outside": {"inputs of two norms": 4, "inputs of two matrices": 4, "two masks": 2},
    "inside": {
        "q, k, v": 6,
        "input of the output projection": 2,
        "input of GELU": 8,
        "input of its matrix": 8,
    },
}


@another_way
def activations_of_a_layer(width, tokens, t):
    return sum(bytes * tokens // t * width for part in KEPT.values() for bytes in part.values()) / 1e6


@another_way
def what_sequence_parallelism_saves(width, tokens, layers, t):
    whole = sum(KEPT["outside"].values()) * tokens * width
    return layers * (whole - whole / t) / G


@another_way
def width_at_which_offloading_hides(flops, bandwidth):
    return where_equal(
        lambda h: 2 * 12 * h**2 / (flops * T), lambda h: bytes_of(1, int(1e6)) / 1e6 * h / (bandwidth * G)
    )


@another_way
def activations_of_80_layers(tokens, t, p):
    live = simulate(one_f_one_b(p, 16)).peak_live[0]
    return live * 80 / p * activations_of_a_layer(8192, tokens, t) / 1e3


@another_way
def units_of_blocks(layers, every, block, block_input):
    running = range(layers - every, layers)  # the last unit, whose backward comes first
    kept = sum(block_input for layer in range(layers) if layer % every == 0 and layer not in running)
    return (kept + sum(block for _ in running)) / 1e3


@another_way
def smallest_product_bound_by_arithmetic(machine, element):
    _, flops, terabytes = machine
    rate = flops * 2 // element

    def takes_longer(n):
        return 2 * n**3 / (rate * T) >= 3 * n * n * element / (terabytes * T)

    return next(n for n in itertools.count(1) if takes_longer(n))


@another_way
def smallest_loss_scale(gradient):
    normal = torch.finfo(torch.float16).smallest_normal
    return next(k for k in range(100) if gradient * 2**k >= normal)


@another_way
def bytes_beside_sharded_states(billions, p, gradient_bytes):
    return billions * (2 + gradient_bytes) + sum(4 * billions / p for _ in ("master", "mean", "variance"))


# 06, 07: pipelines ----------------------------------------------------------------------------------------------------


@another_way
def message_beside_a_stage(width, layers, flops, bandwidth):
    tokens = 4096
    forward = sum(2 * 12 * width**2 * tokens for _ in range(layers)) / (flops * T)
    return 100 * bytes_of(tokens, width) / (bandwidth * G) / forward


@another_way
def microbatches_for_a_bubble(p, percent):
    return next(m for m in itertools.count(1) if idle_s("1f1b", p, 1, 1, 1) / (3 * m) <= percent / 100 + 1e-9)


@another_way
def activations_under_1f1b(p, rank, layers, megabytes):
    return simulate(one_f_one_b(p, 32)).peak_live[rank] * layers / p * megabytes / 1e3


@another_way
def input_gradients_against_weight_gradients(tokens, width):
    matrices = 2 * 12 * width**2
    core = sum(2 * tokens * width for _ in ("dq", "dk", "dv", "gradient of the scores"))
    return (matrices + core) / matrices


@another_way
def idle_time_of_zb_h1(p, forward, input_gradient, weight_gradient):
    timeline = simulate(zb_h1(p, 4 * p), Costs(forward, input_gradient, weight_gradient))
    return timeline.longest_own_span - timeline.ideal


@another_way
def memory_for_no_bubble(p, gigabytes):
    split, whole = (simulate(schedule(p, 3 * p)).peak_live[0] for schedule in (zb_h2, one_f_one_b))
    return (split - whole) * gigabytes


@another_way
def slices_for_a_bubble(p, m, percent):
    bubbles = (simulate(seq1f1b(p, m, s)).bubble_over_ideal for s in itertools.count(1))
    return 1 + sum(1 for _ in itertools.takewhile(lambda bubble: bubble > percent / 100 + 1e-9, bubbles))


@another_way
def memory_under_slices(p, slices, gigabytes):
    return simulate(seq1f1b(p, 2 * p, slices)).peak_live[0] * gigabytes / slices


@another_way
def idle_time_of_chimera(p, rounds, forward):
    timeline = simulate(chimera(p, p * rounds), Costs(*[forward] * 3))
    return timeline.longest_own_span - timeline.ideal


# 08, 09: experts and long sequences -----------------------------------------------------------------------------------


@another_way
def expert_width_that_pays_for_its_messages(ep, flops, bandwidth):
    width, rows = 4096, 1000
    sent = 2 * collective_s("all_to_all", ep, bytes_of(rows, width), 0, 1 / (bandwidth * G))
    return where_equal(lambda f: sum(2 * rows * width * f for _ in range(3)) / (flops * T), lambda f: sent)


@another_way
def dropped_tokens(load, factor):
    room = [-(-sum(load) * factor // len(load))] * len(load)
    dropped = 0
    for expert in (expert for expert, rows in enumerate(load) for _ in range(rows)):
        room[expert] -= 1
        dropped += room[expert] < 0
    return dropped


@another_way
def bytes_of_a_layer_of_experts(ep, tokens, width, top_k):
    to_each = bytes_of(tokens * top_k // ep, width)
    passes = ("dispatch", "combine", "gradients of what was combined", "gradients of what was dispatched")
    return sum(to_each for _ in passes for rank in range(ep) if rank != 0) / 1e6


@another_way
def tokens_for_ring_attention(flops, bandwidth, group):
    width = 1024
    return where_equal(
        lambda n: (2 * n * n * width + 2 * n * n * width) / (flops * T),
        lambda n: 2 * 2 * n * width / group / (bandwidth * G),
    )


@another_way
def gain_of_zigzag(p):
    piece = 4096  # tokens of half a part
    parts = {
        "contiguous": [(2 * r, 2 * r + 1) for r in range(p)],
        "zigzag": [(r, 2 * p - 1 - r) for r in range(p)],
    }

    def scores(query, key):
        return piece * piece if key < query else piece * (piece + 1) / 2 if key == query else 0

    def steps(pieces):
        for step in range(p):
            yield max(
                sum(scores(q, k) for q in pieces[rank] for k in pieces[(rank - step) % p])
                for rank in range(p)
            )

    return sum(steps(parts["contiguous"])) / sum(steps(parts["zigzag"]))


@another_way
def bytes_of_ulysses(p, tokens, heads):
    queries, keys = heads
    tensors = (queries, keys, keys, queries)
    return (
        sum(bytes_of(tokens // p, number // p, 128) for number in tensors for rank in range(p) if rank != 0)
        / 1e6
    )


# 10, 11, 12, 15, 17: runs ---------------------------------------------------------------------------------------------


@another_way
def best_split_of_fsdp_and_tensor_parallelism(millions, gpus, features):
    def sent(x):
        return 4 * features * x / gpus + 4 * millions * 1e6 / x

    return min((x / 4 for x in range(4, 40_000)), key=sent)


@another_way
def rank_at_a_place(pp, dp, tp, stage, replica, part):
    return list(itertools.product(range(pp), range(dp), range(tp))).index((stage, replica, part))


@another_way
def groups_of_a_mesh(pp, dp, tp):
    places = list(itertools.product(range(pp), range(dp), range(tp)))
    return len({(axis, place[:axis] + place[axis + 1 :]) for place in places for axis in range(3)})


@another_way
def seconds_of_a_save(billions, writers, gigabytes):
    return sum(size * billions / writers for size in (2, 4, 4, 4)) / gigabytes


@another_way
def files_that_a_rank_opens(writers, readers, rank):
    rows = range(writers * rank, writers * (rank + 1))  # of writers * readers
    return len({row // readers for row in rows})


@another_way
def memory_of_saves_under_way(billions, nodes, minutes, gigabytes):
    file = sum(size * billions for size in (2, 4, 4, 4)) / nodes
    moments = range(60 * minutes * 1000)  # ms
    return 100 * sum(gigabytes * ms / 1000 < file for ms in moments) / len(moments)


@another_way
def checkpoint_interval(gpus, years, write):
    apart = years * 365 * 24 * 60 / gpus  # minutes
    return min((t / 20 for t in range(1, 200_000)), key=lambda t: write / 60 / t + t / (2 * apart))


@another_way
def time_lost_to_failures(every, write, hours, restart):
    failures = 1000
    saves = failures * hours * 60 / every * write / 60
    twice = sum(every * (failure + 0.5) / failures for failure in range(failures))  # evenly between two saves
    return 100 * (saves + twice + failures * restart) / (failures * hours * 60)


@another_way
def gpu_hours_of_a_failure(gpus, every, write, restart):
    moments = [every * (n + 0.5) / 1000 for n in range(1000)]  # since the last copy was made
    lost = [since if since >= write else since + every for since in moments]
    return gpus * (sum(lost) / len(lost) + restart) / 60


@another_way
def days_of_a_training(billions, trillions, gpus, mfu):
    forward, backward = 2 * billions * G, 4 * billions * G
    tokens_a_day = 24 * 3600 * gpus * 989 * T * mfu / 100 / (forward + backward)
    return trillions * T / tokens_a_day


@another_way
def utilization(model, percent, peak):
    billions, usual = model
    tokens = usual * percent / 100 * (2 if peak == 989 else 1)
    best = peak * T / sum(operations * billions * G for operations in (2, 2, 2))  # forward, and two gradients
    return 100 * int(tokens) / best


@another_way
def fewest_gpus_for_states(billions, memory, percent):
    room = memory * percent / 100
    return next(n for n in itertools.count(1) if sum(size * billions / n for size in (2, 2, 4, 4, 4)) <= room)


@another_way
def peak_of_fully_shard(billions, layers, p):
    sharded = sum(16 * billions / layers / p for _ in range(layers))
    return sharded + sum(2 * billions / layers for _ in ("computes", "prefetched"))


@another_way
def bytes_from_rows_to_columns(p, rows, columns):
    return sum(bytes_of(rows // p, columns // p) for rank in range(p) if rank != 0) / 1e6


@another_way
def messages_of_an_interleaved_step(p, chunks, microbatches):
    schedule = interleaved(p, microbatches, chunks) if chunks > 1 else one_f_one_b(p, microbatches)
    return sum(
        schedule.stage_rank[need.stage] != rank
        for rank, actions in enumerate(schedule.actions)
        for action in actions
        for need in schedule.needs(action)
    )


@another_way
def all_reduces_that_leave_the_node(t, tokens, width):
    members_on_a_node = min(t, 8)
    rate = 450 if t == members_on_a_node else min(450, 50 * members_on_a_node)
    return sum(seconds_of_ring(t, bytes_of(tokens, width), rate * G) for _ in ("attention", "mlp")) * 1e3


@another_way
def states_on_a_mesh(billions, tp, pp, dp):
    of_rank = billions / tp / pp
    return sum(size * of_rank for size in (2, 2)) + sum(size * of_rank / dp for size in (4, 4, 4))


@another_way
def bubble_of_a_mesh(batch, dp, pp, microbatch):
    microbatches = len(range(0, batch // dp, microbatch))
    return 100 * simulate(one_f_one_b(pp, microbatches)).bubble_over_total


# 18, 19: serving ------------------------------------------------------------------------------------------------------


@another_way
def least_time_of_a_step(billions, terabytes, batch, context, kilobytes):
    caches = sum(context * kilobytes / 1e6 for _ in range(batch))
    return (2 * billions + caches) / terabytes


@another_way
def cache_of_a_request(model, context):
    _, layers, kv_heads = model
    return sum(bytes_of(2, kv_heads, context, 128) for _ in range(layers)) / 1e6


@another_way
def tokens_of_a_guessing_step(guesses, percent):
    accepted = percent / 100
    chances = [accepted**k * (1 - accepted) for k in range(guesses)] + [accepted**guesses]
    assert abs(sum(chances) - 1) < 1e-12
    return sum(chance * (k + 1) for k, chance in enumerate(chances))


@another_way
def requests_in_flight(rate, answer, milliseconds):
    stays = answer * milliseconds  # ms
    arrivals = [1000 / rate * i for i in range(20 * rate + rate * stays // 1000)]
    moments = [stays + ms for ms in range(0, 5000, 7)]
    return sum(sum(at <= now < at + stays for at in arrivals) for now in moments) / len(moments)


@another_way
def idle_places_of_a_static_batch(lengths):
    places = [step < length for step in range(max(lengths)) for length in lengths]
    return 100 * places.count(False) / len(places)


@another_way
def first_token_of_a_long_prompt(prompt, budget, decodes, milliseconds):
    elapsed = 0
    while prompt > 0:
        prompt -= budget - decodes
        elapsed += milliseconds
    return elapsed


@another_way
def what_products_do_not_explain(tflop, rate, milliseconds):
    left = milliseconds - 1e3 * (tflop * T) / (rate * T)
    return 100 * left / milliseconds


@another_way
def gain_of_mending_a_straggler(p, compute, slower, exposed):
    step, mended = (max([compute] * (p - 1) + [last]) + exposed for last in (slower * compute, compute))
    return step / mended


@another_way
def time_saved_by_smaller_microbatches(p, m, compute, pieces):
    before, after = (
        simulate(one_f_one_b(p, k), Costs(*[compute / k / 3] * 3)).makespan for k in (m, m * pieces)
    )
    return before - after
