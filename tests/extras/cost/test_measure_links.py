"""`minipar links`: every pair is measured, by the bytes that it says; a file is read in place of that."""

import pytest

import minipar
from minipar.cli import main
from minipar.extras.cost.measure_links import links_of_matrix, measure_pairs, pair_table
from tests.extras.cost.test_read_topology import PAIRS

KIB, REPEATS = 1024, 2


def measure(world):
    world.traffic.reset()
    matrix = measure_pairs(world, 64 * KIB, REPEATS)
    return matrix, dict(world.traffic.by_kind)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_pair_is_measured_with_the_bytes_that_it_says(size):
    found = minipar.run(measure, world_size=size)
    for matrix, by_kind in found:
        assert matrix == found[0][0]
        assert all((matrix[i][j] > 0) == (i != j) for i in range(size) for j in range(size))
        assert by_kind.get("send", 0) == (size - 1) * REPEATS * (64 * KIB + 1)


def test_a_table_names_both_ranks_of_a_speed():
    assert pair_table([[0, 2e9], [3.5e9, 0]]) == [
        "GB/s       to 0     to 1",
        "from 0          -        2",
        "from 1        3.5        -",
    ]
    lines = links_of_matrix([[0, 1e9, 9e9], [9e9, 0, 1e9], [1e9, 9e9, 0]])
    assert lines[-3:] == [
        "ring in rank order    1 GB/s",
        "widest ring found     9 GB/s: 0, 2, 1",
        'in that order         world.subgroup((0, 2, 1), "wide ring")',
    ]


def test_a_file_is_read_in_place_of_measuring(tmp_path, capsys):
    (tmp_path / "smi.txt").write_text(PAIRS)
    main(["links", "--read", str(tmp_path / "smi.txt")])
    assert "widest ring found     20 GB/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--ranks", "1"], "ranks=1 have no link to measure; use 2 or more"),
        (["--megabytes", "0"], "megabytes=0"),
        (["--read", "nowhere"], "read=nowhere cannot be read"),
        (["--read", "nowhere", "--ranks", "2"], "use one of the two"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(flags, says, capsys):
    with pytest.raises(SystemExit) as end:
        main(["links", *flags])
    assert end.value.code == 2
    assert says in capsys.readouterr().err
