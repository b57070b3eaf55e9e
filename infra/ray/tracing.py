"""OpenTelemetry spans of a run: one trace per step, from the driver through Ray into the workers.

Span names are those proposed in open-telemetry/semantic-conventions-genai, issue 88: `rl.loop` is one step, in the
driver; `rl.sample`, `rl.reward`, `rl.train` and `rl.sync` are its children, in the workers. Ray passes no trace context
on to an actor, so a call carries the driver's as its argument `traceparent`. The SDK is needed only if a config turns
tracing on; where spans go and how often they are sampled is set by the standard `OTEL_*` variables.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, ParamSpec, TypeVar

from opentelemetry import trace
from opentelemetry.context import attach, detach
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from schemas.errors import ConfigError

if TYPE_CHECKING:  # the entry point imports this package, and `sluice --help` needs no configs
    from schemas.config.run import RunConfig

SpanName = Literal["rl.sample", "rl.reward", "rl.train", "rl.sync"]

FLUSH_SECONDS = 3  # that the driver waits for its last spans to be sent

_PROPAGATOR = TraceContextTextMapPropagator()
_tracer: trace.Tracer = trace.NoOpTracer()

P = ParamSpec("P")
R = TypeVar("R")


def require_tracing(config: "RunConfig") -> None:
    """Check that the SDK and its OTLP exporter are installed if the config turns tracing on.

    Raises:
        ConfigError: They are not.
    """
    if config.runtime.tracing and not _has_exporter():
        raise ConfigError(
            "runtime.tracing is true but the OpenTelemetry SDK or its exporter is not installed; "
            "pip install 'sluice-rl[otel]'"
        )


def start_tracing(run_id: str, config: "RunConfig", instance: str) -> Callable[[], None]:
    """Send this process's spans to the collector, if the config turns tracing on; return what stops it."""
    global _tracer
    if not config.runtime.tracing:
        return lambda: None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create(_resource(run_id, config, instance)).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    # Each span is sent at once, by a thread: Ray kills a worker without notice.
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(), max_export_batch_size=1))
    logging.getLogger(OTLPSpanExporter.__module__).addFilter(_FirstRecord())
    _tracer = provider.get_tracer("sluice")

    def stop() -> None:
        global _tracer
        _tracer = trace.NoOpTracer()
        flush = threading.Thread(target=provider.shutdown, daemon=True)  # which takes long if nothing responds
        flush.start()
        flush.join(FLUSH_SECONDS)

    return stop


@contextmanager
def traced_run(run_id: str, config: "RunConfig") -> Iterator[None]:
    """Send the driver's spans to the collector during the block, if the config turns tracing on."""
    stop = start_tracing(run_id, config, "driver")
    try:
        yield
    finally:
        stop()


@contextmanager
def traced_step(step: int) -> Iterator[None]:
    """Make the block a step's `rl.loop` span, the root of a trace."""
    with _tracer.start_as_current_span("rl.loop", attributes={"rl.loop.step": step}):
        yield


def span(name: SpanName) -> trace.Span:
    """Start a span, which ends with the block that it is used in; outside of a step, nothing is recorded."""
    if not trace.get_current_span().get_span_context().is_valid:
        return trace.INVALID_SPAN
    return _tracer.start_span(name)


def traced(name: SpanName) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that makes each call of a worker's method a span."""

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        @wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with span(name):
                return method(*args, **kwargs)

        return call

    return decorate


def trace_arguments() -> dict[str, str]:
    """Return the argument that carries the current span to a worker's method; none if there is no span."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return {name: value for name, value in carrier.items() if name == "traceparent"}


@contextmanager
def received_trace(traceparent: str | None) -> Iterator[None]:
    """Make the caller's span, if it sent one, the parent of the spans in the block."""
    if traceparent is None:
        yield
        return
    token = attach(_PROPAGATOR.extract({"traceparent": traceparent}))
    try:
        yield
    finally:
        detach(token)


class _FirstRecord(logging.Filter):
    """Lets only the first record pass: the exporter logs every span that it can't send."""

    def __init__(self) -> None:
        super().__init__()
        self._has_passed = False

    def filter(self, record: logging.LogRecord) -> bool:
        passes, self._has_passed = not self._has_passed, True
        return passes


def _resource(run_id: str, config: "RunConfig", instance: str) -> dict[str, str]:
    return {
        "service.name": "sluice",
        "service.instance.id": instance,
        "rl.system": "sluice",
        "rl.run.id": run_id,
        "rl.algorithm": config.advantage.kind,
        "rl.loss": config.loss.kind,
        "rl.model.name": config.model.path,
    }


def _has_exporter() -> bool:
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.http.trace_exporter") is not None
    except ModuleNotFoundError:  # of a parent package
        return False
