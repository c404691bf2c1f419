"""How the benchmarks turn times into figures; the times themselves are no test's business."""

import pytest

import benchmarks
from benchmarks.collectives import line
from benchmarks.harness import Row, print_table, row


def test_a_round_takes_as_long_as_on_its_slowest_rank():
    rank_0, rank_1 = [(1.0, 2.0), (4.0, 2.0), (1.0, 1.0)], [(2.0, 1.0), (3.0, 1.0), (3.0, 1.0)]
    r = row("x", [rank_0, rank_1], bar=1.5, note="note")
    # rounds: (2, 2), (4, 2), (3, 1)
    assert r[:5] == ("x", 3.0, 2.0, 2.0, 1.5)
    assert r.note == "1.00..3.00  note"


def test_a_table_marks_what_is_over_its_bar(capsys):
    print_table(
        "Title", [Row("fast", 1e-3, 2e-3, 0.5, 1.0), Row("slow", 2e-3, 1e-3, 2.0, 1.0), Row("?", 1, 1, 1)]
    )
    lines = capsys.readouterr().out.splitlines()
    assert ["over" in line for line in lines[-3:]] == [False, True, False]
    assert "1.00 ms" in lines[3]


def test_a_line_is_recovered_from_points_on_it():
    alpha_s, beta_s = line({n: 1e-4 + n * 2e-9 for n in (1000, 10_000, 10_000_000)})
    assert alpha_s == pytest.approx(1e-4)
    assert beta_s == pytest.approx(2e-9)


def test_an_unknown_benchmark_is_refused():
    with pytest.raises(ValueError, match="'nothing' is no benchmark; use collectives"):
        benchmarks.run(["nothing"])
