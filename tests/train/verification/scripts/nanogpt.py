"""A small GPT, trained as nanoGPT trains: right in every way, and with one mistake each."""

from __future__ import annotations

import copy
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import minipar
from tests.train.verification.scripts.base import (
    RIGHT,
    OursDDP,
    OursFSDP,
    OursTP,
    OursTPAndDDP,
    OursZero,
    OwnMeans,
    Plain,
    Script,
    TorchDDP,
    TorchFSDP,
    right,
    train,
    wrong,
)

VOCAB, DIM, HEAD_DIM, LENGTH, SAMPLES = 16, 8, 4, 6, 4
IGNORED = -100


class Block(nn.Module):
    def __init__(self, dropout: float):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.q, self.k, self.v, self.proj = (nn.Linear(DIM, DIM) for _ in range(4))
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln_1(x)
        q, k, v = (f(h).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for f in (self.q, self.k, self.v))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.proj(heads.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.ln_2(x)))))


class Model(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))


@right
class NanoGPT(Script):
    units = (Block,)
    plan = {"blocks.*.[qkv]": minipar.tensor_parallel.Column(unit=HEAD_DIM), "blocks.*.proj": "row",
            "blocks.*.up": "column", "blocks.*.down": "row"}  # fmt: skip

    def build(self) -> nn.Module:
        return Model()

    def batch(self, k: int) -> tuple[Tensor, ...]:
        """Texts of unequal lengths: the first samples have many padded targets, the last ones none."""
        generator = torch.Generator().manual_seed(100 + k)
        texts = torch.randint(VOCAB, (SAMPLES, LENGTH + 1), generator=generator)
        tokens, targets = texts[:, :-1], texts[:, 1:].clone()
        for sample in range(SAMPLES):
            targets[sample, sample + 2 :] = IGNORED
        return tokens, targets

    def loss_sum(self, model: nn.Module, *samples: Tensor) -> Tensor:
        tokens, targets = samples
        logits = model(tokens).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")

    def count(self, *samples: Tensor) -> Tensor:
        return samples[1].ne(IGNORED).sum()


wrong_gpt = partial(wrong, task=NanoGPT)

# Samples -------------------------------------------------------------------------------------------------------------


@wrong_gpt("ranks 0 and 1 (dp) train on the same samples: 2 of 2", OursDDP)
class every_rank_trains_on_the_first_part(Script):
    """The sampler has no rank, so that all ranks get rank 0's samples, and the others are never seen."""

    def part(self, k):
        return [x.tensor_split(self.size)[0] for x in self.batch(k)]


@wrong_gpt("ranks 0 and 1 (dp) train on the same samples: 1 of 2", TorchDDP)
class each_rank_shuffles_by_its_own_seed(Script):
    """Permutations differ, so the parts overlap: some samples count twice, others not at all."""

    def part(self, k):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(7 * k + self.rank))
        return [x[order].tensor_split(self.size)[self.rank] for x in self.batch(k)]


@wrong_gpt("2 of 2 samples of rank 1 are not in one process's batch", Plain)
class one_rank_is_a_batch_ahead(Script):
    """Rank 1 has drawn a batch before the loop, to look at it, and trains on the next one ever after."""

    def part(self, k):
        return super().part(k + self.rank)


@wrong_gpt("give all tp ranks the same batch", OursTP, tp=2)
class the_sampler_is_over_tp_ranks(Script):
    """The sampler has the size and rank of the world, not of dp: tp ranks compute different samples together."""

    def part(self, k):
        return [x.tensor_split(self.world.size)[self.world.rank] for x in self.batch(k)]


@wrong_gpt("ranks 0 and 2 (dp) train on the same samples: 2 of 2", OursTPAndDDP, dp=2, tp=2)
class the_sampler_takes_tps_rank(Script):
    """The axes are confused: dp ranks with the same coordinate on tp train on the same samples."""

    def part(self, k):
        return [x.tensor_split(self.size)[0] for x in self.batch(k)]


# Copies --------------------------------------------------------------------------------------------------------------


@wrong_gpt("DIVERGES first in initial weights", Plain)
class weights_are_seeded_by_rank(Script):
    """Every rank draws its own weights, and nobody broadcasts them; gradients are averaged all the same."""

    def seed(self):
        return self.rank

    def wrap(self):
        return self.model


@wrong_gpt("nothing tells what part of one process's model lm_head.weight", OursDDP)
class the_tie_is_lost_on_ranks(Script):
    """The head gets a copy of the embedding after the model was built, so the two train apart."""

    def build(self):
        model = super().build()
        model.lm_head.weight = nn.Parameter(model.wte.weight.detach().clone())
        return model


@wrong_gpt("learning rate, step 1: wte.weight on rank 1", TorchDDP)
class the_schedule_is_stepped_on_rank_0_alone(Script):
    """The schedule stands inside `if rank == 0:`, with the log, so replicas take steps of different length."""

    def setup(self):
        trained = super().setup()
        if self.rank > 0:
            self.schedule.step = lambda: None
        return trained


@wrong_gpt("step(1) called no optimizer's step", OursDDP)
class a_rank_skips_its_step_by_its_own_loss(Script):
    """A guard against spikes decides by this rank's loss, so that one replica steps and the other does not."""

    def step(self, k):
        self.optimizer.zero_grad()
        loss = self.backward(k)
        self.clip()
        if k != 1 or self.rank == 0:  # as a spike would decide
            self.optimizer.step()
        self.schedule.step()
        return self.reported(loss.detach())


# Gradients -----------------------------------------------------------------------------------------------------------


@wrong_gpt("each of ranks 0 and 1 (dp) keeps its own, clipped by its own norm: nobody averages them", Plain)
class gradients_are_not_averaged(Script):
    """The all-reduce after the backward is forgotten: each rank trains a model of its own."""

    def average(self): ...


@wrong_gpt("clipped to the right norm, from another scale", Plain)
class gradients_are_summed(Script):
    """The division by the number of ranks is forgotten. The clip and Adam hide it: hardly a loss differs."""

    def average(self):
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)


class Unclipped(NanoGPT):
    max_norm = 1e9

    def make_optimizer(self):
        return torch.optim.SGD(self.groups(), lr=0.03)


@wrong_gpt("1/2 of the right one: divided by the size of dp", OursDDP, task=Unclipped)
class gradients_are_averaged_twice(Script):
    """The loss is divided by the number of ranks, and DDP averages again."""

    def loss(self, k):
        return super().loss(k) / self.size

    def reported(self, loss):
        return super().reported(loss) * self.size


@wrong_gpt("first in gradients, step 0: ln_f.bias", Plain)
class only_the_blocks_are_averaged(Script):
    """The loop goes over `model.blocks.parameters()`: embeddings and the last norm keep a part of their gradient."""

    def average(self):
        for parameter in self.model.blocks.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.size


@wrong_gpt("a clip before the average?", Plain)
class gradients_are_clipped_before_the_average(Script):
    """Each rank clips its own gradient by its own norm, and the clipped ones are averaged."""

    def average(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        super().average()

    def clip(self): ...


@wrong_gpt("clipped by the norm of this rank's part", OursFSDP)
class shards_are_clipped_by_their_own_norm(Script):
    """Under FSDP the norm is computed by hand from this rank's shards: every rank scales by another factor."""

    def clip(self):
        gradients = [p.grad.as_subclass(Tensor) for p in self.model.parameters() if p.grad is not None]
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        for gradient in gradients:
            gradient.mul_((self.max_norm / norm).clamp(max=1.0))


@wrong_gpt("times the right one, entry by entry", OursZero)
class zeros_shards_are_clipped_on_rank_0_alone(Script):
    """The clip stands inside `if rank == 0:`, by a norm that was gathered before."""

    def clip(self):
        kept = [None if shard.grad is None else shard.grad.clone() for shard in self.optimizer.shards]
        super().clip()
        if self.rank > 0:
            for shard, gradient in zip(self.optimizer.shards, kept):
                shard.grad = gradient


@wrong_gpt("each of ranks 0 and 1 (dp) keeps its own", OursDDP)
class accumulation_never_leaves_no_sync(Script):
    """All microbatches run inside `no_sync()`, the last one, too: no backward averages."""

    def backward(self, k):
        with self.called.no_sync():
            return super().backward(k)


@wrong_gpt("no multiple and no part of the right one", TorchDDP)
class accumulated_microbatches_are_not_divided(Script):
    """Two microbatches, each with the mean of its own tokens; their sum is not divided by two."""

    max_norm = 1e9

    def backward(self, k):
        losses = []
        for tokens, targets in zip(*(x.split(1) for x in self.part(k))):
            loss = self.loss_sum(self.called, tokens, targets) / self.count(tokens, targets)
            loss.backward()
            losses.append(loss)
        return torch.stack(losses).mean()


@wrong_gpt("the gradient of the step before is still in it", TorchDDP)
class zero_grad_is_forgotten_on_ranks(Script):
    """The gradient of each step holds those of all steps before it."""

    def setup(self):
        trained = super().setup()
        self.optimizer.zero_grad = lambda *args, **options: None
        return trained


@wrong_gpt("gradients of earlier steps are added", TorchDDP)
class zero_grad_is_forgotten_everywhere(zero_grad_is_forgotten_on_ranks, NanoGPT):
    """The same in one process, so both agree, or nearly: DDP averages again what it has averaged."""


# The loss ------------------------------------------------------------------------------------------------------------


@wrong_gpt("where their counts of tokens differ?", OursZero)
class the_loss_is_a_mean_of_means(OwnMeans):
    """Each rank divides by the number of its own tokens. Padded texts are on rank 0, so its tokens count more."""


@wrong_gpt("first in loss, step 0", Plain)
class padding_counts_on_ranks(Script):
    """The loss of a rank divides by all its tokens, padded ones included."""

    def loss(self, k):
        tokens, targets = self.part(k)
        return self.loss_sum(self.called, tokens, targets) / targets.numel()


# The optimizer -------------------------------------------------------------------------------------------------------


@wrong_gpt("the optimizer holds 36 parameters that are not the model's", TorchFSDP)
class the_optimizer_has_the_parameters_before_fully_shard(Script):
    """The optimizer is made first: fully_shard replaces the parameters, and the optimizer updates the old ones."""

    def wrap(self):
        self.made = self.make_optimizer()
        self.make_optimizer = lambda: self.made
        return super().wrap()


@wrong_gpt("the optimizer holds 36 parameters that are not the model's", OursDDP)
class the_optimizer_has_another_models_parameters(the_optimizer_has_the_parameters_before_fully_shard):
    """The model is built again for the wrapper, from the same seed, after the optimizer was made."""

    def make_optimizer(self):
        made = super().make_optimizer()
        torch.manual_seed(self.seed())
        self.model = self.build().double()
        return made


@wrong_gpt("one process trains wpe.weight, and no rank's optimizer holds it", OursZero)
class positions_are_in_no_group(Script):
    """The groups are made by lists of modules, on ranks, and the positions are in none: nobody trains them."""

    def groups(self):
        return [
            {**group, "params": [(name, p) for name, p in group["params"] if name != "wpe.weight"]}
            for group in super().groups()
        ]


@wrong_gpt("no optimizer holds wpe.weight", OursDDP)
class positions_are_in_no_group_anywhere(positions_are_in_no_group, NanoGPT):
    """The same in one process: only the optimizer's parameters, beside the model's, tell."""


@wrong_gpt("are the optimizer's state, groups, weight decay or rate others?", OursFSDP)
class weight_decay_asks_the_shards_for_their_dims(Script):
    """nanoGPT decays what has two dimensions; FSDP's shards are flat, so that nothing is decayed."""

    def groups(self):
        self.decayed = {name: p.dim() >= 2 for name, p in self.model.named_parameters()}
        return super().groups()


@wrong_gpt("learning rate, step 1: wte.weight on rank 0", TorchDDP)
class the_rate_is_scaled_by_the_ranks(Script):
    """The learning rate is multiplied by the number of ranks, though the global batch is that of one process."""

    def setup(self):
        trained = super().setup()
        self.schedule.base_lrs = [rate * self.size for rate in self.schedule.base_lrs]
        return trained


@wrong_gpt("learning rate, step 0", OursZero)
class the_schedule_is_of_another_optimizer(Script):
    """The schedule was made for a torch optimizer before; ZeRO's keeps its first rate."""

    def setup(self):
        trained = super().setup()
        other = torch.optim.AdamW(self.groups(), lr=0.03)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.03
        self.schedule = self.make_schedule(other)
        return trained


# Dropout, and a checkpoint of the script's own -----------------------------------------------------------------------


class DroppingGPT(NanoGPT):
    def build(self):
        return Model(dropout=0.5)


@wrong_gpt("manual_seed", OursTP, task=DroppingGPT, tp=2)
class tp_ranks_drop_different_features(Script):
    """Seeded by rank after the split, tp ranks draw different masks for activations that all of them hold."""

    def setup(self):
        trained = super().setup()
        torch.manual_seed(self.world.rank)
        return trained


class Restarted(Script):
    """Before the step `restart_at` the script saves, forgets everything, and loads."""

    restart_at = 2

    def step(self, k: int) -> Tensor:
        if k == self.restart_at:
            state = copy.deepcopy(self.saved())
            self.optimizer.state.clear()
            for group in self.optimizer.param_groups:
                group["lr"] = 0.03
                del group["initial_lr"]
            self.schedule = self.make_schedule()
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.zero_()
            self.restore(*state)
        return super().step(k)

    def saved(self):
        return self.model.state_dict(), self.optimizer.state_dict(), self.schedule.state_dict()

    def restore(self, of_model, of_optimizer, of_schedule):
        self.model.load_state_dict(of_model)
        self.optimizer.load_state_dict(of_optimizer)
        self.schedule.load_state_dict(of_schedule)


RIGHT["NanoGPT, restarted"] = {"dp": 2}, partial(train, task=NanoGPT, way=TorchDDP, change=Restarted)


@wrong_gpt("first in weights, step 2", TorchDDP)
class the_checkpoint_has_no_optimizer_state(Restarted):
    """On ranks, the script resumes before step 2 with its weights and schedule, and Adam's moments at zero."""

    def restore(self, of_model, of_optimizer, of_schedule):
        self.model.load_state_dict(of_model)
        self.schedule.load_state_dict(of_schedule)
        for group, rate in zip(self.optimizer.param_groups, self.schedule.get_last_lr()):
            group["lr"] = rate


@wrong_gpt("learning rate, step 2", Plain)
class the_checkpoint_has_no_schedule(Restarted):
    """On ranks, the script resumes before step 2 and warms up again."""

    def restore(self, of_model, of_optimizer, of_schedule):
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.model.load_state_dict(of_model)
        self.optimizer.load_state_dict(of_optimizer)
        for group, rate in zip(self.optimizer.param_groups, rates):
            group["lr"] = rate


@wrong_gpt("first in weights, step 2", OursZero)
class every_rank_loads_rank_0s_part_of_the_state(Script):
    """ZeRO's `state_dict()` of rank 0 is saved alone, and its moments are copied to where other ranks have theirs."""

    def step(self, k):
        if k == 2:
            for key in ("exp_avg", "exp_avg_sq"):
                parts = [state[key] for _, state in self.optimizer.tensors_and_states()]
                own = torch.cat([part.flatten() for part in parts])
                sizes = self.dp.all_gather(torch.tensor([len(own)])).tolist()
                first = self.dp.all_gather(own, sizes)[: min(sizes[0], len(own))]
                loaded = torch.cat([first, own[len(first) :]])
                for part, values in zip(parts, loaded.split([part.numel() for part in parts])):
                    part.copy_(values.view_as(part))
        return super().step(k)
