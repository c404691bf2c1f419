"""A program for torchrun, on two hosts of two ranks: what crosses the link between them. Writes one JSON file.

python -m torch.distributed.run ... -m tests.across_hosts DEVICE FILE
"""

import json
import sys
import time
from functools import partial
from pathlib import Path

import torch

import minipar
from minipar.comm import hierarchical, ring
from minipar.comm.objects import gather_objects
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.mesh import Mesh
from minipar.train.data.text import load_text
from minipar.train.parallelize import parallelize
from minipar.train.step import train_step

ELEMS = 1 << 20  # 4 MiB to be summed
STEPS = 3
MODEL = ModelConfig(dim=64, num_layers=2, num_heads=4, max_seq_len=64)
CONFIG = TrainConfig(model=MODEL, dp=2, tp=2, batch_size=16, seq_len=64)


def main(device: str, file: str) -> None:
    torch.set_num_threads(1)
    world = minipar.init_from_env(timeout_s=30)
    mixed = world.subgroup((0, 2, 1, 3), "neighbours on different hosts")
    found = {
        "ring": all_reduced(world, device, ring.all_reduce),
        "hierarchical": all_reduced(world, device, hierarchical.all_reduce),
        "hierarchical, hosts mistaken": all_reduced(
            mixed, device, partial(hierarchical.all_reduce, node_size=2)
        ),
        "tp inside": stepped(world, device),
        "tp across": stepped(mixed, device),
    }
    everywhere = gather_objects(world, found)
    if world.rank == 0:
        Path(file).write_text(json.dumps(everywhere))


def counted(world, device: str, work) -> dict:
    """Bytes that leave this host by the link while all do this work, and how long it takes."""
    world.barrier()
    before = bytes_out(device)
    world.barrier()  # everyone has looked
    start_s = time.perf_counter()
    work()
    world.barrier()
    return {"bytes": bytes_out(device) - before, "seconds": time.perf_counter() - start_s}


def bytes_out(device: str) -> int:
    return int(Path(f"/sys/class/net/{device}/statistics/tx_bytes").read_text())


def all_reduced(world, device: str, all_reduce) -> dict:
    x = torch.full((ELEMS,), float(world.rank))
    all_reduce(world, x)  # connections are made
    found = counted(world, device, lambda: all_reduce(world, x, out=x))
    assert x.unique().tolist() == [6.0]
    return found


def stepped(world, device: str) -> dict:
    """Training steps; besides, what the ledgers say was sent over tp and over dp."""
    mesh, text = Mesh(world, **CONFIG.mesh_sizes), load_text(None)
    replica = parallelize(CONFIG, mesh, world.device)
    train_step(world, replica, CONFIG, text, 0)
    comms = {"tp": mesh.comm("tp"), "dp": mesh.comm("dp", "cp")}
    sent = {axis: comm.traffic.sent_bytes for axis, comm in comms.items()}
    found = counted(
        world, device, lambda: [train_step(world, replica, CONFIG, text, 1 + i) for i in range(STEPS)]
    )
    return found | {axis: comm.traffic.sent_bytes - sent[axis] for axis, comm in comms.items()}


if __name__ == "__main__":
    main(*sys.argv[1:])
