"""Plausible wrong answers: a puzzle's known answer with one fragment replaced, and the words that name the fault."""

from typing import NamedTuple

from minipar.learn.puzzles.registry import PUZZLES


class Wrong(NamedTuple):
    puzzle: str
    old: str  # "" replaces all of the answer
    new: str
    words: str


def source_of(wrong: Wrong) -> str:
    """Return the wrong program: the fragment must be in the known answer."""
    if not wrong.old:
        return wrong.new
    answer = PUZZLES[wrong.puzzle].answer
    assert wrong.old in answer, wrong
    return answer.replace(wrong.old, wrong.new)


SEQUENTIAL_PIPELINE = """\
async def program(comm, microbatches, forward, backward):
    stage, last, gradients = comm.rank, comm.size - 1, 0
    for m in range(len(microbatches)):
        x = microbatches[m] if stage == 0 else await comm.recv(stage - 1)
        output, saved = await forward(x)
        if stage < last:
            await comm.send(output, stage + 1)
        dy = None if stage == last else await comm.recv(stage + 1)
        dx, gradient = await backward(saved, dy)
        if stage > 0:
            await comm.send(dx, stage - 1)
        gradients = gradients + gradient
        del saved
    return gradients
"""

KEPT_WEIGHTS = """\
async def program(comm, shards, x, forward, backward):
    layers = range(len(shards))
    weights = [await comm.all_gather(shard) for shard in shards]
    for layer in layers:
        x = await forward(layer, weights[layer], x)
    gradients, dx = {}, x
    for layer in reversed(layers):
        dx, gradient = await backward(layer, weights[layer], dx)
        gradients[layer] = await comm.reduce_scatter(gradient) / comm.size
    return [gradients[layer] for layer in layers]
"""

GATHERED_HIDDEN = """\
async def program(comm, x, up, down, matmul, gelu):
    hidden = gelu(await matmul(x, up.columns(comm.rank)))
    hidden = await comm.all_gather(hidden)
    return await comm.all_gather(await matmul(hidden, down.columns(comm.rank)))
"""

GATHERED_KEYS = """\
async def program(comm, q, kv, attend):
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    for other in others:
        await comm.send(kv, other)
    blocks, output = [kv], None
    for other in others:
        blocks.append(await comm.recv(other))
    for block in blocks:
        output = await attend(output, q, block)
    return output
"""

NOTHING_HIDDEN = """\
async def program(comm, num_layers, backward):
    gradients = []
    for layer in reversed(range(num_layers)):
        gradient = await comm.all_reduce(await backward(layer))
        gradients.insert(0, gradient / comm.size)
    return gradients
"""

WRONG_ANSWERS = [
    Wrong("naive", "total = gradient\n", "total = gradient + gradient\n", "the part of rank 0 comes twice"),
    Wrong(
        "naive",
        "for other in others:\n        total",
        "for other in others[1:]:\n        total",
        "the part of rank 1 is missing",
    ),
    Wrong("naive", "await comm.send", "comm.send", "never awaits comm.send"),
    Wrong("naive", "if rank != comm.rank", "", "rank 0 sends to itself"),
    Wrong(
        "naive",
        "",
        "async def program(comm, gradient):\n    total = gradient\n    for other in range(comm.size):\n"
        "        if other != comm.rank:\n            total = total + await comm.recv(other)\n"
        "            await comm.send(gradient, other)\n    return total\n",
        "rank 0 waits in line 5 for a message from rank 1; rank 1 waits in line 5 for a message from rank 0",
    ),
    Wrong(
        "ring",
        "range(p - 1):\n        mine, theirs = (comm.rank - step)",
        "range(p - 2):\n        mine, theirs = (comm.rank - step)",
        "the parts of rank 0, rank 1 and rank 2 are missing",
    ),
    Wrong(
        "ring",
        "chunks[theirs] = await",
        "chunks[theirs] = chunks[theirs] + await",
        "chunk 0, the part of rank 0 comes twice",
    ),
    Wrong(
        "ring",
        "await comm.send(chunks[mine], after)",
        "await comm.send(chunks[mine], before)",
        "it can send to rank 1 only",
    ),
    Wrong(
        "ring",
        "(comm.rank - step - 1) % p",
        "(comm.rank - step + 1) % p",
        "adds chunk 3 of the gradient to chunk 1 of the gradient, which are different",
    ),
    Wrong(
        "ring",
        "",
        "async def program(comm, gradient):\n    p, total = comm.size, gradient\n    for step in range(p - 1):\n"
        "        await comm.send(gradient, (comm.rank + 1) % p)\n        gradient = await comm.recv((comm.rank - 1) % p)\n"
        "        total = total + gradient\n    return total\n",
        "rank 0 sends 360 MB; 180 MB is enough",
    ),
    Wrong(
        "halves", "total = chunks[comm.rank]", "total = chunks[0]", "adds chunk 1 of the gradient to chunk 0"
    ),
    Wrong(
        "halves",
        "chunks[comm.rank]\n    for",
        "chunks[comm.rank]\n    return total\n    for",
        "parts of rank 1, rank 2 and rank 3 are missing",
    ),
    Wrong("halves", "comm.join(chunks)", "comm.join(chunks[::-1])", "in the order [3, 2, 1, 0]"),
    Wrong(
        "halves",
        "chunks[other] = await comm.recv(other)",
        "chunks.append(await comm.recv(other))",
        "chunk 0 is there 4 times",
    ),
    Wrong(
        "halves",
        "await comm.send(chunks[other], other)",
        "await comm.send(value, other)",
        "different elements",
    ),
    Wrong("overlap", "", NOTHING_HIDDEN, "takes 30.64 ms; 19.66 ms is enough"),
    Wrong(
        "overlap",
        "[await handles[layer] / comm.size for layer in range(num_layers)]",
        "[await h / comm.size for h in handles.values()]",
        "gradient of layer 3 at place 0",
    ),
    Wrong("overlap", " / comm.size", "", "a sum, where the average is asked for; divide by 4"),
    Wrong(
        "overlap",
        "[await handles[layer] / comm.size for",
        "[handles[layer] for",
        "something that was not awaited",
    ),
    Wrong(
        "overlap",
        "comm.all_reduce(gradient))",
        "comm.all_reduce(gradient / comm.size))",
        "everything counts 1/16, and should count 1/4: it was divided twice",
    ),
    Wrong(
        "zero2",
        "await comm.reduce_scatter(gradient)",
        "(await comm.all_reduce(gradient)).chunks(comm.size)[comm.rank]",
        "rank 0 sends 1080 MB",
    ),
    Wrong(
        "zero2",
        "shards[layer] = await comm.reduce_scatter(gradient)\n",
        "shards[layer] = gradient\n"
        "    for layer in shards:\n        shards[layer] = await comm.reduce_scatter(shards[layer])\n",
        "rank 0 holds",
    ),
    Wrong(
        "zero2",
        "shards.pop(layer) / comm.size",
        "shards.pop(layer)",
        "the part of rank 0 counts 1, and should count 1/4",
    ),
    Wrong("zero2", "[comm.rank]\n", "[0]\n", "which is not their gradient"),
    Wrong("zero2", "await comm.all_gather(new)", "new", "chunk 1 is missing"),
    Wrong("fsdp", "", KEPT_WEIGHTS, "rank 0 holds"),
    Wrong(
        "fsdp",
        "weights = await comm.all_gather(shards[layer])\n        x",
        "weights = shards[layer]\n        x",
        "needs its whole weights, and is given chunk 0 of",
    ),
    Wrong(
        "fsdp",
        "for layer in reversed(layers)",
        "for layer in layers",
        "the backward of layer 0 needs the gradient by the input of layer 1",
    ),
    Wrong(
        "fsdp",
        "await comm.reduce_scatter(gradient)",
        "(await comm.all_reduce(gradient)).chunks(comm.size)[comm.rank]",
        "rank 0 sends 2160 MB",
    ),
    Wrong(
        "fsdp", "await comm.reduce_scatter(gradient)", "gradient.chunks(comm.size)[comm.rank]", "are missing"
    ),
    Wrong("1f1b", "min(last - stage, count)", "count", "rank 0 holds"),
    Wrong("1f1b", "", SEQUENTIAL_PIPELINE, "takes 96 ms; 33 ms is enough"),
    Wrong(
        "1f1b",
        "        if stage > 0:\n            await comm.send(dx",
        "        if stage > 1:\n            await comm.send(dx",
        "rank 0 waits in line 12 for a message from rank 1; rank 1 waits in line 6",
    ),
    Wrong(
        "1f1b",
        "saved.pop(m)",
        "saved.pop(max(saved))",
        "the activations of microbatch 1, and the gradient of microbatch 0",
    ),
    Wrong("1f1b", "min(last - stage, count)", "min(last - stage, count) + 1", "rank 0 holds"),
    Wrong("mlp", "", GATHERED_HIDDEN, "rank 0 sends 45 MB; 18 MB is enough"),
    Wrong("mlp", "return await comm.all_reduce(await", "return (await", "are missing"),
    Wrong(
        "mlp",
        "matmul(x, up.columns(comm.rank))",
        "matmul(x.chunks(comm.size)[comm.rank], up.rows(comm.rank))",
        "gelu of a partial sum",
    ),
    Wrong(
        "mlp",
        "down.rows(comm.rank)",
        "down.columns(comm.rank)",
        "multiply all features, and here is only chunk 0",
    ),
    Wrong(
        "mlp",
        "down.rows(comm.rank)",
        "down.rows(0)",
        "rows 0 of the weight down multiply chunk 0 of the features, and here is chunk 1",
    ),
    Wrong("ring-attention", "", GATHERED_KEYS, "rank 0 holds"),
    Wrong("ring-attention", "range(p):", "range(1, p):", "of rank 1 is missing"),
    Wrong(
        "ring-attention",
        "        if step < p - 1:\n            await comm.send",
        "        if step < p:\n            await comm.send",
        "that rank 1 never receives",
    ),
    Wrong(
        "ring-attention",
        "            kv = await",
        "            await",
        "the parts of the keys and values of rank 1",
    ),
    Wrong(
        "ring-attention",
        "",
        "async def program(comm, q, kv, attend):\n    p = comm.size\n    output = await attend(None, q, kv)\n"
        "    for step in range(p - 1):\n        await comm.send(kv, (comm.rank + 1) % p)\n"
        "        kv = await comm.recv((comm.rank - 1) % p)\n        output = await attend(output, q, kv)\n"
        "    return output\n",
        "takes 18.03 ms; 12 ms is enough",
    ),
    Wrong(
        "mesh",
        "await comm.all_reduce(await forward(x), tp_group)",
        "await forward(x)",
        "is a partial sum: the part of tensor shard 1 is missing",
    ),
    Wrong(
        "mesh",
        "[(stage * dp + d) * tp + shard for d in range(dp)]",
        "list(range(comm.size))",
        "adds the gradient of shard 1 of stage 1 to the gradient of shard 0",
    ),
    Wrong("mesh", " / dp", "", "divide by 2"),
    Wrong(
        "mesh",
        "[comm.rank - shard + t for t in range(tp)]",
        "[0, 1]",
        "rank 2 calls all_reduce with the group [0, 1]",
    ),
    Wrong("mesh", "comm.rank + dp * tp", "comm.rank + tp", "deadlock"),
]
