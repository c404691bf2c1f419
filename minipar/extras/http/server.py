"""Run `minipar serve RUN --http`: open a socket, run the ranks from a thread, and answer HTTP requests with uvicorn."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import uvicorn
from starlette.applications import Starlette

from minipar.config.model_config import ModelConfig
from minipar.extras.http.app import Served, make_app
from minipar.extras.http.connection import Connection
from minipar.extras.http.live import Desk, serve_rank
from minipar.inference.draft_choice import DraftChoice
from minipar.inference.engine import Options
from minipar.inference.serve import ONE_RANK, MeshSizes, open_run
from minipar.runtime.launch import run


class HttpService:
    """A context manager that serves a model on a socket; a thread of this process runs the ranks.

    port      0 takes any free port; `address` says which
    max_open  maximum number of unfinished requests; more are refused with status 429

    Raises ValueError for a run that cannot be served, or an address that is in use or does not belong to this machine.
    """

    def __init__(
        self,
        run_folder: Path,
        options: Options,
        sizes: MeshSizes = ONE_RANK,
        draft: DraftChoice | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        max_open: int = 256,
        timeout_s: float = 60.0,
    ):
        checkpoint, config, codec = open_run(run_folder, options, sizes)
        if draft is not None:
            draft.check(Path(run_folder), config)
        self.desk = Desk(max_open)
        self.name = Path(run_folder).resolve().name
        self.failure: BaseException | None = None
        self._job = serve_rank, checkpoint.chosen, sizes, options, draft
        self._world_size, self._timeout_s = sizes.num_ranks, timeout_s
        self._socket = bound_socket(host, port)
        app = make_app(Served(self.name, longest_text(config, options), codec, self.desk))
        self._server = make_server(app, max_open)
        # A daemon thread, so that a second Ctrl-C ends the process even if the ranks do not end.
        self._ranks = threading.Thread(target=self._run_ranks, name="ranks", daemon=True)

    @property
    def address(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def __enter__(self) -> HttpService:
        self._ranks.start()
        return self

    def serve(self) -> None:
        """Answer requests until `stop`, Ctrl-C, or a failure of the ranks; finish open requests before returning.

        A second Ctrl-C cuts open requests off; uvicorn would log a traceback for each.
        """

        def is_told(record: logging.LogRecord) -> bool:
            return not self._server.force_exit

        log = logging.getLogger("uvicorn.error")
        log.addFilter(is_told)
        try:
            self._server.run(sockets=[self._socket])
        finally:
            log.removeFilter(is_told)

    def stop(self) -> None:
        self._server.should_exit = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Cancel requests that are still open, and wait for the ranks. Raises RankError if a rank has failed."""
        self.desk.close()
        self._ranks.join()
        self._socket.close()
        if self.failure is not None:
            raise self.failure

    def _run_ranks(self) -> None:
        try:
            run(
                *self._job, world_size=self._world_size, backend="auto", timeout_s=self._timeout_s,
                on_ask=self.desk.answer,
            )  # fmt: skip
        except BaseException as failure:  # raised again by __exit__, in the caller's thread
            self.failure = failure
        finally:
            self.desk.close("the ranks have ended")
            self.stop()


def make_server(app: Starlette, max_open: int) -> uvicorn.Server:
    """Return a server of `app`, with connections for `max_open` requests, and for others that are soon answered."""

    class Limited(Connection):
        max_connections = max_open + 256

    return uvicorn.Server(
        uvicorn.Config(app, http=Limited, ws="none", log_level="warning", log_config=None, lifespan="off")
    )


def longest_text(config: ModelConfig, options: Options) -> int:
    """Return the number of tokens of the longest text that can be served: a text's last token is not in the cache."""
    return min(config.max_seq_len, options.num_blocks * options.block_size + 1)


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens at this address. Raises ValueError if it cannot."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, OverflowError, UnicodeError):
        raise ValueError(f"host={host} has no address; use 127.0.0.1 for this machine alone") from None
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(2048)
    except OSError as error:
        bound.close()
        raise ValueError(
            f"port {port} of {host} cannot be used: {error.strerror}; use another, or 0 for any that is free"
        ) from None
    return bound


def serve_http(
    run_folder: Path,
    options: Options,
    sizes: MeshSizes,
    draft: DraftChoice | None,
    host: str,
    port: int,
    max_open: int,
    say: Callable[[str], None],
) -> None:
    """Serve a run's newest checkpoint over HTTP until Ctrl-C; `say` is called with the address."""
    with HttpService(run_folder, options, sizes, draft, host, port, max_open) as service:
        say(f"{service.name} at {service.address}/v1; Ctrl-C ends it")
        service.serve()
