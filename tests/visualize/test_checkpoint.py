from collections import namedtuple

from minipar.visualize.checkpoint import draw_days, draw_goodput, draw_parts, draw_resumed, draw_stalls

Box = namedtuple("Box", "start length")


def test_days_show_their_goodput(tmp_path):
    day = [("work", 0, 12), ("save", 12, 18), ("lost", 18, 20), ("restart", 20, 24)]
    assert "50%" in comments(draw_days({"once a day": day}, "a day", tmp_path / "day.svg"))


def test_each_rank_of_a_matrix_is_labelled_once(tmp_path):
    boxes = [(0, Box((0, 0), (2, 4))), (1, Box((2, 0), (2, 4))), (1, Box((4, 0), (1, 4)))]
    written = comments(draw_parts("w", (5, 4), {"by rows": boxes}, tmp_path / "parts.svg"))
    assert written.count("rank 0") == written.count("rank 1") == 1


def test_steps_that_are_done_twice_are_named(tmp_path):
    whole = {step: 5.0 - step / 10 for step in range(8)}
    before, after = ({s: whole[s] for s in steps} for steps in (range(6), range(4, 8)))
    path = draw_resumed(whole, before, after, ("a", "b", "c"), tmp_path / "losses.svg")
    assert "steps 4 to 5 are done twice" in comments(path)


def test_stalls_and_goodput_are_written(tmp_path):
    draw_stalls({"waits": [(0.0, 1.0, 1.5), (1.5, 2.5, 2.5)]}, "two steps", tmp_path / "stalls.svg")
    path = draw_goodput(
        [5, 30], [("a save stops", [0.6, 0.8], [0.5, 0.8], 27.0)], "goodput", tmp_path / "g.svg"
    )
    assert "sqrt(2CM) = 27 min" in comments(path)
    assert (tmp_path / "stalls.svg").exists()


def comments(path) -> str:
    """The texts of a drawing: matplotlib writes each as a comment beside its outlines."""
    return "\n".join(line.strip() for line in path.read_text().splitlines() if "<!--" in line)
