"""A record of the caller's own training, on one rank or in one process, made by hooks around what `setup` returns."""

from __future__ import annotations

import dis
import gc
import hashlib
import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial, wraps
from itertools import chain, pairwise
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from minipar.comm import Comm
from minipar.data_parallel import ZeroOptimizer
from minipar.data_parallel.partial_gradients import ReducedGradient
from minipar.mesh import Mesh, Placement
from minipar.runtime.caller import is_own
from minipar.spec.from_file import FromFile, Hangs, deadline

Setup = Callable[[Comm | None, Mesh], Any]
# Segments that wrappers put into the names of parameters.
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
RETURNED = "(model, optimizer, step), or (model, optimizer, step, save, load)"


class Held(NamedTuple):
    """A tensor that this rank holds, of a parameter or a buffer.

    placement   the part of the one-process parameter that it is, where the tensor says so
    """

    placement: Placement | None
    value: Tensor | None


Tensors = dict[str, Held]
# The weights when saved and when loaded, and the learning rates and the weights of the last step.
Interrupted = tuple[Tensors, Tensors, dict[str, float], Tensors]


class Step(NamedTuple):
    """One step of a training on one rank.

    gradients   as they were when an optimizer first stepped, clipped and all
    rates       the learning rate of each parameter at that moment
    samples     a digest of each row of the model's input, and of each column: samples may be along dim 1
    used        the parameters to which a backward has added a gradient
    generator   a digest of torch's generator before the step; `drew` tells whether the step used it
    stepped     whether an optimizer did a step
    """

    loss: float | None
    gradients: Tensors
    rates: dict[str, float]
    weights: Tensors
    buffers: Tensors
    samples: tuple[list[bytes], list[bytes]]
    used: set[str]
    generator: bytes
    drew: bool
    stepped: bool


class Recorded(NamedTuple):
    """A training on one rank.

    initial    the weights after `setup`, and `buffers` the buffers
    trained    the parameters that an optimizer holds, and `untrained` those with gradients that no optimizer holds
    strangers  how many parameters the optimizers hold that are not the model's
    idle       the learning rate schedules that were never stepped, and that the step doesn't name: it may wait for an epoch
    batch_norm the modules that normalise by the statistics of this rank's rows
    half       whether a module computed in 16 bits
    saves      whether `save` and `load` were given, and there are steps on both sides of a checkpoint
    """

    initial: Tensors
    buffers: Tensors
    steps: list[Step]
    trained: list[str]
    untrained: list[str]
    strangers: int
    idle: list[str]
    batch_norm: list[str]
    half: bool
    saves: bool


class Training:
    """A training made by `setup(world, mesh)`, watched from outside.

    Raises ValueError, in one line, if `setup` raises in one process or returns something else than a training.
    """

    def __init__(self, setup: Setup | FromFile, world: Comm | None, mesh: Mesh, limit_s: float):
        self._one_process, self._limit_s = world is None, limit_s
        with self.told("setup(None, mesh)"):
            made = (setup.load() if isinstance(setup, FromFile) else setup)(world, mesh)
        if not isinstance(made, (tuple, list)) or len(made) not in (3, 5):
            raise ValueError(f"setup returned {_kind(made)}; return {RETURNED}")
        model, optimizer, self._step, *self.checkpoint = made
        self.models: list[nn.Module] = _several(model)
        self.optimizers: list[Any] = _several(optimizer)
        for what, found, fits in (
            ("model", self.models, lambda x: isinstance(x, nn.Module)),
            ("optimizer", self.optimizers, lambda x: hasattr(x, "param_groups")),
            ("function", [self._step, *self.checkpoint], callable),
        ):
            if wrong := [x for x in found if not fits(x)]:
                raise ValueError(f"setup returned the {what} {_kind(wrong[0])}; return {RETURNED}")
        self._takes_number = bool(inspect.signature(self._step).parameters)
        self._samples: tuple[list[bytes], list[bytes]] = [], []
        self._half = False
        # In a pipeline's later stages there are activations in place of samples.
        called = self.models[:1] if mesh.sizes["pp"] > 1 else self.models
        for model in self.models:
            for module in model.modules():
                see = partial(self._see_inputs, module in called)
                module.register_forward_pre_hook(see, with_kwargs=True)
        self._used: set[str] = set()
        for name, p in self._named():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(partial(self._see_use, name))
        self.stepped = True
        self._gradients: Tensors = {}
        self._rates: dict[str, float] = {}
        for optimizer in self.optimizers:
            self._watch(optimizer)

    def step(self, number: int) -> Step:
        """Train one step."""
        self._gradients, self._rates, self.stepped = {}, {}, False
        self._samples, self._used = ([], []), set()
        before = digest(torch.get_rng_state())
        with self.told(f"step({number})"):
            loss = self._step(number) if self._takes_number else self._step()
        if isinstance(loss, Tensor) and loss.numel() == 1:
            loss = loss.item()
        if not (loss is None or isinstance(loss, (int, float))):
            raise ValueError(f"step({number}) returned {_kind(loss)}; return the loss, a number, or None")
        drew = digest(torch.get_rng_state()) != before
        return Step(
            None if loss is None else float(loss), self._gradients, self._rates, self.weights(), self.buffers(),
            self._samples, self._used, before, drew, self.stepped,
        )  # fmt: skip

    def weights(self) -> Tensors:
        with _whole_units(self.models):
            return {name: _seen(p, p) for name, p in self._named()}

    def buffers(self) -> Tensors:
        return {name: _seen(b, b) for name, b in self._named("named_buffers")}

    def recorded(self, initial: Tensors, buffers: Tensors, steps: list[Step]) -> Recorded:
        params = dict(self._named())
        held = {id(p) for o in self.optimizers for p in _params(o)}
        with_gradient = {
            n for s in steps for n, g in s.gradients.items() if g.value is not None and g.value.any()
        }
        schedules = [
            s for s in gc.get_objects() if issubclass(type(s), LRScheduler) and s.optimizer in self.optimizers
        ]
        inner = [s for outer in schedules for s in getattr(outer, "_schedulers", ())]
        idle = [s for s in schedules if getattr(s, "last_epoch", 1) == 0 and not getattr(s, "T_cur", 0)]
        with _whole_units(self.models) as visible:
            hidden = not visible
        normalising = [
            name
            for model in self.models
            for name, m in model.named_modules()
            if isinstance(m, nn.modules.batchnorm._BatchNorm)
            and not isinstance(m, nn.SyncBatchNorm)
            and m.training
        ]
        return Recorded(
            initial,
            buffers,
            steps,
            [*initial] if hidden else [name for name, p in params.items() if id(p) in held],
            [name for name, p in params.items() if id(p) not in held and name in with_gradient],
            len(held - {id(p) for p in params.values()}),
            [type(s).__name__ for s in idle if s not in inner and not _steps(self._step, s)],
            normalising,
            self._half,
            bool(self.checkpoint) and len(steps) > 1,
        )

    def _named(self, of: str = "named_parameters") -> Iterator[tuple[str, Tensor]]:
        """Yield parameters or buffers, by names without what wrappers add; of several modules, with the module's number."""
        for number, model in enumerate(self.models):
            for name, x in getattr(model, of)():
                bare = ".".join(part for part in name.split(".") if part not in WRAPPERS)
                yield bare if len(self.models) == 1 else f"{number}.{bare}", x

    def _watch(self, optimizer: Any) -> None:
        """See the gradients before each step: where it has a closure, once that has first computed them."""

        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            unseen = [optimizer]

            def see(closure: Any = None) -> Any:
                loss = closure and closure()
                if unseen:
                    self._see_gradients(unseen.pop())
                return loss

            def seen(x: Any) -> Any:
                return partial(see, x) if callable(x) else x

            if not any(map(callable, (*args, *kwargs.values()))):
                see()
            return tuple(map(seen, args)), {name: seen(x) for name, x in kwargs.items()}

        step = optimizer.step
        # The caller may have kept `step` itself; but one that he has put in its place doesn't run the hooks.
        is_torchs = "step" not in vars(optimizer) or hasattr(step, "_wrapped_by_lr_sched")
        if is_torchs and hasattr(getattr(type(optimizer), "step", None), "hooked"):
            optimizer.register_step_pre_hook(before)
        else:

            @wraps(step)
            def watched(*args: Any, **kwargs: Any) -> Any:
                args, kwargs = before(None, args, kwargs)
                return step(*args, **kwargs)

            optimizer.step = watched

    def _see_gradients(self, optimizer: Any) -> None:
        """Record every gradient when the first optimizer steps, and each other optimizer's own when it does."""
        first, own = not self._gradients, {id(p) for p in _params(optimizer)}
        if isinstance(optimizer, ZeroOptimizer):
            optimizer.reduce_pending()  # as its step would
        self.stepped = True
        names = {id(p): name for name, p in self._named()}
        for group in optimizer.param_groups:
            if group.get("lr") is not None:
                self._rates |= {names[id(p)]: float(group["lr"]) for p in group["params"] if id(p) in names}
        with _whole_units(self.models) as visible:
            for name, p in self._named() if visible else ():
                if first or id(p) in own:
                    self._gradients[name] = _seen(p, p.grad)

    def _see_use(self, name: str, param: Tensor) -> None:
        self._used.add(name)

    def _see_inputs(
        self, called: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """See whether a module computes in 16 bits, and what samples a model is `called` with, to be trained on."""
        if torch.compiler.is_compiling():
            return
        inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        self._half |= any(
            x.dtype.itemsize < 4 or torch.is_autocast_enabled(x.device.type)
            for x in inputs
            if x.is_floating_point()
        )
        rows = next((x.detach() for x in inputs if x.dim()), None)
        if not called or rows is None or not torch.is_grad_enabled():
            return
        if rows.layout == torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(rows):
            for dim, digests in enumerate(self._samples[: rows.dim()]):
                digests += map(digest, rows.movedim(dim, 0))

    @contextmanager
    def told(self, what: str) -> Iterator[None]:
        """In one process, tell in one line what the caller's code raises; on ranks, `run` tells it with the rank."""
        try:
            with deadline(None, self._limit_s):
                yield
        except Hangs as error:
            raise ValueError(f"{what} {error}") from None
        except Exception as error:
            if not self._one_process:
                raise
            frames = [f for f in traceback.extract_tb(error.__traceback__) if is_own(f.filename)]
            where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
            words = " ".join(str(error).split())
            raise ValueError(f"{what} raised {type(error).__name__}{where}: {words}") from error


def record(
    setup: Setup | FromFile, world: Comm | None, mesh: Mesh, steps: int, limit_s: float, *,
    nudge: bool = False, forget: bool = False, stepped: Sequence[bool] = (),
) -> Recorded:  # fmt: skip
    """Train `steps` steps and return what was seen.

    nudge    multiply the initial weights by 1 + eps, to see what rounding alone does
    forget   zero the gradients before each step that follows an optimizer's
    stepped  the steps in which one process's optimizer does one: a rank that doesn't leaves the others waiting
    """
    training = Training(setup, world, mesh, limit_s)
    if nudge:
        with torch.no_grad():
            for model in training.models:
                for p in model.parameters():
                    if p.is_floating_point():
                        p.mul_(1 + torch.finfo(p.dtype).eps)
    initial, buffers, seen = training.weights(), training.buffers(), []
    for number in range(steps):
        for model in training.models if forget and training.stepped else ():
            model.zero_grad(set_to_none=False)
        seen.append(training.step(number))
        if number < len(stepped) and stepped[number] and training.optimizers and not seen[-1].stepped:
            raise ValueError(f"step({number}) called no optimizer's step, and in one process it does")
    if training.optimizers and not any(step.stepped for step in seen):
        raise ValueError(f"{steps} steps called no optimizer's step")
    return training.recorded(initial, buffers, seen)


def interrupted(
    setup: Setup | FromFile, world: Comm | None, mesh: Mesh, steps: int, limit_s: float, folder: str
) -> Interrupted:
    """Train half the steps, save, set up anew, load, and train the rest."""
    training = Training(setup, world, mesh, limit_s)
    for number in range(steps // 2):
        training.step(number)
    saved = training.weights()
    with training.told("save(folder)"):
        training.checkpoint[0](folder)
    if world is not None:
        world.barrier()
    training = Training(setup, world, mesh, limit_s)
    with training.told("load(folder)"):
        training.checkpoint[1](folder)
    loaded = training.weights()
    last = [training.step(number) for number in range(steps // 2, steps)][-1]
    return saved, loaded, last.rates, last.weights


def _several(x: Any) -> list[Any]:
    return list(x) if isinstance(x, (list, tuple, nn.ModuleList)) else [x]


def _params(optimizer: Any) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _seen(tensor: Tensor, value: Tensor | None) -> Held:
    """Return a copy of the value on the CPU, whole where DTensor or FSDP can say what the whole is."""
    if isinstance(value, ReducedGradient):
        tensor, value = value.shard, value.shard.grad
    placement = getattr(tensor, "placement", None)
    if value is None:
        return Held(placement, None)
    whole: Any = value.detach()
    if whole.layout != torch.strided:
        whole = whole.to_dense()
    if hasattr(whole, "full_tensor"):
        everywhere = all(p.is_replicate() for p in whole.placements)
        whole = whole.to_local() if everywhere else whole.full_tensor()
    return Held(placement, whole.as_subclass(Tensor).to("cpu", copy=True))


def _steps(function: Any, x: object, seen: tuple[Any, ...] = ()) -> bool:
    """Return whether the code of a function, or of one of the caller's own functions that it names, calls `x.step`."""
    code = getattr(function, "__code__", None)
    if code is None or code in seen or not is_own(code.co_filename):
        return False
    owner, named = getattr(function, "__self__", None), dict(function.__globals__)
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        with suppress(ValueError):  # nothing has been assigned to it
            named[name] = cell.cell_contents
    for load, then in pairwise(dis.get_instructions(code)):
        if isinstance(load.argval, str):
            value = named.get(
                load.argval, inspect.getattr_static(owner, load.argval, None)
            )  # no property runs
            if isinstance(value, FunctionType) and load.argval not in named:
                value = value.__get__(owner)
            if then.argval == "step" and value is x or _steps(value, x, (*seen, code)):
                return True
    return False


@contextmanager
def _whole_units(models: Sequence[nn.Module]) -> Iterator[bool]:
    """Hold torch's FullyShardedDataParallel's parameters whole meanwhile, since its flat shards have no names.

    Gives whether gradients can be seen, too: not those of flat parameters that replace the module's own.
    """
    units: list[list[Any]] = [
        [m for m in model.modules() if type(m).__name__ == "FullyShardedDataParallel"] for model in models
    ]
    visible = all(unit._use_orig_params for unit in chain.from_iterable(units))
    with ExitStack() as stack:
        for model, of_model in zip(models, units):
            for unit in of_model[:1]:
                stack.enter_context(unit.summon_full_params(model, writeback=False, with_grads=visible))
        yield visible


def digest(x: Tensor) -> bytes:
    """Return 12 bytes that tell a tensor's values from others."""
    if hasattr(x, "to_local"):
        x = x.to_local()
    raw = x.cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    return hashlib.blake2b(raw.numpy().tobytes(), digest_size=12).digest()


def _kind(x: object) -> str:
    several = f" of {len(x)}" if isinstance(x, (tuple, list, dict)) else ""
    return f"{'None' if x is None else 'a ' + type(x).__name__}{several}"
