"""A record of the caller's own training, on one rank or in one process, made by hooks around what `setup` returns."""

from __future__ import annotations

import gc
import hashlib
import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
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
    samples     a digest of each row of the model's input
    used        the parameters to which a backward has added a gradient
    generator   a digest of torch's generator before the step; `drew` tells whether the step used it
    stepped     whether an optimizer did a step
    """

    loss: float | None
    gradients: Tensors
    rates: dict[str, float]
    weights: Tensors
    buffers: Tensors
    samples: list[bytes]
    used: set[str]
    generator: bytes
    drew: bool
    stepped: bool


class Recorded(NamedTuple):
    """A training on one rank.

    initial    the weights after `setup`, and `buffers` the buffers
    trained    the parameters that an optimizer holds, and `untrained` those with gradients that no optimizer holds
    strangers  how many parameters the optimizers hold that are not the model's
    idle       the learning rate schedules that were never stepped
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
        with self._told("setup(None, mesh)"):
            made = (setup.load() if isinstance(setup, FromFile) else setup)(world, mesh)
        if not isinstance(made, (tuple, list)) or len(made) not in (3, 5):
            raise ValueError(f"setup returned {_kind(made)}; return {RETURNED}")
        model, optimizer, self._step, *checkpoint = made
        self.save: Any
        self.load: Any
        self.save, self.load = checkpoint or (None, None)
        self.models: list[nn.Module] = _several(model)
        self.optimizers: list[Any] = _several(optimizer)
        if wrong := [m for m in self.models if not isinstance(m, nn.Module)]:
            raise ValueError(f"setup returned the model {_kind(wrong[0])}; return {RETURNED}")
        if wrong := [o for o in self.optimizers if not hasattr(o, "param_groups")]:
            raise ValueError(f"setup returned the optimizer {_kind(wrong[0])}; return {RETURNED}")
        if wrong := [f for f in (self._step, *checkpoint) if not callable(f)]:
            raise ValueError(f"setup returned {_kind(wrong[0])} in place of a function; return {RETURNED}")
        self._takes_number = bool(inspect.signature(self._step).parameters)
        self.samples: list[bytes] = []
        self.half = False
        # In a pipeline's later stages there are activations in place of samples.
        for module in self.models[:1] if mesh.sizes["pp"] > 1 else self.models:
            module.register_forward_pre_hook(self._see_samples, with_kwargs=True)
        for module in {part for model in self.models for part in model.modules()}:
            module.register_forward_pre_hook(self._see_dtype, with_kwargs=True)
        self._used: set[str] = set()
        self._stepped = True
        for name, p in _named(self.models, "named_parameters"):
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(partial(self._see_use, name))
        self._gradients: Tensors = {}
        self._rates: dict[str, float] = {}
        for optimizer in self.optimizers:
            self._watch(optimizer)

    def step(self, number: int) -> Step:
        """Train one step."""
        self._gradients, self._rates, self._stepped = {}, {}, False
        self.samples.clear()
        self._used.clear()
        before = digest(torch.get_rng_state())
        with self._told(f"step({number})"):
            loss = self._step(number) if self._takes_number else self._step()
        if isinstance(loss, Tensor) and loss.numel() == 1:
            loss = loss.item()
        if not (loss is None or isinstance(loss, (int, float))):
            raise ValueError(f"step({number}) returned {_kind(loss)}; return the loss, a number, or None")
        drew = digest(torch.get_rng_state()) != before
        return Step(
            None if loss is None else float(loss), self._gradients, self._rates, self.weights(), self.buffers(),
            list(self.samples), set(self._used), before, drew, self._stepped,
        )  # fmt: skip

    def weights(self) -> Tensors:
        with _whole_units(self.models):
            return {name: _seen(p, p) for name, p in _named(self.models, "named_parameters")}

    def buffers(self) -> Tensors:
        return {name: _seen(b, b) for name, b in _named(self.models, "named_buffers")}

    def forget_gradients(self) -> None:
        for model in self.models:
            model.zero_grad(set_to_none=False)

    def recorded(self, initial: Tensors, buffers: Tensors, steps: list[Step]) -> Recorded:
        params = dict(_named(self.models, "named_parameters"))
        held = {id(p) for o in self.optimizers for p in _params(o)}
        known = {id(p) for p in params.values()}
        with_gradient = {
            n for s in steps for n, g in s.gradients.items() if g.value is not None and g.value.any()
        }
        schedules = [
            s for s in gc.get_objects() if issubclass(type(s), LRScheduler) and s.optimizer in self.optimizers
        ]
        inner = [s for outer in schedules for s in getattr(outer, "_schedulers", ())]
        idle = [s for s in schedules if getattr(s, "last_epoch", 1) == 0 and not getattr(s, "T_cur", 0)]
        with _whole_units(self.models, with_gradients=True) as visible:
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
            list(initial) if hidden else [name for name, p in params.items() if id(p) in held],
            [name for name, p in params.items() if id(p) not in held and name in with_gradient],
            len(held - known),
            [type(s).__name__ for s in idle if s not in inner],
            normalising,
            self.half,
            self.save is not None and len(steps) > 1,
        )

    def _watch(self, optimizer: Any) -> None:
        step = optimizer.step

        @wraps(step)
        def watched(*args: Any, **kwargs: Any) -> Any:
            closure = args[0] if args else kwargs.get("closure")
            if not callable(closure):
                self._see_gradients(optimizer)
                return step(*args, **kwargs)
            seen: list[bool] = []

            @wraps(closure)
            def once() -> Any:
                loss = closure()
                if not seen:
                    self._see_gradients(optimizer)
                    seen.append(True)
                return loss

            return step(
                *((once, *args[1:]) if args else ()), **(kwargs if args else kwargs | {"closure": once})
            )

        optimizer.step = watched

    def _see_gradients(self, optimizer: Any) -> None:
        """Record every gradient when the first optimizer steps, and each other optimizer's own when it does."""
        first, own = not self._gradients, {id(p) for p in _params(optimizer)}
        if isinstance(optimizer, ZeroOptimizer):
            optimizer.reduce_pending()  # as its step would
        self._stepped = True
        names = {id(p): name for name, p in _named(self.models, "named_parameters")}
        for group in optimizer.param_groups:
            if group.get("lr") is not None:
                self._rates |= {names[id(p)]: float(group["lr"]) for p in group["params"] if id(p) in names}
        with _whole_units(self.models, with_gradients=True) as visible:
            for name, p in _named(self.models, "named_parameters") if visible else ():
                if first or id(p) in own:
                    self._gradients[name] = _seen(p, p.grad)

    def _see_use(self, name: str, param: Tensor) -> None:
        self._used.add(name)

    def _see_samples(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        rows = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim()), None)
        wrapped = rows is not None and torch._C._functorch.is_functorch_wrapped_tensor(rows)
        if rows is not None and rows.layout == torch.strided and not wrapped:
            self.samples += [digest(row) for row in rows.detach()]

    def _see_dtype(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        floats = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()]
        autocast = any(torch.is_autocast_enabled(x.device.type) for x in floats)
        self.half |= autocast or any(x.dtype.itemsize < 4 for x in floats)

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
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
        if forget and training._stepped:
            training.forget_gradients()
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
    with training._told("save(folder)"):
        training.save(folder)
    if world is not None:
        world.barrier()
    training = Training(setup, world, mesh, limit_s)
    with training._told("load(folder)"):
        training.load(folder)
    loaded = training.weights()
    last = [training.step(number) for number in range(steps // 2, steps)][-1]
    return saved, loaded, last.rates, last.weights


def _several(x: Any) -> list[Any]:
    return list(x) if isinstance(x, (list, tuple, nn.ModuleList)) else [x]


def _params(optimizer: Any) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _named(models: Sequence[nn.Module], of: str) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters or buffers, by names without what wrappers add; of several modules, with the module's number."""
    for number, model in enumerate(models):
        for name, x in getattr(model, of)():
            bare = ".".join(part for part in name.split(".") if part not in WRAPPERS)
            yield bare if len(models) == 1 else f"{number}.{bare}", x


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


@contextmanager
def _whole_units(models: Sequence[nn.Module], with_gradients: bool = False) -> Iterator[bool]:
    """Hold torch's FullyShardedDataParallel's parameters whole meanwhile, since its flat shards have no names.

    Gives whether gradients can be seen, too: not those of flat parameters that replace the module's own.
    """
    flat = "FullyShardedDataParallel"
    roots = [m for m in models if any(type(part).__name__ == flat for part in m.modules())]
    units: list[Any] = [[m for m in root.modules() if type(m).__name__ == flat] for root in roots]
    visible = with_gradients and all(unit._use_orig_params for of_root in units for unit in of_root)
    with ExitStack() as stack:
        for root, of_root in zip(roots, units):
            summon = of_root[0].summon_full_params
            stack.enter_context(summon(root, writeback=False, with_grads=visible))
        yield visible or not roots


def digest(x: Tensor) -> bytes:
    """Return 12 bytes that tell a tensor's values from others."""
    if hasattr(x, "to_local"):
        x = x.to_local()
    raw = x.cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(raw.numpy().tobytes(), digest_size=12).digest()


def _kind(x: object) -> str:
    several = f" of {len(x)}" if isinstance(x, (tuple, list, dict)) else ""
    return f"{'None' if x is None else 'a ' + type(x).__name__}{several}"
