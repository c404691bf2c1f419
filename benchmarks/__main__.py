"""`python -m benchmarks [--quick] [--device cuda] [name ...]`"""

import tyro

import benchmarks
from minipar.runtime.devices import Machine, why_not_nccl


def main(names: tyro.conf.Positional[tuple[str, ...]] = (), quick: bool = False, device: str = "cpu") -> None:
    """Time minipar against torch's own implementations, in the same run.

    Args:
        names: the tables to print; all if none are given.
        quick: use fewer repetitions and sizes.
        device: cpu (gloo) or cuda (NCCL); without a GPU, cuda is an error of one line.
    """
    if device == "cuda" and (why := why_not_nccl(1, Machine.here())):
        print(f"no GPU benchmark was run: NCCL {why}")
        return
    benchmarks.run(names, quick, device)


tyro.cli(main)
