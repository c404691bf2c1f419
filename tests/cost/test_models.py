"""Parameters and operations follow from sizes: the published counts, and those of the library's own model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipar.config.model_config import ModelConfig
from minipar.cost.machines import ALIASES, GIGABIT, MACHINES, find_machine
from minipar.cost.model_table import MODELS, find_model, gpt
from minipar.cost.models import ModelShape, hardware_flops_per_token, layer_elems, model_flops_per_token
from minipar.model import Transformer
from tests.cost.published import SC21_TABLE1
from tests.examples import examples

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
    head_dim=st.sampled_from([None, 2, 6]),
    qkv_bias=st.booleans(),
    qk_norm=st.booleans(),
)


@examples(12)
@given(configs)
def test_the_librarys_model_has_as_many_parameters_and_operations(config):
    shape = ModelShape.of(config)
    assert shape.num_params == sum(p.numel() for p in Transformer(config, device="meta").parameters())


@examples(8)
@given(
    latent_dim=st.integers(1, 9),
    rope_dim=st.sampled_from([2, 4]),
    num_layers=st.integers(1, 3),
    tp=st.sampled_from([1, 2, 4]),
)
def test_latent_attention_has_as_many_parameters_and_operations(latent_dim, rope_dim, num_layers, tp):
    config = ModelConfig(
        dim=16, num_layers=num_layers, num_heads=4, hidden_dim=8, kv_latent_dim=latent_dim, rope_dim=rope_dim
    )
    shape, model = ModelShape.of(config), Transformer(config, device="meta")
    assert shape.num_params == sum(p.numel() for p in model.parameters())
    parameters = dict(model.layers["0"].named_parameters()).items()
    whole = sum(
        p.numel() for name, p in parameters if "norm" in name or "kv_down" in name or "k_rope" in name
    )
    every = sum(p.numel() for _, p in parameters)
    assert layer_elems(shape, 0, tp) == (whole + (every - whole) // tp, 0)


def test_sizes_that_no_model_can_have_are_refused():
    with pytest.raises(ValueError, match="kv_latent_dim=8, rope_dim=0; use two numbers above 0, or none"):
        ModelShape("x", 2, 16, 4, 32, 256, kv_latent_dim=8)
    with pytest.raises(
        ValueError, match="kv_latent_dim=8 with bias=True and num_kv_heads=4: latent attention has no"
    ):
        ModelShape("x", 2, 16, 4, 32, 256, kv_latent_dim=8, rope_dim=2, bias=True)
    with pytest.raises(ValueError, match="q_latent_dim=8 is for kv_latent_dim above 0"):
        ModelShape("x", 2, 16, 4, 32, 256, q_latent_dim=8)
    with pytest.raises(ValueError, match="dense_layers=2 of num_layers=2: no layer has experts"):
        ModelShape("x", 2, 16, 4, 32, 256, num_experts=4, dense_layers=2)
    with pytest.raises(ValueError, match="num_heads=3 does not divide dim=16"):
        ModelShape("x", 2, 16, 3, 32, 256)
    assert ModelShape("x", 2, 16, 3, 32, 256, head_size=8).q_dim == 24


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-7b", 6.74), ("llama-13b", 13.02), ("llama-70b", 68.98), ("llama3-8b", 8.03), ("llama3-70b", 70.55),
        ("llama3-405b", 405.85), ("gpt3-175b", 174.6), ("mixtral-8x7b", 46.70), ("mixtral-8x22b", 140.6),
        ("deepseek-like-16b", 16.9), ("deepseek-v3", 671.0), ("qwen3-32b", 32.8), ("qwen3-30b", 30.5),
        ("qwen3-235b", 235.1), ("gpt-oss-120b", 116.8),
    ],
)  # fmt: skip
def test_known_models_are_as_large_as_their_names_say(name, billions):
    assert MODELS[name].num_params / 1e9 == pytest.approx(billions, rel=2e-3)


def test_a_mixture_uses_a_part_of_its_parameters():
    assert MODELS["mixtral-8x7b"].num_active_params / 1e9 == pytest.approx(12.9, rel=5e-3)
    assert MODELS["deepseek-v3"].num_active_params / 1e9 == pytest.approx(37, rel=0.02)
    assert MODELS["qwen3-235b"].num_active_params / 1e9 == pytest.approx(22, rel=0.01)
    assert MODELS["qwen3-30b"].num_active_params / 1e9 == pytest.approx(3.3, rel=0.02)
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


def test_a_machine_may_be_named_with_its_memory():
    for alias, name in ALIASES.items():
        machine = find_machine(alias)
        assert machine is MACHINES[name]
        assert alias == f"{name}-{machine.memory_bytes / 1e9:.0f}gb"


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
        "a800": 200e9,
        "h800": 200e9,
        "h100": 450e9,
        "h200": 450e9,
        "b200": 900e9,
        "gb200": 900e9,
        "v100": 150e9,
        "mi300x": 448e9,
        "tpu-v5p": 200e9,
    }
    for machine in MACHINES.values():
        assert machine.source
