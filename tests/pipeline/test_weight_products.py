"""W frees what it no longer needs while it runs."""

import weakref

import torch

from minipar.model import Linear
from minipar.pipeline.stage import Stage


def test_a_weight_gradient_that_is_computed_holds_its_input_no_longer():
    layers = torch.nn.Sequential(*(Linear(4, 4) for _ in range(3)))
    for layer in layers:
        torch.nn.init.normal_(layer.weight)
    stage, inputs, alive = Stage(layers, number=0, num_microbatches=1, split={0}), [], []
    for layer in layers[1:]:
        layer.register_forward_pre_hook(lambda _, x: inputs.append(weakref.ref(x[0].untyped_storage())))
    stage.begin()
    stage.forward(0, torch.randn(2, 4), {})
    stage.backward(0, torch.ones(2, 4))

    def watched(product):
        def run():
            alive.append(sum(x() is not None for x in inputs))
            product()

        return run

    stage._products[0] = [watched(product) for product in stage._products[0]]
    stage.weight_backward(0)
    assert alive == [
        2,
        1,
        0,
    ]  # the last layer's product is the first; the first layer's input is the caller's
