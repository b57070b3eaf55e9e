"""Remote calls between processes: JSON frames over an authenticated socket; nothing is pickled.

An actor call takes one to two milliseconds when its processes have been idle, a call here a quarter of one. A request
is a method's name and JSON arguments, optionally followed by one frame of bytes.
"""

import contextlib
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, NamedTuple

from schemas import errors

Handler = Callable[..., Any]
_MAX_FRAME_BYTES = 2**30  # of a request

logger = logging.getLogger(__name__)


class Endpoint(NamedTuple):
    """A server's address, and the secret with which both sides authenticate."""

    host: str
    port: int
    secret: bytes


class RpcServer:
    """A server that runs each connection in a thread of its own.

    Args:
        host: The address to listen on.
        handlers: Handlers by method name. Each takes the connection's number, the request's arguments and, if the
            request has any, its bytes, and returns a JSON value. A PipelineError is raised in the client, with its
            type.
        on_close: Called with a connection's number when the connection has been closed.
    """

    def __init__(self, host: str, handlers: Mapping[str, Handler], on_close: Callable[[int], None]) -> None:
        self._handlers, self._on_close = handlers, on_close
        secret = os.urandom(32)
        self._listener = Listener((host, 0), authkey=secret)
        self.endpoint = Endpoint(host, self._listener.address[1], secret)
        threading.Thread(target=self._accept_loop, daemon=True).start()

    def _accept_loop(self) -> None:
        number = 0
        while True:
            try:
                connection = self._listener.accept()
            except (AuthenticationError, EOFError, OSError) as error:
                logger.warning("rejected a connection: %s", error)
                continue
            number += 1
            _set_options(connection)
            threading.Thread(target=self._serve, args=(number, connection), daemon=True).start()

    def _serve(self, number: int, connection: Connection) -> None:
        with contextlib.suppress(EOFError, OSError), connection:
            while True:
                request = json.loads(connection.recv_bytes(_MAX_FRAME_BYTES))
                data = [connection.recv_bytes(_MAX_FRAME_BYTES)] if request["has_data"] else []
                connection.send_bytes(json.dumps(self._respond(number, request, data)).encode())
        self._on_close(number)

    def _respond(self, number: int, request: dict[str, Any], data: list[bytes]) -> dict[str, Any]:
        try:
            return {"result": self._handlers[request["method"]](number, *request["args"], *data)}
        except errors.PipelineError as error:
            return {"error": type(error).__name__, "message": str(error)}
        except Exception as error:
            logger.exception("%s failed", request["method"])
            return {"error": "StoreError", "message": f"{request['method']} failed: {type(error).__name__}: {error}"}


class RpcClient:
    """One connection to a server. Calls from several threads are made one after another."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._connection: Connection | None = self._connect()

    def call(self, method: str, *args: Any, data: bytes | None = None) -> Any:
        """Send a request and wait for its result.

        Raises:
            PipelineError: The server's method raised it.
            ConnectionError: The server is gone.
        """
        request = json.dumps({"method": method, "args": args, "has_data": data is not None}).encode()
        with self._lock:
            try:
                response = self._exchange(request, data)
            except BaseException as error:  # a signal too: the next request must not receive this one's response
                if self._connection:
                    self._connection.close()
                self._connection = None
                if isinstance(error, EOFError | OSError):
                    raise ConnectionError(f"the server has closed the connection: {error}") from error
                raise
        if "error" in response:
            raise getattr(errors, response["error"])(response["message"])
        return response["result"]

    def _exchange(self, request: bytes, data: bytes | None) -> dict[str, Any]:
        if self._connection is None:
            self._connection = self._connect()
        self._connection.send_bytes(request)
        if data is not None:
            self._connection.send_bytes(data)
        response: dict[str, Any] = json.loads(self._connection.recv_bytes())
        return response

    def _connect(self) -> Connection:
        connection = Client((self._endpoint.host, self._endpoint.port), authkey=self._endpoint.secret)
        _set_options(connection)
        return connection


def _set_options(connection: Connection) -> None:
    """Send without delay, and detect within a minute that the peer's machine is gone."""
    with socket.socket(fileno=os.dup(connection.fileno())) as options:
        options.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        options.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        options.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20)
        options.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        options.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
