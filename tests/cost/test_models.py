"""Parameters and operations follow from sizes: the published counts, and those of the library's own model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minipar.cost.machines import GIGABIT, MACHINES, find_machine
from minipar.cost.model_table import MODELS, find_model, gpt
from minipar.cost.models import ModelShape, hardware_flops_per_token, layer_elems, model_flops_per_token
from minipar.model import ModelConfig, Transformer
from minipar.train.metrics import flops_per_token
from tests.cost.published import SC21_TABLE1


def shape_of(config: ModelConfig) -> ModelShape:
    """The sizes of the library's model."""
    return ModelShape(
        "x", config.num_layers, config.dim, config.num_heads, config.hidden_dim, config.vocab_size,
        config.num_kv_heads, tie_embeddings=config.tie_embeddings, dropout=config.dropout > 0,
        num_experts=config.num_experts, top_k=config.top_k, capacity_factor=config.capacity_factor or 1.0,
        moe_every=config.moe_every, shared_dim=config.shared_dim, parallel_block=config.parallel_block,
    )  # fmt: skip


configs = st.builds(
    ModelConfig,
    dim=st.just(16),
    num_layers=st.integers(1, 4),
    num_heads=st.just(4),
    num_kv_heads=st.sampled_from([1, 2, 4]),
    hidden_dim=st.sampled_from([8, 40]),
    tie_embeddings=st.booleans(),
    num_experts=st.sampled_from([0, 4]),
    shared_dim=st.sampled_from([0, 8]),
    top_k=st.integers(1, 2),
    moe_every=st.integers(1, 2),
    parallel_block=st.booleans(),
)


@settings(max_examples=12)
@given(configs)
def test_the_librarys_model_has_as_many_parameters_and_operations(config):
    shape = shape_of(config)
    assert shape.num_params == sum(p.numel() for p in Transformer(config, device="meta").parameters())
    assert model_flops_per_token(shape, 32) == flops_per_token(config, 32)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-7b", 6.74), ("llama-13b", 13.02), ("llama-70b", 68.98), ("llama3-8b", 8.03), ("llama3-70b", 70.55),
        ("llama3-405b", 405.85), ("gpt3-175b", 174.6), ("mixtral-8x7b", 46.70), ("mixtral-8x22b", 140.6),
        ("deepseek-like-16b", 16.9),
    ],
)  # fmt: skip
def test_known_models_are_as_large_as_their_names_say(name, billions):
    assert MODELS[name].num_params / 1e9 == pytest.approx(billions, rel=2e-3)


def test_a_mixture_uses_a_part_of_its_parameters():
    assert MODELS["mixtral-8x7b"].num_active_params / 1e9 == pytest.approx(12.9, rel=5e-3)
    assert MODELS["llama-7b"].num_active_params == MODELS["llama-7b"].num_params


@pytest.mark.parametrize("row", SC21_TABLE1, ids=lambda row: f"{row.billions}B")
def test_megatrons_parameters_and_operations_are_its_equations(row):
    shape = gpt("x", row.layers, row.hidden, row.heads)
    h, l, V, s = row.hidden, row.layers, 51200, 2048
    equation_2 = 12 * l * h**2 * (1 + 13 / (12 * h) + (V + s) / (12 * l * h))
    assert shape.num_params == pytest.approx(equation_2 + 2 * h, rel=1e-12)
    assert shape.num_params / 1e9 == pytest.approx(row.billions, abs=0.051)
    equation_3 = 96 * row.batch * s * l * h**2 * (1 + s / (6 * h) + V / (16 * l * h))
    flops = row.batch * s * hardware_flops_per_token(shape, s, "full")
    assert flops == pytest.approx(equation_3, rel=1e-12)
    model = row.batch * s * model_flops_per_token(shape, s)
    assert model == pytest.approx(
        72 * row.batch * s * l * h**2 * (1 + s / (6 * h) + V / (12 * l * h)), rel=1e-12
    )


def test_ranks_share_a_layer_but_for_what_each_has_whole():
    shape = MODELS["llama-70b"]
    whole, shared = layer_elems(shape, 0)[0], layer_elems(shape, 0, tp=8)[0]
    assert 8 * (shared - 2 * shape.dim) == whole - 2 * shape.dim
    more_than_kv_heads = layer_elems(shape, 0, tp=16)[0]
    assert 16 * (more_than_kv_heads - 2 * shape.dim) == whole - 2 * shape.dim + 2 * shape.dim * 8 * 128
    mixture = MODELS["mixtral-8x7b"]
    assert 4 * layer_elems(mixture, 0, ep=4)[1] == layer_elems(mixture, 0)[1]


# Files and names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("find", "name", "says"),
    [
        (find_model, "lama-70b", "did you mean llama-70b"),
        (find_machine, "a100-80", "did you mean a100-80gb?"),
        (find_model, "no/such.toml", "No such file"),
    ],
)
def test_an_unknown_name_is_told_the_nearest(find, name, says):
    with pytest.raises(ValueError) as refused:
        find(name)
    assert says in str(refused.value)


MINE = "num_layers = 2\ndim = 64\nnum_heads = 4\nhidden_dim = 128\nvocab_size = 100\n"


def test_a_model_of_ones_own_is_read_from_a_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    assert find_model(str(path)) == ModelShape("mine", 2, 64, 4, 128, 100)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (MINE.replace("dim = 64\n", ""), "lacks dim"),
        (MINE.replace("num_heads", "num_head"), "'num_head' is no field; use"),
        (MINE.replace("64", '"64"'), "dim='64' is a str; use a whole number"),
        (MINE.replace("num_heads = 4", "num_heads = 5"), "num_heads=5 does not divide dim=64"),
        ("dim = ", "is not TOML"),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_says_where(tmp_path, text, says):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as refused:
        find_model(str(path))
    assert says in str(refused.value)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("field", ["link_bytes_per_s", "matmul_fraction", "cards_per_node"])
def test_a_machine_with_a_number_that_cannot_be_is_refused(field):
    from dataclasses import replace

    with pytest.raises(ValueError, match=field):
        replace(MACHINES["h100"], **{field: 0})


def test_links_are_bytes_in_one_direction():
    """Planted faults: bits for bytes makes a card eight times as fast, both directions a link twice."""
    assert MACHINES["h100"].card_bytes_per_s == 400 * GIGABIT == 50e9
    assert MACHINES["a100-80gb"].card_bytes_per_s == 25e9
    links = {name: machine.link_bytes_per_s for name, machine in MACHINES.items()}
    assert links == {
        "a100-40gb": 300e9,
        "a100-80gb": 300e9,
        "h100": 450e9,
        "h200": 450e9,
        "b200": 900e9,
        "v100": 150e9,
    }
    for machine in MACHINES.values():
        assert machine.source
