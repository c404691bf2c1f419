"""A small convolutional net for images: right with frozen batch norms or group norms, and with one mistake each.

Right is a batch norm with frozen statistics: in training mode it normalises over the samples of a rank, so that no way of
splitting a batch has the numbers of one process. A batch has five samples, so two ranks have three and two.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.train.verification.scripts.base import (
    OursDDP,
    OursFSDP,
    OursZero,
    OwnMeans,
    Plain,
    Script,
    TorchDDP,
    right,
    wrong,
)

CLASSES, CHANNELS, SAMPLES = 4, 4, 5


class Stage(nn.Module):
    def __init__(self, inputs: int, norm: nn.Module):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inputs, CHANNELS, 3, padding=1), norm

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(F.gelu(self.norm(self.conv(x))), 2)


class Net(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.stem, self.body = Stage(1, norm()), Stage(CHANNELS, norm())
        self.fc1, self.fc2 = nn.Linear(4 * CHANNELS, 8), nn.Linear(8, CLASSES)
        self.auxiliary = nn.Linear(4 * CHANNELS, CLASSES)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(self.stem(images)).flatten(1)
        return self.fc2(F.gelu(self.fc1(features))), self.auxiliary(features)


def freeze_statistics(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


@right
class Image(Script):
    units = (Stage,)
    plan = {"fc1": "column", "fc2": "row"}

    def build(self) -> nn.Module:
        """Return a net with batch norms whose statistics are as if read from a file."""
        model = Net(lambda: nn.BatchNorm2d(CHANNELS))
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(std=0.3)
                module.running_var.uniform_(0.5, 1.5)
        freeze_statistics(model)
        return model

    def batch(self, k: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(300 + k)
        images = torch.randn(SAMPLES, 1, 8, 8, generator=generator, dtype=torch.float64)
        flipped = torch.rand(SAMPLES, 1, 1, 1, generator=generator) < 0.5
        return torch.where(flipped, images.flip(-1), images), torch.randint(
            CLASSES, (SAMPLES,), generator=generator
        )

    def loss_sum(self, model: nn.Module, *samples: Tensor) -> Tensor:
        images, labels = samples
        return sum(F.cross_entropy(logits, labels, reduction="sum") for logits in model(images))

    def count(self, *samples: Tensor) -> Tensor:
        return torch.tensor(len(samples[1]))


@right
class GroupNormImage(Image):
    def build(self) -> nn.Module:
        return Net(lambda: nn.GroupNorm(2, CHANNELS))


wrong_image = partial(wrong, task=Image)

# Batch norms ---------------------------------------------------------------------------------------------------------


@wrong_image("stem.norm, a BatchNorm in training mode", OursDDP)
class batch_norms_see_a_ranks_samples(Image):
    """In training mode, in one process, too: there over the batch, on ranks over their own samples."""

    def build(self):
        return super().build().train()


@wrong_image("stem.norm, a BatchNorm in training mode", TorchDDP)
class train_thaws_the_statistics(Script):
    """The loop on ranks calls `model.train()` before each step, which undoes the freezing."""

    def step(self, k):
        self.called.train()
        return super().step(k)


@wrong_image("initial buffers: stem.norm.running_mean on rank 1", Plain)
class statistics_are_read_on_rank_0_alone(Script):
    """Parameters are broadcast and buffers forgotten: other ranks normalise by the statistics of a new net."""

    def wrap(self):
        for parameter in self.model.parameters():
            dist.broadcast(parameter.detach(), 0)
        for module in self.model.modules():
            if self.rank > 0 and isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
        return self.model


@wrong_image("initial buffers: stem.norm.running_mean on rank 1", OursZero)
class zero_is_trusted_with_the_statistics(Script):
    """ZeRO's optimizer makes parameters equal, not buffers, and each rank drew its own."""

    def seed(self):
        return self.rank


# Samples -------------------------------------------------------------------------------------------------------------


@wrong_image("2 of 3 samples of rank 0 are not in one process's batch", OursDDP)
class flips_are_drawn_by_rank(Script):
    """Images are flipped by the process's generator, whose numbers do not belong to the sample."""

    def part(self, k):
        images, labels = super().part(k)
        generator = torch.Generator().manual_seed(k)
        flipped = torch.rand(len(images), 1, 1, 1, generator=generator) < 0.5
        return [torch.where(flipped, images.flip(-1), images), labels]


class FourImages(Image):
    def batch(self, k):
        images, labels = super().batch(k)
        return images[:4], labels[:4]


@wrong_image("first in loss, step 0", OursFSDP, task=FourImages)
class labels_are_of_other_images(Script):
    """Images are cut in a row, labels with a stride."""

    def part(self, k):
        images, labels = self.batch(k)
        return [images.tensor_split(self.size)[self.rank], labels[self.rank :: self.size]]


@wrong_image("1 of 5 samples of one process's batch reach no rank", TorchDDP)
class the_last_sample_is_dropped(OwnMeans):
    """Five samples for two ranks: each takes two, and the mean is over four."""

    def part(self, k):
        each = SAMPLES // self.size
        return [x[self.rank * each : (self.rank + 1) * each] for x in self.batch(k)]


@wrong_image("ranks 0 and 1 (dp) train on the same samples: 1 of 3", OursZero)
class the_sampler_pads_by_repeating(OwnMeans):
    """As DistributedSampler does: the first sample comes again at the end, and counts twice."""

    def part(self, k):
        return [torch.cat([x, x[:1]])[self.rank :: self.size] for x in self.batch(k)]


@wrong_image(
    "ranks train on 2 to 3 samples: the mean of their means is not the mean of all",
    OursFSDP,
    task=GroupNormImage,
)
class uneven_parts_count_alike(OwnMeans):
    """Three samples on one rank and two on the other: the mean of their two means."""


# Parameters ----------------------------------------------------------------------------------------------------------


@wrong_image("auxiliary.weight gets a gradient on rank 0, and none on rank 1", OursDDP)
class an_auxiliary_loss_is_on_rank_0_alone(Script):
    """The second head's loss is inside `if rank == 0:`; on the other ranks it is not used."""

    def loss_sum(self, model, *samples):
        images, labels = samples
        logits, auxiliary = model(images)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        return loss if self.rank else loss + F.cross_entropy(auxiliary, labels, reduction="sum")


@wrong_image("it has no gradient here", OursFSDP)
class the_stem_is_frozen_on_ranks(Script):
    """The freezing of the statistics on ranks takes the convolution before them along."""

    def build(self):
        model = super().build()
        model.stem.conv.requires_grad_(False)
        return model


@wrong_image("gradients, step 0: fc1.weight", Plain)
class gradients_travel_in_bfloat16(Script):
    """The average is computed in bfloat16 to send less, and nobody is told."""

    def average(self):
        for parameter in self.model.parameters():
            sent = parameter.grad.bfloat16()
            dist.all_reduce(sent)
            parameter.grad.copy_(sent.double() / self.size)


@wrong_image("each of ranks 0 and 1 (dp) keeps its own", Plain)
class weights_are_averaged_in_place_of_gradients(Script):
    """Each rank steps by its own gradient, and the weights are averaged after the step: Adam's steps differ."""

    def average(self): ...

    def step(self, k):
        loss = super().step(k)
        with torch.no_grad():
            for parameter in self.model.parameters():
                dist.all_reduce(parameter)
                parameter /= self.size
        return loss
