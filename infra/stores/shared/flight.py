"""Arrow Flight between a store's processes: requests in JSON and columns in Arrow's format, behind a bearer token.

A client sends all requests on one stream, which takes a third of the time of a call each, and tells the server at
once that a client has died. Nothing is pickled.
"""

import hmac
import json
import logging
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import flight

from schemas import errors
from schemas.base import Frozen

Handler = Callable[..., Any]
Get = Callable[[dict[str, Any]], pa.RecordBatchReader]
_FAILED = (flight.FlightError, StopIteration)
# A machine that vanishes closes no connection. What it doesn't acknowledge for 20 s is lost; it is asked for a sign of
# life after 5 minutes without data, which is as often as gRPC's servers allow.
_KEEPALIVE = [("grpc.keepalive_time_ms", 300_000), ("grpc.keepalive_timeout_ms", 20_000)]

logger = logging.getLogger(__name__)


class Endpoint(NamedTuple):
    """A server's address, the token that its requests must bear, and its certificate, PEM, if it uses TLS."""

    location: str
    token: str
    certificate: str = ""


class Tls(NamedTuple):
    """The PEM files, on every node, of a certificate for the nodes' addresses and of its key."""

    certificate: str
    key: str


class FlightServer(flight.FlightServerBase):  # type: ignore[misc]
    """A server of requests and of columns. Each client's requests run in a thread of its own.

    Args:
        host: The address to listen on.
        handlers: Handlers of requests by name. Each takes the request's arguments, and returns a JSON value, in which
            records may be. A PipelineError is raised in the client, with its type.
        get: Returns the columns that a ticket, a JSON object, asks for.
        token: The token; empty makes a new one.
        tls: How to encrypt connections; None: they are not.

    Raises:
        ConfigError: A file of `tls` can't be read.
    """

    def __init__(
        self,
        host: str,
        handlers: Mapping[str, Handler],
        get: Get,
        token: str = "",
        tls: Tls | None = None,
    ) -> None:
        self._handlers, self._get = handlers, get
        token = token or secrets.token_hex(32)
        pems = read_tls(tls) if tls else ("", "")
        scheme, pairs = ("grpc+tls", [tuple(pem.encode() for pem in pems)]) if tls else ("grpc", None)
        super().__init__(f"{scheme}://{host}:0", tls_certificates=pairs, middleware={"token": _TokenCheck(token)})
        self.endpoint = Endpoint(f"{scheme}://{host}:{self.port}", token, pems[0])

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Answer one client's requests until it goes."""
        with suppress(*_FAILED, OSError):
            while True:
                request = json.loads(reader.read_chunk().app_metadata.to_pybytes())
                response = json.dumps(self._respond(request), default=Frozen.model_dump)
                writer.write_metadata(pa.py_buffer(response.encode()))

    def do_get(self, context: Any, ticket: flight.Ticket) -> flight.RecordBatchStream:
        """Send the columns that a ticket asks for."""
        with _raised_in_client():
            return flight.RecordBatchStream(self._get(json.loads(ticket.ticket)))

    def _respond(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"result": self._handlers[request["method"]](*request["args"])}
        except Exception as error:  # noqa: BLE001  raised in the client
            return _describe(error)


class FlightClient:
    """A client of a `FlightServer`. Requests from several threads are made one after another."""

    def __init__(self, endpoint: Endpoint) -> None:
        certificate = endpoint.certificate.encode() or None
        self._client = flight.FlightClient(endpoint.location, tls_root_certs=certificate, generic_options=_KEEPALIVE)
        authorization = f"Bearer {endpoint.token}".encode()
        self._options = flight.FlightCallOptions(headers=[(b"authorization", authorization)])
        self._lock = threading.Lock()
        self._streams: list[tuple[Any, Any]] = []  # at most one
        weakref.finalize(self, _close, self._streams)  # also when this process exits

    def call(self, method: str, *args: object) -> Any:
        """Send a request and wait for its result.

        Raises:
            PipelineError: The server's handler raised it.
            ConnectionError: The server is gone.
        """
        request = pa.py_buffer(json.dumps({"method": method, "args": args}).encode())
        with self._lock:
            try:
                writer, reader = self._open_stream()
                writer.write_metadata(request)
                response = json.loads(reader.read_chunk().app_metadata.to_pybytes())
            except BaseException as error:  # a signal too: the next request must not receive this one's response
                _close(self._streams)
                if isinstance(error, _FAILED):
                    raise _client_error(error) from None
                raise
        if "error" in response:
            raise _described(response)
        return response["result"]

    def get(self, ticket: Mapping[str, object]) -> pa.RecordBatch:
        """Fetch the columns that a ticket asks for.

        Raises:
            PipelineError: The server raised it.
            ConnectionError: The server is gone.
        """
        with _raised_by_server():
            return _single_batch(
                self._client.do_get(flight.Ticket(json.dumps(ticket).encode()), self._options).read_all()
            )

    def close(self) -> None:
        """Close the stream; the next request opens one again."""
        with self._lock:
            _close(self._streams)

    def _open_stream(self) -> tuple[Any, Any]:
        if not self._streams:
            descriptor = flight.FlightDescriptor.for_path("requests")
            self._streams.append(self._client.do_exchange(descriptor, self._options))
        return self._streams[0]


class _TokenCheck(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}"

    def start_call(self, info: Any, headers: Mapping[str, list[str]]) -> None:
        given = headers.get("authorization", [""])[0]
        if not hmac.compare_digest(given.encode(), self._expected.encode()):
            raise flight.FlightUnauthenticatedError("send the run's token: authorization: Bearer <token>")


def read_tls(tls: Tls) -> tuple[str, str]:
    """Return the certificate and the key.

    Raises:
        ConfigError: A file can't be read.
    """
    try:
        return Path(tls.certificate).read_text(), Path(tls.key).read_text()
    except OSError as error:
        raise errors.ConfigError(
            f"services.tls_certificate and services.tls_key must be readable on every node: {error}"
        ) from None


def _single_batch(table: pa.Table) -> pa.RecordBatch:
    (batch,) = table.combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], table.schema)]
    return batch


@contextmanager
def _raised_in_client() -> Iterator[None]:
    """Send an error in a server's block to the client, which raises it with its type."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  raised in the client
        raise flight.FlightServerError(str(error), extra_info=json.dumps(_describe(error)).encode()) from None


@contextmanager
def _raised_by_server() -> Iterator[None]:
    """Raise in a client's block what the server has raised, or a ConnectionError."""
    try:
        yield
    except flight.FlightServerError as error:
        raise _described(json.loads(error.extra_info)) from None
    except _FAILED as error:
        raise _client_error(error) from None


def _close(streams: list[tuple[Any, Any]]) -> None:
    """Close a stream, if there is one; Arrow prints an error if it has to do that itself and the server is gone."""
    while streams:
        writer, _ = streams.pop()
        with suppress(*_FAILED, OSError):
            writer.close()


def _describe(error: Exception) -> dict[str, str]:
    """Return an error as JSON; the traceback of one that is not Sluice's own is logged."""
    if isinstance(error, errors.PipelineError):
        return {"error": type(error).__name__, "message": str(error)}
    logger.error("a request failed", exc_info=error)
    return {"error": "StoreError", "message": f"{type(error).__name__}: {error}"}


def _described(response: Mapping[str, str]) -> errors.PipelineError:
    error: errors.PipelineError = getattr(errors, response["error"])(response["message"])
    return error


def _client_error(error: BaseException) -> Exception:
    message, *_ = (str(error).splitlines() or ["the stream has ended"])[0].partition(". gRPC client debug context")
    if isinstance(error, flight.FlightUnauthenticatedError):
        return errors.StoreError(f"the column store refuses this client: {message}")
    return ConnectionError(message)
