"""`minipar train` as a rank of torchrun's, which kills itself in an update: gradients summed, weights not yet.

    python -m torch.distributed.run ... -m tests.train.mortal FOLDER 1:6,0:4 train ...

In the first life of the world rank 1 dies in the 6th update of that life, in the second rank 0 in the 4th. FOLDER,
which all ranks can see, has the deaths so far and in `optimizer.txt` a line for every update: life and rank.
"""

import os
import signal
import sys
from pathlib import Path

import torch

from minipar.cli import main

folder, deaths = Path(sys.argv[1]), sys.argv[2].split(",")
life, rank = len(list(folder.glob("death-*"))), os.environ["RANK"]
dies_in = {who: int(update) for who, update in (death.split(":") for death in deaths[life : life + 1])}
optimizer, update = [], torch.optim.AdamW.step


def mortal_update(self, *args, **kwargs):
    optimizer.append(life)
    with (folder / "updates.txt").open("a") as file:
        file.write(f"{life} {rank}\n")
    if len(optimizer) == dies_in.get(rank):
        (folder / f"death-{life}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return update(self, *args, **kwargs)


torch.optim.AdamW.step = mortal_update
main(sys.argv[3:])
