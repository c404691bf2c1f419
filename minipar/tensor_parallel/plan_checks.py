"""Checks of a plan at run time: what must be equal on the tp ranks, and what must be as in one process.

    before the cut     every rank has the same plan and the same weights
    the first call     every rank has the same inputs; then the model runs twice without dropout and gradients, once with
                       every column layer's output gathered, as in one process, and once cut: row layers get the same
                       inputs. Buffers and attributes are restored
    each backward      a whole parameter's gradient is the same on every rank, until it was once other than zero

So an attribute that should be `Divided`, a missing `parts` or "summed", another batch or dropout mask raise, by name.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from minipar.comm import Comm, autograd
from minipar.comm.agreement import require_equal
from minipar.comm.host import on_host
from minipar.mesh.shard_gradient import trainable
from minipar.model.evaluating import evaluating

PLAIN = (Tensor, bool, int, float, str, type(None))
# Relative differences above rounding, also in 16 bits, and below what a mistake makes.
OF_ACTIVATIONS = 0.05
OF_GRADIENTS = 1e-3


def described(x: Tensor) -> str:
    """Return shape, dtype, whether it is trained and, unless it is on the meta device, a checksum of the values."""
    trained = "trained" if x.requires_grad else "not trained"
    if x.is_meta:
        return f"{list(x.shape)} {x.dtype} {trained}"
    values = memoryview(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    return f"{list(x.shape)} {x.dtype} {trained} with checksum {zlib.crc32(values):08x}"


def watch_gradient(parameter: Tensor, hook: Callable[[Tensor], Tensor | None]) -> None:
    """Call the hook with each gradient of the parameter, also if it is frozen now and trained later."""
    with trainable(parameter) as can_train:
        if can_train:
            parameter.register_hook(hook)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """At the end, give each module back the attributes and the values of buffers that it has now.

    So a count of calls, or a cache that grows with the longest sequence, is as if the calls in between had not been made.
    """
    before = [(vars(module), dict(vars(module)), module._buffers.copy()) for module in model.modules()]
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for now, attributes, buffers in before:
            now.clear()
            now.update(attributes)
            now["_buffers"].clear()
            now["_buffers"].update(buffers)
        for buffer, value in values:
            buffer.copy_(value)


class GradientCheck:
    """Compares gradients that every rank has whole, at the end of a backward: equal, unless they are to be summed.

    parameters  name -> whole parameter
    outputs     name -> layer whose output is gathered
    summed      the parameters whose gradients differ, and are summed after this
    unchecked   names of gradients that were not yet finite and other than zero; the same on every rank

    A backward that reaches one of them sends 3 numbers for each.
    Raises ValueError, the same on every rank, naming the parameter.
    """

    def __init__(
        self,
        comm: Comm,
        parameters: Mapping[str, Tensor],
        outputs: Mapping[str, nn.Module],
        summed: Collection[str],
    ):
        self.comm, self.summed = comm, summed
        self.unchecked = [*parameters, *(f"the output of {name}" for name in outputs)]
        # Of each backward under way: that of a reentrant checkpoint runs inside another one.
        self._found: dict[int, dict[str, list[float]]] = {}
        for name, parameter in parameters.items():
            watch_gradient(parameter, partial(self._see, name))
        for name, layer in outputs.items():
            layer.register_forward_hook(partial(self._see_output, f"the output of {name}"))

    def _see_output(self, name: str, layer: nn.Module, args: object, y: Tensor) -> None:
        if y.requires_grad and name in self.unchecked:
            y.register_hook(partial(self._see, name))

    def _see(self, name: str, gradient: Tensor) -> None:
        if name not in self.unchecked or gradient.layout != torch.strided:
            return
        backward = torch._C._current_graph_task_id()
        if backward not in self._found:
            self._found[backward] = {}
            Variable._execution_engine.queue_callback(lambda: self._compare(self._found.pop(backward)))
        norm = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64)
        total = gradient.detach().sum(dtype=torch.float64)
        self._found[backward][name] = torch.stack([norm, total, torch.ones_like(norm)]).tolist()

    def _compare(self, seen: dict[str, list[float]]) -> None:
        if not self.unchecked:
            return
        host = on_host(self.comm)
        own = [seen.get(name, [0.0, 0.0, 0.0]) for name in self.unchecked]
        of_ranks = host.all_gather(torch.tensor([own], dtype=torch.float64, device=host.device)).cpu()
        for name, found in zip(list(self.unchecked), of_ranks.unbind(1)):
            norm = found[:, 0].max()
            far = (found - found[0]).abs().amax(1) > OF_GRADIENTS * norm
            checked = norm > 0 and bool(found.isfinite().all())
            if name in self.summed:
                if checked and not far.any():
                    raise ValueError(
                        f'the gradient of {name} is the same on every tp rank; do not plan it as "summed"'
                    )
            elif far.any():
                rank = int(far.nonzero()[0])
                raise ValueError(
                    f"the gradient of {name}, which every tp rank has whole, differs: its norm is {found[0, 0]:.6g} on "
                    f'rank 0 and {found[rank, 0]:.6g} on rank {rank}; plan it as "summed" if it acts on split features, '
                    "give all tp ranks the same batch and, for dropout, the same torch.manual_seed"
                )
            if checked:
                self.unchecked.remove(name)


class FirstCall:
    """A hook before the first call of a cut model, without objects such as caches, which a second run would change.

    columns  name of a column layer -> the number of layers stored in it
    rows     names of row layers
    divided  (module, attribute) of each divided attribute

    Sends the outputs of all column layers once.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Comm,
        columns: Mapping[str, int],
        rows: list[str],
        divided: list[tuple[str, str]],
    ):
        self.comm, self.columns, self.rows, self.divided = comm, columns, rows, divided
        self._handle = model.register_forward_pre_hook(self, with_kwargs=True)

    @_disable_dynamo  # it is called once: of torch.compile(model), too, as it stands
    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves = tree_leaves((args, kwargs))
        if not all(isinstance(x, PLAIN) for x in leaves):
            return
        self._handle.remove()
        tensors = {f"input {i}": described(x.detach()) for i, x in enumerate(leaves) if isinstance(x, Tensor)}
        advice = "give all tp ranks the same batch, as DistributedSampler(data, num_replicas=dp.size, rank=dp.rank) does"
        require_equal(self.comm, "inputs of the model", tensors, advice)
        devices = {x.device for x in model.parameters() if x.is_cuda}
        with evaluating(model), unchanged(model), torch.no_grad(), torch.random.fork_rng(devices):
            self._compare(model, lambda: model(*args, **kwargs))

    def _compare(self, model: nn.Module, run: Callable[[], object]) -> None:
        """Run the model as in one process, then cut; raise ValueError where a row layer's inputs differ."""
        random = torch.get_rng_state()
        expected: list[Tensor] = []
        with ExitStack() as undo:
            for name, parts in self.columns.items():
                gather = partial(self._gather_output, parts)
                undo.callback(model.get_submodule(name).register_forward_hook(gather).remove)
            for name in self.rows:
                split = partial(self._split_input, expected)
                undo.callback(model.get_submodule(name).register_forward_pre_hook(split).remove)
            for name, attribute in self.divided:
                theirs = model.get_submodule(name)
                own = getattr(theirs, attribute)
                undo.callback(setattr, theirs, attribute, own)
                setattr(theirs, attribute, own * self.comm.size)
            run()
        torch.set_rng_state(random)
        far = dict.fromkeys(self.rows, 0.0)
        failure: Exception | None = None
        begun = ""  # the module that began last
        with ExitStack() as undo:

            def begin(name: str, *_: object) -> None:
                nonlocal begun
                begun = name

            for name, module in model.named_modules():
                undo.callback(module.register_forward_pre_hook(partial(begin, name)).remove)
            for name in self.rows:
                compare = partial(self._compare_input, name, expected, far)
                undo.callback(model.get_submodule(name).register_forward_pre_hook(compare).remove)
            try:
                run()
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                failure = error
        self._require_near(far, failure, begun)

    def _gather_output(self, parts: int, layer: nn.Module, args: object, y: Tensor) -> Tensor:
        return autograd.gather(self.comm, y.unflatten(-1, (parts, -1)), dim=-1).flatten(-2)

    def _split_input(self, expected: list[Tensor], layer: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        own = args[0].shape[-1] // self.comm.size
        part = args[0].narrow(-1, self.comm.rank * own, own)
        expected.append(part)
        return (part,)

    def _compare_input(
        self,
        name: str,
        expected: list[Tensor],
        far: dict[str, float],
        layer: nn.Module,
        args: tuple[Tensor],
    ) -> None:
        want = expected.pop(0) if expected else args[0].new_empty(0)
        if want.shape != args[0].shape:
            far[name] = float("inf")
            return
        distance, norm = (torch.linalg.vector_norm(x.double()) for x in (want - args[0], want))
        if distance > OF_ACTIVATIONS * norm:
            far[name] = max(far[name], float(distance / norm))

    def _require_near(self, far: dict[str, float], failure: Exception | None, begun: str) -> None:
        found = torch.tensor([*far.values(), float(failure is not None)], dtype=torch.float64)
        host = on_host(self.comm)
        *of_rows, failed = host.all_reduce(found.to(host.device), op="max").tolist()
        wrong = [name for name, distance in zip(far, of_rows) if distance]
        if not wrong and not failed:
            return
        what = (
            f"the input of {wrong[0]} is not what it is in one process"
            if wrong
            else f"the cut model raises in or after {begun}: {failure}"
        )
        raise ValueError(
            f"plan: {what}; give Column(unit=, parts=) to a layer that stores several, Divided(...) to a number of heads "
            "or a width that the module keeps, and cut no layer whose output is used across heads or features"
        ) from failure
