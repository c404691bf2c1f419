"""A program that joined a process group leaves it before the interpreter ends; a planted fault is seen."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys
import torch.distributed as dist

def look():  # registered first, so called last
    print("in the group:", dist.is_initialized(), "held:", transport.group is not None or bool(transport.groups))

atexit.register(look)
import minipar
from minipar.runtime import launch
from minipar.comm.transport.transport import Transport
from minipar.comm.transport.grouped import Grouped
if sys.argv[1] == "stays":
    launch._leave_group = lambda: None
if sys.argv[1] == "holds":
    for kind in (Transport, Grouped):
        kind.release_groups = lambda self: None
world = minipar.init_from_env("gloo", timeout_s=60)
transport = world._transport
world.subgroup([0], "inner").barrier()
world.all_reduce(__import__("torch").ones(1), algorithm="native")
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("none", "in the group: False held: False"),
        ("stays", "in the group: True held: False"),
        ("holds", "in the group: False held: True"),
    ],
)
def test_no_process_group_is_left_when_a_program_ends(fault, says):
    # Port 0 is one that is free: nobody else has to know it.
    where = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, fault],
        env=os.environ | where,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip() == says, done.stderr
    if fault != "stays":  # the threads of a group that is left may end the interpreter with a signal
        assert done.returncode == 0
