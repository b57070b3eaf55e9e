"""Requests and answers between processes: JSON frames over an authenticated socket; nothing is pickled.

An actor call takes one to two milliseconds when its processes have been idle, this a quarter of one. A request is a
method's name and plain arguments, with at most one frame of bytes after it.
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
_LONGEST_REQUEST = 2**30

logger = logging.getLogger(__name__)


class Endpoint(NamedTuple):
    """Where a server listens, and the secret that both sides prove to know."""

    host: str
    port: int
    secret: bytes


class Server:
    """Answers requests, each connection in a thread of its own.

    Args:
        host: The address to listen on.
        handlers: What to do by method name; each takes the request's arguments, bytes last where there are some, and
            returns what JSON can hold. A PipelineError goes to the client, with its type.
        closed: Called with a connection's number when it ends.
    """

    def __init__(self, host: str, handlers: Mapping[str, Handler], closed: Callable[[int], None]) -> None:
        self._handlers, self._closed = handlers, closed
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
                logger.warning("refused a connection: %s", error)
                continue
            number += 1
            _keep_alive(connection)
            threading.Thread(target=self._serve, args=(number, connection), daemon=True).start()

    def _serve(self, number: int, connection: Connection) -> None:
        with contextlib.suppress(EOFError, OSError), connection:
            while True:
                request = json.loads(connection.recv_bytes(_LONGEST_REQUEST))
                data = [connection.recv_bytes(_LONGEST_REQUEST)] if request["has_data"] else []
                connection.send_bytes(json.dumps(self._answer(number, request, data)).encode())
        self._closed(number)

    def _answer(self, number: int, request: dict[str, Any], data: list[bytes]) -> dict[str, Any]:
        try:
            return {"result": self._handlers[request["method"]](number, *request["args"], *data)}
        except errors.PipelineError as error:
            return {"error": type(error).__name__, "message": str(error)}
        except Exception as error:
            logger.exception("%s failed", request["method"])
            return {"error": "StoreError", "message": f"{request['method']} failed: {type(error).__name__}: {error}"}


class Requester:
    """One client's connection. Calls from several threads take turns."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._connection: Connection | None = self._connect()

    def call(self, method: str, *args: Any, data: bytes | None = None) -> Any:
        """Send a request and wait for its answer.

        Raises:
            PipelineError: What the server's method raised, with its own type.
            ConnectionError: The server is gone.
        """
        request = json.dumps({"method": method, "args": args, "has_data": data is not None}).encode()
        with self._lock:
            try:
                answer = self._exchange(request, data)
            except BaseException as error:  # a signal too: the answer of this request must not be taken for the next's
                if self._connection:
                    self._connection.close()
                self._connection = None
                if isinstance(error, EOFError | OSError):
                    raise ConnectionError(f"the server has closed the connection: {error}") from error
                raise
        if "error" in answer:
            raise getattr(errors, answer["error"])(answer["message"])
        return answer["result"]

    def _exchange(self, request: bytes, data: bytes | None) -> dict[str, Any]:
        if self._connection is None:
            self._connection = self._connect()
        self._connection.send_bytes(request)
        if data is not None:
            self._connection.send_bytes(data)
        answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
        return answer

    def _connect(self) -> Connection:
        connection = Client((self._endpoint.host, self._endpoint.port), authkey=self._endpoint.secret)
        _keep_alive(connection)
        return connection


def _keep_alive(connection: Connection) -> None:
    """Send at once, and notice within a minute that the other machine is gone."""
    with socket.socket(fileno=os.dup(connection.fileno())) as options:
        options.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        options.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        options.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20)
        options.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        options.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
