"""The ring in the pictures is the ring in the code."""

import pytest
import torch
from matplotlib.image import imread

import minipar
from minipar.comm import ring
from minipar.visualize.collectives import draw_alpha_beta, draw_ring, ring_start, ring_steps
from minipar.visualize.ring_animation import animate_ring


def messages(world):
    """What this rank sends in a ring all-reduce, as (chunk, the ranks summed in it)."""
    # A chunk is [2 ** rank, chunk]: once summed, a set of ranks, and the chunk as often as it has members.
    x = torch.tensor([[2.0**world.rank, chunk] for chunk in range(world.size)]).view(-1)
    sent = []

    def recording(verb):
        original = getattr(world, verb)

        def record(piece, to, *args, **kwargs):
            if to is not None:
                assert to == (world.rank + 1) % world.size
                summed = {rank for rank in range(world.size) if int(piece[0]) >> rank & 1}
                sent.append((int(piece[1]) // len(summed), summed))
            return original(piece, to, *args, **kwargs)

        return record

    world.send, world.exchange = recording("send"), recording("exchange")
    ring.all_reduce(world, x)
    return sent


@pytest.mark.sampled(4)
@pytest.mark.parametrize("p", [2, 3, 4, 5])
def test_each_step_of_the_picture_is_a_message_of_the_code(p):
    sent = minipar.run(messages, world_size=p)
    before = ring_start(p)
    for number, step in enumerate(ring_steps(p)):
        for rank, chunk in enumerate(step.sends):
            assert sent[rank][number] == (chunk, set(before[rank][chunk]))
        before = step.after
    assert all(len(sent[rank]) == 2 * (p - 1) for rank in range(p))
    assert all(summed == frozenset(range(p)) for chunks in before for summed in chunks)


def test_the_first_half_leaves_rank_r_with_the_sum_of_chunk_r():
    for p in (2, 4, 7):
        halfway = list(ring_steps(p))[p - 2]
        assert halfway.phase == "reduce-scatter"
        for rank in range(p):
            complete = [chunk for chunk in range(p) if len(halfway.after[rank][chunk]) == p]
            assert complete == [rank]


def test_pictures_are_written_and_too_many_ranks_refused(tmp_path):
    assert imread(draw_ring(3, tmp_path / "new" / "ring.png")).shape[1] > 500
    assert animate_ring(2, tmp_path / "ring.gif", frames_per_step=1).read_bytes().startswith(b"GIF89a")
    for draw in (draw_ring, animate_ring):
        with pytest.raises(ValueError, match="p=9 .* use 2 to 8"):
            draw(9, tmp_path / "ring.png")


def test_measured_points_and_model_are_drawn(tmp_path):
    points = {"ring": [(1 << 20, 1e-3), (1 << 24, 1e-2)], "tree": [(1 << 20, 2e-3)]}
    path = draw_alpha_beta(points, {"ring": lambda n: n * 1e-9}, tmp_path / "curves.png", dots="simulated")
    assert imread(path).shape[1] > 1000
