"""Sampling without replacement: each sample once an epoch, on any mesh, stopped and gone on with or not."""

from dataclasses import replace
from math import sqrt

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.mesh import Mesh
from minipar.train import state, train
from minipar.train.checkpoint.restore import Checkpoint, newest_whole
from minipar.train.data.epoch import num_samples, shuffled, starts_of_step
from minipar.train.data.token_file import open_tokens
from minipar.train.step import local_batch
from tests.strategies import seeds

keys = st.text(max_size=5)


@given(st.integers(1, 3000), keys)
def test_the_order_of_an_epoch_has_every_sample_once(count, key):
    order = shuffled(torch.arange(count), count, key)
    assert sorted(order.tolist()) == list(range(count))
    backwards = shuffled(torch.arange(count - 1, -1, -1), count, key)
    assert torch.equal(backwards.flip(0), order), "an element depends on its place alone"


@given(st.integers(1 << 20, 1 << 50), keys)
def test_shuffling_a_huge_text_computes_only_the_asked_places(count, key):
    places = torch.tensor([0, 1, 2, count // 2, count - 1])
    found = shuffled(places, count, key)
    assert len(set(found.tolist())) == 5
    assert found.min() >= 0
    assert found.max() < count


@pytest.mark.thorough
@pytest.mark.parametrize("count", [2, 3, 6])
def test_every_order_of_a_few_samples_is_as_likely_as_any_other(count):
    draws = 4000
    orders = [tuple(shuffled(torch.arange(count), count, str(k)).tolist()) for k in range(draws)]
    at_place = np.zeros((count, count))
    for order in orders:
        at_place[range(count), order] += 1
    share = 1 / count
    apart = np.abs(at_place / draws - share).max()
    assert apart < 5 * sqrt(share * (1 - share) / draws)
    if count == 3:
        shares = np.array([orders.count(order) / draws for order in set(orders)])
        assert len(shares) == 6
        assert np.abs(shares - 1 / 6).max() < 5 * sqrt(5 / 36 / draws)


@given(st.data())
def test_every_sample_comes_once_before_any_comes_again(data):
    seq_len, batch_size = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 40))
    num_tokens, seed = data.draw(st.integers(seq_len + 1, 400)), data.draw(seeds)
    count = num_samples(num_tokens, seq_len)
    steps = range(-(-3 * count // batch_size))
    drawn = torch.cat([starts_of_step(num_tokens, seed, step, batch_size, seq_len) for step in steps])
    epochs = [drawn[i * count : (i + 1) * count] for i in range(3)]
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(0, count * seq_len, seq_len))
    if count > 20:
        assert not torch.equal(epochs[0], epochs[1])
        assert not torch.equal(epochs[0], starts_of_step(num_tokens, seed + 1, 0, count, seq_len))


SMALL = ModelConfig(dim=16, num_layers=2, num_heads=2, max_seq_len=16, vocab_size=300)
BASE = TrainConfig(
    model=SMALL, batch_size=8, seq_len=16, steps=10, warmup=20, verify_steps=0, trace_steps=0,
    dtype="float64", sampling="epoch",
)  # fmt: skip


def numbered(folder, samples=30):
    """A token file of which every sample of 16 tokens begins with its own number."""
    path = folder / "tokens.npy"
    np.save(path, np.concatenate([np.repeat(range(samples), 16), [0]]).astype(np.uint16))
    return path


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("there", "here"), [(dict(dp=4), dict(dp=2, cp=2)), (dict(pp=2, tp=2), dict(dp=8))])
def test_successive_meshes_give_each_sample_once_an_epoch(tmp_path, there, here):
    text = open_tokens(numbered(tmp_path), 300)

    def samples_of_rank(world, config, steps):
        """The numbers of the samples of which this rank has the first tokens, as the first with that part of the batch."""
        mesh = Mesh(world, **config.mesh_sizes)
        at = mesh.coordinates
        if at.pp or at.cp or at.tp:
            return []
        batches = [local_batch(mesh, config, text, step, world.device) for step in steps]
        return torch.cat([batch.tokens[:, 0] for batch in batches]).tolist()

    seen = []
    for mesh, steps in ((there, range(4)), (here, range(4, 15))):
        config = replace(BASE, tokens=text.path, steps=20, **mesh)
        by_rank = minipar.run(samples_of_rank, config, steps, world_size=config.world_size)
        seen += [number for rank in by_rank for number in rank]
    assert sorted(seen) == sorted(4 * [*range(30)]), "15 steps of 8 samples are four epochs of 30"


@pytest.mark.thorough
def test_an_epoch_resumes_where_it_stopped_if_cut_the_same_way(tmp_path, monkeypatch):
    run = replace(BASE, tokens=numbered(tmp_path), checkpoint_every=5)
    never_stopped = train(replace(run, out=tmp_path / "whole"))
    train(replace(run, steps=5, dp=2, out=tmp_path / "first"))
    first = Checkpoint(newest_whole(tmp_path / "first" / "checkpoints"))
    assert first.extra["place"] == [1, 10], "40 samples of epochs of 30"
    on = replace(run, tp=2, resume=tmp_path / "first", out=tmp_path / "second")
    losses = [line["loss"] for line in train(on).metrics]
    assert losses == pytest.approx([line["loss"] for line in never_stopped.metrics[5:]], rel=1e-9)
    with pytest.raises(ValueError, match="sampling='random', but .* with sampling='epoch'; use that"):
        train(replace(on, sampling="random", out=tmp_path / "third"))
    monkeypatch.setattr(state, "place_of_step", lambda *args: (0, 40))
    with pytest.raises(ValueError, match=r"step 5 is at \[0, 40\] .* of a run at \[1, 10\]"):
        train(replace(on, out=tmp_path / "third"))
    assert not (tmp_path / "third").exists()
