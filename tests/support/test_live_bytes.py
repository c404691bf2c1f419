import torch

from minipar.support.live_bytes import LiveBytes


def test_a_storage_counts_from_its_making_to_its_end_and_once():
    before = torch.zeros(100)
    with LiveBytes() as memory:
        x = torch.empty(1000, dtype=torch.float64)
        view, reshaped = x[3:], x.view(10, 100)
        before.add_(1)
        before.view(10, 10)
        assert (memory.now, memory.peak) == (8000, 8000)
        y = x + 1
        assert memory.now == 16000
        del x, view, reshaped, y
        assert (memory.now, memory.peak) == (0, 16000)
        torch.empty(5, dtype=torch.uint8)
    assert (memory.now, memory.peak) == (0, 16000)


def test_what_a_graph_holds_is_alive_and_is_let_go_with_it():
    x = torch.zeros(1000, requires_grad=True)
    with LiveBytes() as memory:
        y = x.exp().sum()  # the graph keeps exp(x)
        assert memory.now == 4000 + 4
        y.backward()
        del y
    assert memory.now == x.grad.nbytes
    assert memory.peak >= 8000
