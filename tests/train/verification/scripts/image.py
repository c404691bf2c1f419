"""A small convolutional net for images: right with frozen batch norms or group norms, and with one mistake each.

Right is a batch norm with frozen statistics: in training mode it normalises over the samples of a rank, so that no way of
splitting a batch has the numbers of one process. A batch has five samples, so two ranks have three and two.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.train.verification.scripts.base import (
    OursDDP,
    OursFSDP,
    OursZero,
    Plain,
    Script,
    TorchDDP,
    Wrong,
    right,
    train,
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


class GroupNormImage(Image):
    def build(self) -> nn.Module:
        return Net(lambda: nn.GroupNorm(2, CHANNELS))


RIGHT = {**right(Image), **right(GroupNormImage)}
WRONG: list[Wrong] = []

# Batch norms ---------------------------------------------------------------------------------------------------------


@wrong(WRONG, "norm", "BatchNorm", "running_mean", "statistics")
def batch_norms_see_a_ranks_samples(world, mesh):
    """In training mode, in one process, too: there over the batch, on ranks over their own samples."""

    class Task(Image):
        def build(self):
            return super().build().train()

    return train(world, mesh, Task, OursDDP)


@wrong(WRONG, "norm", "BatchNorm", "running_mean", "statistics")
def train_thaws_the_statistics(world, mesh):
    """The loop on ranks calls `model.train()` before each step, which undoes the freezing."""

    class Change(Script):
        def step(self, k):
            self.called.train()
            return super().step(k)

    return train(world, mesh, Image, TorchDDP, Change)


@wrong(WRONG, "running_mean", "running_var", "buffer")
def statistics_are_read_on_rank_0_alone(world, mesh):
    """Parameters are broadcast and buffers forgotten: other ranks normalise by the statistics of a new net."""

    class Change(Script):
        def wrap(self):
            for parameter in self.model.parameters():
                dist.broadcast(parameter.detach(), 0)
            for module in self.model.modules():
                if self.rank > 0 and isinstance(module, nn.BatchNorm2d):
                    module.reset_running_stats()
            return self.model

    return train(world, mesh, Image, Plain, Change)


@wrong(WRONG, "running_mean", "running_var", "buffer")
def zero_is_trusted_with_the_statistics(world, mesh):
    """ZeRO's optimizer makes parameters equal, not buffers, and each rank drew its own."""

    class Change(Script):
        def seed(self):
            return self.rank

    return train(world, mesh, Image, OursZero, Change)


# Samples -------------------------------------------------------------------------------------------------------------


@wrong(WRONG, "sample", "input", "loss", "gradient", "batch")
def flips_are_drawn_by_rank(world, mesh):
    """Images are flipped by the process's generator, whose numbers do not belong to the sample."""

    class Change(Script):
        def part(self, k):
            images, labels = super().part(k)
            generator = torch.Generator().manual_seed(k)
            flipped = torch.rand(len(images), 1, 1, 1, generator=generator) < 0.5
            return [torch.where(flipped, images.flip(-1), images), labels]

    return train(world, mesh, Image, OursDDP, Change)


@wrong(WRONG, "sample", "label", "target", "loss", "gradient", "batch")
def labels_are_of_other_images(world, mesh):
    """Images are cut in a row, labels with a stride."""

    class Change(Script):
        def batch(self, k):
            images, labels = super().batch(k)
            return images[:4], labels[:4]

        def part(self, k):
            images, labels = self.batch(k)
            return [images.tensor_split(self.size)[self.rank], labels[self.rank :: self.size]]

    class Task(Image):
        def batch(self, k):
            images, labels = super().batch(k)
            return images[:4], labels[:4]

    return train(world, mesh, Task, OursFSDP, Change)


@wrong(WRONG, "sample", "loss", "gradient", "batch")
def the_last_sample_is_dropped(world, mesh):
    """Five samples for two ranks: each takes two, and the mean is over four."""

    class Change(Script):
        def part(self, k):
            each = SAMPLES // self.size
            return [x[self.rank * each : (self.rank + 1) * each] for x in self.batch(k)]

        def loss(self, k):
            part = self.part(k)
            return self.loss_sum(self.called, *part) / self.count(*part)

    return train(world, mesh, Image, TorchDDP, Change)


@wrong(WRONG, "sample", "loss", "gradient", "batch")
def the_sampler_pads_by_repeating(world, mesh):
    """As DistributedSampler does: the first sample comes again at the end, and counts twice."""

    class Change(Script):
        def part(self, k):
            return [torch.cat([x, x[:1]])[self.rank :: self.size] for x in self.batch(k)]

        def loss(self, k):
            part = self.part(k)
            return self.loss_sum(self.called, *part) / self.count(*part)

    return train(world, mesh, Image, OursZero, Change)


@wrong(WRONG, "sample", "loss", "mean of means", "count", "gradient")
def uneven_parts_count_alike(world, mesh):
    """Three samples on one rank and two on the other: the mean of their two means."""

    class Change(Script):
        def loss(self, k):
            part = self.part(k)
            return self.loss_sum(self.called, *part) / self.count(*part)

    return train(world, mesh, GroupNormImage, OursFSDP, Change)


# Parameters ----------------------------------------------------------------------------------------------------------


@wrong(WRONG, "auxiliary")
def an_auxiliary_loss_is_on_rank_0_alone(world, mesh):
    """The second head's loss is inside `if rank == 0:`; on the other ranks it is not used."""

    class Change(Script):
        def loss_sum(self, model, *samples):
            images, labels = samples
            logits, auxiliary = model(images)
            loss = F.cross_entropy(logits, labels, reduction="sum")
            return loss if self.rank else loss + F.cross_entropy(auxiliary, labels, reduction="sum")

    return train(world, mesh, Image, OursDDP, Change)


@wrong(WRONG, "stem.conv")
def the_stem_is_frozen_on_ranks(world, mesh):
    """The freezing of the statistics on ranks takes the convolution before them along."""

    class Change(Script):
        def build(self):
            model = super().build()
            model.stem.conv.requires_grad_(False)
            return model

    return train(world, mesh, Image, OursFSDP, Change)


@wrong(WRONG, "gradient", "precision", "dtype", "rounded")
def gradients_travel_in_bfloat16(world, mesh):
    """The average is computed in bfloat16 to send less, and nobody is told."""

    class Change(Script):
        def average(self):
            for parameter in self.model.parameters():
                sent = parameter.grad.bfloat16()
                dist.all_reduce(sent)
                parameter.grad.copy_(sent.double() / self.size)

    return train(world, mesh, Image, Plain, Change)


@wrong(WRONG, "parameter", "average", "exp_avg", "momentum", "gradient", "step")
def weights_are_averaged_in_place_of_gradients(world, mesh):
    """Each rank steps by its own gradient, and the weights are averaged after the step: Adam's steps differ."""

    class Change(Script):
        def average(self): ...

        def step(self, k):
            loss = super().step(k)
            with torch.no_grad():
                for parameter in self.model.parameters():
                    dist.all_reduce(parameter)
                    parameter /= self.size
            return loss

    return train(world, mesh, Image, Plain, Change)
