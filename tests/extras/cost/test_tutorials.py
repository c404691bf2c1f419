"""Numbers that tutorials state about compressed gradients and scaling."""

import pytest

from minipar.cost.layout import Job, Layout, parse_layout
from minipar.cost.machines import MACHINES
from minipar.cost.model_table import MODELS
from minipar.extras.cost.compression import CODECS, SCALE_BYTES
from minipar.extras.cost.scaling import scaling

H100 = MACHINES["h100"]


@pytest.mark.parametrize(
    ("codec", "of_bf16", "of_float32"), [("fp8", 1 / 2, 1 / 4), ("sign", 1 / 16, 1 / 32)]
)
def test_bytes_of_compressed_gradients(codec, of_bf16, of_float32):
    """Stated as a quarter and an eighth: of float32 8 bits are a quarter, of bf16 a half; one bit is less, plus scales."""
    each = CODECS[codec].sent_bytes - SCALE_BYTES
    assert (each / 2, each / 4) == (of_bf16, of_float32)


def test_weak_scaling_keeps_90_percent_with_31_percent_messages():
    """Stated as 90 %, and less than 15 % for messages: for 70B with tp 8, pp 2 the first is right, tp alone takes more."""
    job, layout = Job(MODELS["llama-70b"], H100, 64, 4096, 1024), parse_layout("dp4-pp2-tp8-zero1-full")
    last = scaling(job, layout, [64, 512, 4096], weak=True)[-1]
    assert last.efficiency > 0.9
    assert last.communication == pytest.approx(0.31, abs=0.01)


def test_more_than_a_thousand_cards():
    """Stated as negative returns of data parallelism: returns diminish, but a step of a fixed batch does not get longer."""
    job, gpus = Job(MODELS["llama-7b"], H100, 64, 2048, 4096), [64 * 2**k for k in range(7)]
    curve = scaling(job, Layout(dp=64, zero=1), gpus, weak=False)
    assert [point.gpus for point in curve] == gpus
    assert all(b.seconds < a.seconds for a, b in zip(curve, curve[1:]))
    assert curve[-1].efficiency < 0.75 < 0.9 < curve[2].efficiency
