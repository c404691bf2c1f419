"""The command `minipar links`. Imports torch only to measure."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from minipar.support.errors import require_positive


def links_command(
    read: Path | None = None, ranks: int | None = None, megabytes: int = 8, repeats: int = 5
) -> Callable[[], None]:
    """Measure the links between all pairs of ranks, or read them from a file, and find the widest ring.

    Without `read`, pairs of ranks send messages to each other, a pair at a time: local ranks, or under torchrun its own.

    Args:
        read: what `nvidia-smi topo -m` printed.
        ranks: number of local ranks that measure; 2 if not given.
        megabytes: size of a message.
        repeats: messages from each rank to each other; the fastest counts.
    """
    return partial(_links, read, ranks, megabytes, repeats)


def _links(read: Path | None, ranks: int | None, megabytes: int, repeats: int) -> None:
    require_positive(megabytes=megabytes, repeats=repeats)
    if ranks is not None and ranks < 2:
        raise ValueError(f"ranks={ranks} have no link to measure; use 2 or more")
    if read is not None and ranks is not None:
        raise ValueError(
            f"ranks={ranks} measure, and read={read} is read in place of that; use one of the two"
        )
    if read is not None:
        for line in _of_file(read):
            print(line)
        return
    from minipar.extras.cost.measure_links import links_of_matrix, measured

    matrix = measured(ranks, megabytes << 20, repeats)
    for line in links_of_matrix(matrix) if matrix is not None else ():
        print(line)


def _of_file(path: Path) -> list[str]:
    """Return the lines about a file's links: the speed of the route between each pair of ranks, and the rings."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"read={path} cannot be read: {error}") from None
    from minipar.extras.cost.measure_links import pair_table, ring_lines
    from minipar.extras.cost.read_topology import from_nvidia_smi

    topology = from_nvidia_smi(text)
    speeds, p = dict(topology.speeds), topology.num_ranks
    matrix = [[0.0] * p for _ in range(p)]
    for (source, to), route in topology.routes().items():
        matrix[source][to] = min(speeds[link] for link in route)
    return [*pair_table(matrix), *ring_lines(topology)]
