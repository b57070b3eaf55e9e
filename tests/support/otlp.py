"""An OpenTelemetry collector in this process, which keeps the spans that it receives."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class ReceivedSpan(NamedTuple):
    """One span."""

    name: str
    trace: bytes
    id: bytes
    parent: bytes
    seconds: float
    attributes: dict[str, str | int]
    resource: dict[str, str]


class Collector(ThreadingHTTPServer):
    """Receives spans by OTLP over HTTP, on loopback."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[ReceivedSpan] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector during the block."""
    collector = Collector()
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    try:
        yield collector
    finally:
        collector.shutdown()
        collector.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.spans += _parse(body)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def _parse(body: bytes) -> Iterator[ReceivedSpan]:
    for part in ExportTraceServiceRequest.FromString(body).resource_spans:
        resource = _attributes(part.resource.attributes)
        for span in (span for scope in part.scope_spans for span in scope.spans):
            seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
            ids = span.trace_id, span.span_id, span.parent_span_id
            yield ReceivedSpan(span.name, *ids, seconds, _attributes(span.attributes), resource)


def _attributes(pairs) -> dict:  # type: ignore[no-untyped-def, type-arg]
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
