"""What the pictures of tensor parallelism show is what ranks hold and say."""

import pytest
import torch
from matplotlib.image import imread

import minipar
from minipar.config.model_config import ModelConfig
from minipar.model import Transformer
from minipar.tensor_parallel import tensor_parallel
from minipar.visualize.tensor_parallel import draw_kept, draw_layer, draw_layouts, layer_points

CONFIG = ModelConfig(vocab_size=8, dim=16, num_layers=1, num_heads=4, num_kv_heads=4, hidden_dim=16)


def shapes_and_words(world, sequence_parallel: bool):
    """The shapes at the points of a layer, and the kinds of collective used, forward and backward."""
    block = tensor_parallel(Transformer(CONFIG), world, sequence_parallel).layers["0"]
    tokens = 8 // world.size if sequence_parallel else 8
    shapes, at = (
        {},
        lambda name: lambda _, inputs, output: shapes.update({name: (inputs[0].shape, output.shape)}),
    )
    for name, layer in (
        ("attention norm", block.attention_norm),
        ("o", block.attention.o),
        ("mlp norm", block.mlp_norm),
        ("down", block.mlp.down),
    ):
        layer.register_forward_hook(at(name))
    world.traffic.reset()
    y = block(torch.randn(1, tokens, 16, requires_grad=True), torch.arange(8), torch.arange(1))
    forward = dict(world.traffic.by_kind)
    y.sum().backward()
    return shapes, set(forward), set(world.traffic.by_kind)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_layer_in_the_picture_is_the_layer_in_the_code(sequence_parallel):
    shapes, forward, both = minipar.run(shapes_and_words, sequence_parallel, world_size=4)[0]
    points = {point.name.replace("\n", " "): point for point in layer_points(sequence_parallel)}
    extent = {"whole": (1, 8, 16), "tokens": (1, 2, 16), "features": (1, 8, 4)}
    for norm in ("attention norm", "mlp norm"):
        assert shapes[norm][1] == extent[points[norm].holds]
    for matrix, inside in (("o", "attention"), ("down", "silu * up")):
        assert shapes[matrix][0] == extent[points[inside].holds]
        assert shapes[matrix][1] == extent[points["sum, + residual"].holds]
    said = {point.forward for point in points.values()} - {""}
    assert {kind.replace("_", "-") for kind in forward} == said
    said |= {point.backward for point in points.values()} - {""}
    assert {kind.replace("_", "-") for kind in both} - {"all-reduce"} == said - {"all-reduce"}


def test_pictures_are_written(tmp_path):
    for path in (
        draw_layer(2, tmp_path / "layer.png"),
        draw_layer(3, tmp_path / "split.png", sequence_parallel=True),
        draw_layouts(1024, 64, 256, tmp_path / "layouts.png"),
        draw_kept({"a": {"norms": 3e6, "mlp": 1e6}, "b": {"mlp": 1e6}}, tmp_path / "kept.png"),
    ):
        assert imread(path).std() > 0.01
