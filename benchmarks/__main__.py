"""`python -m benchmarks [--quick] [name ...]`"""

import tyro

import benchmarks


def main(names: tyro.conf.Positional[tuple[str, ...]] = (), quick: bool = False) -> None:
    """Time minipar against torch's own, in the same run.

    Args:
        names: which tables; none given: all.
        quick: fewer repetitions and sizes.
    """
    benchmarks.run(names, quick)


tyro.cli(main)
