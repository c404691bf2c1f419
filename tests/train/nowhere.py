"""A rank whose GPU is torch's meta device: tensors without values, which are nowhere sent, but are not on the host."""

from __future__ import annotations

from pathlib import Path
from traceback import extract_stack

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minipar.comm import Comm
from minipar.comm.transport.stream import ThreadStream
from minipar.comm.transport.transport import Transport

META = torch.device("meta")


class Nowhere(Transport):
    """A transport of which every message is sent and received at once."""

    def make_stream(self, key) -> ThreadStream:
        return ThreadStream(str(key), self.waits)

    def start(self, channel, send, receive, paired):
        return ()


def world_of(size: int) -> Comm:
    """The world of the last of `size` ranks, with the meta device."""
    ranks = tuple(range(size))
    return Comm(Nowhere(None, ranks, size - 1, META, 10.0), ranks, "world")


class HostCopies(TorchDispatchMode):
    """A context that notes, in `waited`, where the host would wait for a copy to the device, and counts the `pinned` ones.

    Use `install(monkeypatch)` first: without a GPU no memory can be pinned, nor a tensor on the device be read.
    """

    def __init__(self):
        super().__init__()
        self.waited: list[str] = []
        self.pinned = 0
        self._in_pinned_memory: list[Tensor] = []

    def install(self, monkeypatch) -> None:
        for name, instead in (
            ("pin_memory", self._pin),
            ("tolist", _ones),
            ("item", lambda x: _ones(x[None])[0]),
        ):
            monkeypatch.setattr(Tensor, name, _for(name == "pin_memory", instead, getattr(Tensor, name)))
        monkeypatch.setattr(Tensor, "is_cuda", property(lambda x: x.is_meta))
        for name in ("tensor", "as_tensor"):
            monkeypatch.setattr(torch, name, self._noting(getattr(torch, name)))

    def _pin(self, x: Tensor) -> Tensor:
        if not any(x is y for y in self._in_pinned_memory):
            x = x.clone()
            self._in_pinned_memory.append(x)
        return x

    def _noting(self, make):
        def made(data, *args, **options):
            result = make(data, *args, **options)
            if result.is_meta and not (isinstance(data, Tensor) and data.is_meta):
                self._note()
            return result

        return made

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result, name = function(*args, **kwargs), function.overloadpacket.__name__
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
        of_host = [x for x in tensors if not x.is_meta]
        if len(of_host) in (0, len(tensors)):
            return result
        if name in ("_to_copy", "copy_"):
            asynchronous = kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,))
            if asynchronous and all(any(x is y for y in self._in_pinned_memory) for x in of_host):
                self.pinned += 1
            else:
                self._note()
        elif any(x.dim() for x in of_host):  # one number of the host is an argument of the kernel
            self._note()
        return result

    def _note(self) -> None:
        ours = [
            f for f in extract_stack() if "/minipar/" in f.filename and "/site-packages/" not in f.filename
        ]
        self.waited.append(
            "/".join(Path(ours[-1].filename).parts[-2:]) + " " + ours[-1].name if ours else "elsewhere"
        )


def _for(of_host: bool, instead, original):
    """The function `instead` for tensors on the host or, otherwise, on the device; for others the original one."""
    return lambda x, *args: original(x, *args) if x.is_meta == of_host else instead(x)


def _ones(x: Tensor) -> list:
    return torch.ones(x.shape).tolist()
