import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipar.config.model_config import ModelConfig
from minipar.model import Transformer, flash, flash_attention, plain_attention
from minipar.model.lse_merge import empty_attention, merge_
from minipar.model.mask import Mask, TokenRun
from minipar.support.live_bytes import LiveBytes
from tests.model.strategies import draw_qkv, sizes
from tests.strategies import assert_equal_to, seeds

IMPLEMENTATIONS = ("tiled", "fused")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles so small that these sequences have several."""
    monkeypatch.setattr(flash, "TILE_ELEMS", 1)
    monkeypatch.setattr(flash, "MIN_TILE_SIDE", 3)


def assert_same(out, want, inputs, dy) -> None:
    assert_equal_to(out, want)
    for a, b in zip(*(torch.autograd.grad(x, inputs, dy, retain_graph=True) for x in (out, want))):
        assert_equal_to(a, b, floor=1e-13)


@given(seed=seeds, sizes=sizes, causal=st.booleans(), impl=st.sampled_from(IMPLEMENTATIONS))
def test_flash_attention_equals_plain_attention_forward_and_backward(seed, sizes, causal, impl):
    B, (H, group), T, d = sizes
    q, k, v = draw_qkv(seed, B, H, group, T, d)
    out, want = flash_attention(q, k, v, causal, impl=impl), plain_attention(q, k, v, causal)
    assert_same(out, want, (q, k, v), torch.randn(want.shape, dtype=want.dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("T", [1, 5, 12, 17, 31, 40])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_nan_is_passed_on(impl, T, dtype):
    for i in range(2):
        q, k, v = (x.detach().to(dtype) for x in draw_qkv(0, 1, 2, 1, T, 3))
        (q, k)[i][0, 0, T // 2, 1] = torch.nan
        out, want = flash_attention(q, k, v, causal=False, impl=impl), plain_attention(q, k, v, causal=False)
        assert torch.equal(out.isnan(), want.isnan()), "qk"[i]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_features_that_are_not_adjacent_are_read_where_they_are(causal, impl):
    def spread(x):
        return torch.stack([x, torch.ones_like(x)], -1)[..., 0]

    q, k, v = draw_qkv(0, 2, 4, 2, 7, 3)
    out, want = flash_attention(*map(spread, (q, k, v)), causal, impl=impl), plain_attention(q, k, v, causal)
    assert_same(out, want, (q, k, v), spread(torch.randn(want.shape, dtype=want.dtype)))


@given(seed=seeds, sizes=sizes, data=st.data())
def test_documents_are_read_as_if_each_were_alone(seed, sizes, data):
    B, (H, group), _, d = sizes
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    T = sum(lengths)
    q, k, v = draw_qkv(seed, B, H, group, T, d)
    positions = torch.cat([torch.arange(n) for n in lengths])
    positions = positions if data.draw(st.booleans()) else positions.expand(B, T)
    out = flash_attention(q, k, v, positions=positions)
    alone = zip(*(x.split(lengths, dim=2) for x in (q, k, v)))
    want = torch.cat([plain_attention(*document) for document in alone], dim=2)
    assert_same(out, want, (q, k, v), torch.randn(want.shape, dtype=want.dtype))
    assert_same(plain_attention(q, k, v, positions=positions), want, (q, k, v), torch.ones_like(want))


@given(seed=seeds, impl=st.sampled_from(IMPLEMENTATIONS))
def test_every_row_of_a_batch_has_documents_of_its_own(seed, impl):
    q, k, v = draw_qkv(seed, 2, 4, 2, 7, 4)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4, 0]])
    out = flash_attention(q, k, v, positions=positions)
    for row in range(2):
        one = [x[row : row + 1] for x in (q, k, v)]
        assert_equal_to(out[row : row + 1], plain_attention(*one, positions=positions[row]))


@given(seed=seeds, sizes=sizes, causal=st.booleans())
def test_the_log_sum_exp_is_that_of_the_scaled_scores(seed, sizes, causal):
    B, (H, group), T, d = sizes
    q, k, v = draw_qkv(seed, B, H, group, T, d)
    scores = q @ k.repeat_interleave(group, 1).transpose(-2, -1) / math.sqrt(d)
    if causal:
        scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)
    for impl in IMPLEMENTATIONS:
        lse = flash_attention(q, k, v, causal, return_lse=True, impl=impl)[1]
        dy = torch.randn(lse.shape, dtype=lse.dtype)
        assert_equal_to(lse, scores.logsumexp(-1))
        got = torch.autograd.grad(lse, (q, k), dy)
        for a, b in zip(got, torch.autograd.grad(scores.logsumexp(-1), (q, k), dy, retain_graph=True)):
            assert_equal_to(a, b, floor=1e-13)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_gradients_are_those_of_finite_differences(causal, impl):
    q, k, v = draw_qkv(0, 1, 2, 2, 5, 2)

    def both(q, k, v):
        return flash_attention(q, k, v, causal, return_lse=True, impl=impl)

    assert torch.autograd.gradcheck(both, (q, k, v))


@given(seed=seeds, cut=st.integers(0, 9), impl=st.sampled_from(IMPLEMENTATIONS))
def test_parts_of_the_keys_merged_by_their_log_sum_exps_are_the_whole(seed, cut, impl):
    q, k, v = (x.detach() for x in draw_qkv(seed, 2, 4, 2, 9, 4))
    out, lse = empty_attention(q)
    for keys in (TokenRun(cut, 9 - cut), TokenRun(0, cut)):  # the later first: early queries see none of them
        mask, some = Mask((TokenRun(0, 9),), (keys,)), slice(keys.start, keys.start + keys.length)
        part = flash_attention(q, k[:, :, some], v[:, :, some], mask=mask, return_lse=True, impl=impl)
        merge_(out, lse, *part)
    assert_equal_to(out, plain_attention(q, k, v))
    assert_equal_to(lse, flash_attention(q, k, v, return_lse=True)[1])


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_query_that_sees_nothing_gives_nothing(impl):
    q, k, v = draw_qkv(0, 1, 2, 1, 6, 4)
    mask = Mask((TokenRun(0, 6),), (TokenRun(4, 6),))  # the first 4 queries are before every key
    out, lse = flash_attention(q, k, v, mask=mask, return_lse=True, impl=impl)
    assert torch.equal(out[:, :, :4], torch.zeros(1, 2, 4, 4, dtype=torch.float64))
    assert lse[:, :, :4].eq(-math.inf).all()
    assert lse[:, :, 4:].isfinite().all()
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert dq[:, :, :4].eq(0).all()
    assert all(x.isfinite().all() for x in (dq, dk, dv))
    assert dk[:, :, 2:].eq(0).all()


def test_a_sequence_without_tokens_is_attended_to_in_vain():
    q, k, v = draw_qkv(0, 1, 2, 1, 0, 4)
    for impl in IMPLEMENTATIONS:
        out, lse = flash_attention(q, k, v, return_lse=True, impl=impl)
        assert (out.shape, lse.shape) == ((1, 2, 0, 4), (1, 2, 0))


def test_scores_beyond_the_range_of_exp_do_not_overflow():
    q, k, v = (x.detach().float() for x in draw_qkv(0, 1, 2, 1, 9, 4))
    out = flash_attention(300 * q, 300 * k, v)
    assert_equal_to(out, plain_attention(300 * q, 300 * k, v), rtol=1e-5)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_bf16_is_rounded_once(impl):
    q, k, v = draw_qkv(0, 2, 4, 2, 33, 8, torch.bfloat16)
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    exact, out = plain_attention(*wide), flash_attention(q, k, v, impl=impl)
    assert out.dtype == torch.bfloat16
    assert (out.float() - exact).abs().max() < 0.02
    exact.sum().backward()
    out.sum().backward()
    for a, b in zip((q, k, v), wide):
        assert a.grad.dtype == torch.bfloat16
        assert (a.grad.float() - b.grad).abs().max() < 0.05 * b.grad.abs().max()


def peak_bytes(attention, T: int) -> int:
    with LiveBytes() as memory:
        q, k, v = (torch.randn(1, 2, T, 8).requires_grad_() for _ in range(3))
        attention(q, k, v).sum().backward()
    return memory.peak


@pytest.mark.thorough
def test_memory_is_linear_in_the_length_where_the_matrix_is_quadratic(monkeypatch):
    monkeypatch.setattr(flash, "MIN_TILE_SIDE", 32)
    flash_peaks = [peak_bytes(flash_attention, T) for T in (512, 1024, 2048)]
    steps = flash_peaks[1] - flash_peaks[0], flash_peaks[2] - flash_peaks[1]
    assert abs(steps[1] / steps[0] - 2) < 0.1
    plain = peak_bytes(plain_attention, 2048)
    assert plain > 3 * 2 * 2048**2 * 4  # scores, probabilities, a gradient of them
    assert flash_peaks[2] < plain / 50


@given(seed=seeds)
def test_the_model_with_flash_attention_is_the_model(seed):
    sizes = dict(vocab_size=8, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=8)
    tokens = torch.randint(8, (2, 9), generator=torch.Generator().manual_seed(seed))
    positions = torch.tensor([0, 1, 2, 3, 0, 1, 0, 1, 2])
    for documents in (False, True):
        models = [
            Transformer(ModelConfig(**sizes, documents=documents, attention=name), seed).double()
            for name in ("plain", "fused", "flash")
        ]
        for model in models:
            model.loss(tokens, tokens, positions=positions).backward()
        for other in models[1:]:
            for (name, a), b in zip(other.named_parameters(), models[0].parameters()):
                assert_equal_to(a.grad, b.grad, what=name)


def test_a_document_in_a_pack_has_the_logits_it_has_alone():
    config = ModelConfig(8, 16, 2, 4, hidden_dim=8, documents=True)
    model, tokens = Transformer(config).double(), torch.randint(8, (1, 9))
    positions = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4])
    packed = model(tokens, positions=positions)
    alone = torch.cat([model(tokens[:, :4]), model(tokens[:, 4:])], dim=1)
    assert_equal_to(packed, alone)


@pytest.mark.parametrize(
    ("shapes", "options", "line"),
    [
        (((1, 4, 5, 8), (1, 3, 5, 8)), {}, "key/value heads=3 does not divide query heads=4; use 1, 2 or 4"),
        (((1, 4, 5, 8), (2, 4, 5, 8)), {}, "use the same batch and head_dim for all"),
        (((4, 5, 8), (4, 5, 8)), {}, "use q [B, H, T, head_dim]"),
        (((1, 4, 5, 8), (1, 4, 5, 8)), {"impl": "best"}, "impl='best' is unknown; use tiled, fused or auto"),
        (
            ((1, 4, 5, 8), (1, 4, 5, 8)),
            {"impl": "fused", "positions": torch.arange(5)},
            "impl='fused' has no kernel for documents; use 'tiled' or 'auto'",
        ),
    ],
)
def test_what_does_not_fit_is_refused(shapes, options, line):
    q, k = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError) as error:
        flash_attention(q, k, k, **options)
    assert line in str(error.value)


@pytest.mark.nccl(1)
@pytest.mark.parametrize("causal", [True, False])
def test_on_a_gpu_the_kernel_gives_what_the_tiles_give(causal):
    q, k, v = (x.detach().cuda().requires_grad_() for x in draw_qkv(0, 2, 4, 2, 40, 16, torch.bfloat16))
    mask = Mask((TokenRun(8, 20), TokenRun(60, 20)), (TokenRun(20, 40),), causal)
    results = []
    for impl in IMPLEMENTATIONS:
        out = flash_attention(q, k, v, mask=mask, impl=impl)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))))
    for a, b in zip(*results):
        assert (a - b).abs().max() < 0.02 * b.abs().max()
