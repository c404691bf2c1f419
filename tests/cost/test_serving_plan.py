"""The serving planner: laws that any plan obeys, the queue against a simulation, and the design that interviews ask for."""

import json
import random
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from matplotlib.image import imread

from minipar.cli import main
from minipar.cost.machines import find_machine
from minipar.cost.model_table import find_model
from minipar.cost.serving import Bits, in_a_run
from minipar.cost.serving_plan import MOST_BUSY, Replica, ServingJob, plan_serving, serving_text
from minipar.visualize.serving_plan import draw_serving_plan, serving_plan_figure

H100 = find_machine("h100")
# 70B at 10 requests a second, first token within 1 s, 50 ms a token.
DESIGN = ServingJob(find_model("llama-70b"), H100, 1024, 256, 10.0, 1.0, 0.05)

jobs = st.builds(
    ServingJob,
    shape=st.sampled_from([find_model(name) for name in ("llama-7b", "llama-70b", "mixtral-8x7b")]),
    machine=st.sampled_from([H100, find_machine("a100-80gb")]),
    prompt_tokens=st.integers(1, 8000),
    new_tokens=st.integers(1, 2000),
    requests_per_s=st.floats(0.01, 1000),
    first_token_s=st.floats(0.01, 10),
    token_s=st.floats(0.002, 0.5),
    bits=st.builds(Bits, st.sampled_from([16, 8, 4]), st.sampled_from([16, 8, 4])),
    piece=st.integers(32, 4096),
    all_reduce=st.sampled_from(["ring", "direct"]),
)
sizes = st.sampled_from([1, 2, 4, 8])


def test_70b_at_10_requests_a_second_takes_a_node_of_h100():
    """By hand: 138 GB are no less than 2 GPUs; 4 read 34 GB in 13 ms; a prompt is 1.4e14 operations, 57 ms of 4 GPUs."""
    plan = plan_serving(DESIGN)
    best = plan.services[0]
    assert (best.replica.tp, best.replicas, best.gpus) == (4, 2, 8)
    assert 0.01 < best.step.weights_s < 0.015
    assert 0.05 < best.replica.prompt_s < 0.08
    assert best.load.first_token_s < 0.3
    assert best.load.token_s < 0.04
    assert "weights take 138.0 GB of each GPU, which has 78.0" in plan.why_not[1]
    assert plan.apart is not None
    assert plan.apart.gpus == 8
    assert plan.apart.transfer_s < 0.01
    assert plan.apart.tokens.load.longest_s < best.load.longest_s / 2


@given(job=jobs, tp=sizes, share=st.floats(0.01, 1.0))
def test_every_service_is_within_its_targets_and_littles_law(job, tp, share):
    replica = Replica(job, tp)
    assume(replica.most_per_s)
    rate = share * replica.most_per_s
    load = replica.load(rate)
    assert load.token_s <= job.token_s
    assert load.first_token_s <= job.first_token_s
    assert rate <= MOST_BUSY * replica.sustained(replica.fits) * (1 + 1e-9)
    pieces = -(-job.prompt_tokens // job.piece)
    assert rate * (replica.prompt_s + pieces * replica.step_s(replica.batch_at(rate))) <= MOST_BUSY * (
        1 + 1e-9
    )
    assert load.batch == pytest.approx(rate * job.new_tokens * load.token_s)
    assert load.batch <= replica.batch_at(rate) * (1 + 1e-9) <= replica.fits * (1 + 1e-9)
    # At the rate that a whole batch sustains, the batch is that.
    batch = replica.batch_at(rate)
    at = replica.sustained(batch)
    assert at * job.new_tokens * replica.step_s(batch) / (1 - at * replica.prompt_s) == pytest.approx(batch)


def test_a_queue_of_prompts_is_at_most_80_percent_busy():
    """Long prompts, short answers, small pieces, patient users: the queue is what limits the rate."""
    job = replace(DESIGN, prompt_tokens=8000, new_tokens=16, piece=64, first_token_s=60, token_s=1)
    replica = Replica(job, 4)
    rate = replica.most_per_s
    service_s = replica.prompt_s + 125 * replica.step_s(replica.batch_at(rate))
    assert rate * service_s == pytest.approx(MOST_BUSY)
    assert replica.load(rate).first_token_s == pytest.approx(
        3 * service_s
    )  # a wait of 0.8 / (2 * 0.2) services


@given(job=jobs, tp=sizes, batch=st.integers(1, 2000))
def test_a_larger_batch_has_no_less_throughput_and_no_lower_latency(job, tp, batch):
    for role in ("both", "tokens"):
        replica = Replica(job, tp, role)
        assert replica.step_s(batch + 1) >= replica.step_s(batch)
        assert replica.sustained(batch + 1) >= replica.sustained(batch) * (1 - 1e-12)


@given(job=jobs, tp=sizes, times=st.floats(1.0, 8.0), share=st.floats(0.01, 1.0))
def test_more_of_a_machine_never_serves_less(job, tp, times, share):
    now = Replica(job, tp)
    rate = share * now.most_per_s
    for name in ("hbm_bytes_per_s", "memory_bytes", "peak_flops", "link_bytes_per_s"):
        machine = replace(job.machine, **{name: times * getattr(job.machine, name)})
        more = Replica(replace(job, machine=machine), tp)
        assert more.fits >= now.fits
        assert more.most_per_s >= now.most_per_s * (1 - 1e-9)
        if rate:
            before, after = now.load(rate), more.load(rate)
            assert after.token_s <= before.token_s * (1 + 1e-9)
            assert after.first_token_s <= before.first_token_s * (1 + 1e-9)


@given(job=jobs, tp=sizes, times=st.floats(1.0, 8.0))
def test_fewer_bits_and_looser_targets_never_serve_less(job, tp, times):
    now = Replica(job, tp)
    for name in ("first_token_s", "token_s"):
        looser = replace(job, **{name: times * getattr(job, name)})
        assert Replica(looser, tp).most_per_s >= now.most_per_s * (1 - 1e-9)
    for bits in (Bits(4, job.bits.cache), Bits(job.bits.weights, 4)):
        fewer = Replica(replace(job, bits=bits), tp)
        assert fewer.fits >= now.fits
        assert fewer.most_per_s >= now.most_per_s * (1 - 1e-9)


@given(job=jobs, times=st.floats(1.0, 10.0))
def test_more_requests_never_take_fewer_gpus(job, times):
    now, more = plan_serving(job), plan_serving(replace(job, requests_per_s=times * job.requests_per_s))
    assert bool(now.services) == bool(more.services)
    if now.services:
        assert more.services[0].gpus >= now.services[0].gpus
    every = {s.replica.tp for s in now.services[:1]} | set(now.why_not)
    assert every == {1, 2, 4, 8}  # each tp is chosen, or there is a line that says why not


def test_the_wait_of_prompts_is_that_of_a_simulated_queue():
    """Prompts alone on their ranks: random arrivals, one after another, each the same time."""
    replica = Replica(DESIGN, 4, "prompts")
    service_s, draw = replica.prompt_s, random.Random(0)
    for busy in (0.3, 0.6, 0.79):
        rate = busy / service_s
        now, free, waited, number = 0.0, 0.0, 0.0, 100_000
        for _ in range(number):
            now += draw.expovariate(rate)
            begin = max(now, free)
            waited, free = waited + begin - now, begin + service_s
        assert replica.load(rate).first_token_s == pytest.approx(service_s + waited / number, rel=0.03)
    assert replica.load(0.81 / service_s) is None


def test_a_machine_in_a_run_reaches_fractions_of_its_data_sheet():
    reached = in_a_run(H100)
    assert reached.hbm_bytes_per_s == H100.share * H100.hbm_bytes_per_s
    assert reached.peak_flops == pytest.approx(H100.share * 794.5e12)
    assert reached.attention_fraction * reached.peak_flops == pytest.approx(0.35 * 989e12)
    assert in_a_run(reached) == reached  # measured rates stay as they are


def test_the_command_answers_the_design(capsys, tmp_path):
    picture = tmp_path / "plan.png"
    main(["plan", "--serve", "--picture", str(picture)])
    out, err = capsys.readouterr()
    assert "llama-70b (69 B parameters) on h100" in out
    assert "tp=1  weights take 138.0 GB of each GPU" in out
    assert "a step of tp=4, B = 39 requests at S = 1,152 tokens: 19.3 ms, most of it reading weights" in out
    assert "8 GPUs as 2 x tp=4, 414 fit" in out
    assert "prefill and decode apart: 1 x tp=4 read prompts, 1 x tp=4 write tokens" in out
    assert max(map(len, out.splitlines())) <= 125
    assert err == f"wrote {picture}\n"
    assert imread(picture).shape[0] > 200
    main(["plan", "--serve", "--json", "--rate", "20", "--weight-bits", "8", "--cache-bits", "8"])
    found = json.loads(capsys.readouterr().out)
    assert found["services"][0]["gpus"] < 16
    assert {"weights_s", "cache_s", "arithmetic_s", "messages_s"} == set(found["services"][0]["step"])


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--rate", "0"], "requests_per_s=0.0; use a finite number above 0"),
        (["--prompt-tokens", "0"], "prompt_tokens=0; use a whole number of 1 or more"),
        (["--model", "llama-8b"], "model='llama-8b' is unknown"),
        (["--picture", "plan.txt"], "picture=plan.txt"),
        (["--targets", "0.001", "0.05"], "no tp meets the targets; tp=8: a prompt of 1,024 tokens takes"),
        (["--targets", "1", "0.001"], "tp=8: a token takes 15.4 ms for one request alone, bound by waiting for tp"),
        (["--gpus", "64"], "Unrecognized"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_one_line(capsys, argv, says):
    with pytest.raises(SystemExit) as left:
        main(["plan", "--serve", *argv])
    err = capsys.readouterr().err
    assert (left.value.code, err.count("\n")) == (2, 1)
    assert says in err


def test_a_model_that_needs_fewer_bits_is_told_so():
    job = replace(DESIGN, shape=find_model("llama3-405b"))
    plan = plan_serving(job)
    assert not plan.services
    text = serving_text(plan, [(Bits(8, 8), plan_serving(replace(job, bits=Bits(8, 8))))])
    assert "no tp meets the targets\n  tp=1  weights take 811.7 GB" in text
    assert "weights  8, cache  8   64 GPUs as 8 x tp=8" in text
    with pytest.raises(ValueError, match="model=llama3-405b fits with no tp"):
        serving_plan_figure(job)


def test_the_picture_shows_each_tp_and_where_compute_dominates(tmp_path):
    left, right = serving_plan_figure(DESIGN).axes
    labels = [line.get_label() for line in left.lines]
    assert [label for label in labels if label.startswith("tp=")] == ["tp=2", "tp=4", "tp=8"]
    (begins,) = [line for line in left.lines if "product takes longer" in line.get_label()]
    assert begins.get_xdata()[0] == pytest.approx(794.5e12 / 3.35e12, rel=0.01)
    solid = left.lines[0]
    assert solid.get_xdata()[-1] == Replica(DESIGN, 2).fits
    assert draw_serving_plan(DESIGN, tmp_path / "plan.svg").exists()
