"""Calls between processes: typed errors, authentication, and no response for the wrong call."""

import signal
import threading
from types import FrameType

import pytest

from infra.stores.rpc import Endpoint, RpcClient, RpcServer
from schemas.errors import LeaseError, StoreError
from tests.progress import wait_until


class Service:
    """The methods of the server under test."""

    def __init__(self) -> None:
        self.closed: list[int] = []
        self.entered, self.may_return = threading.Event(), threading.Event()
        handlers = {"echo": self.echo, "hold": self.hold, "reject": self.reject, "fail": self.fail}
        self.server = RpcServer("127.0.0.1", handlers, self.closed.append)

    def echo(self, connection: int, value: object, data: bytes = b"") -> list[object]:
        return [connection, value, len(data)]

    def hold(self, _: int, value: object) -> object:
        self.entered.set()
        self.may_return.wait()
        return value

    def reject(self, _: int, step: int) -> None:
        raise LeaseError(f"step {step} has no lease")

    def fail(self, _: int) -> None:
        raise KeyError("a bug")


@pytest.fixture(scope="module")
def service() -> Service:
    return Service()


def test_a_request_may_carry_bytes(service: Service) -> None:
    client = RpcClient(service.server.endpoint)
    first, value, num_bytes = client.call("echo", {"a": [1, None]}, data=bytes(5_000_000))
    assert (value, num_bytes) == ({"a": [1, None]}, 5_000_000)
    assert RpcClient(service.server.endpoint).call("echo", 1)[0] != first


def test_errors_keep_their_types(service: Service) -> None:
    client = RpcClient(service.server.endpoint)
    with pytest.raises(LeaseError, match="step 7 has no lease"):
        client.call("reject", 7)
    with pytest.raises(StoreError, match="fail failed: KeyError: 'a bug'"):
        client.call("fail")
    with pytest.raises(StoreError, match="nosuch"):
        client.call("nosuch")
    assert client.call("echo", 2)[1] == 2


def test_a_client_without_the_secret_is_rejected(service: Service) -> None:
    host, port, _ = service.server.endpoint
    with pytest.raises(Exception, match="digest"):
        RpcClient(Endpoint(host, port, b"guessed"))
    assert RpcClient(service.server.endpoint).call("echo", 3)[1] == 3


def test_the_response_to_an_interrupted_call_is_not_returned_by_the_next_call(service: Service) -> None:
    client = RpcClient(service.server.endpoint)
    connection = client.call("echo", 0)[0]
    main_thread = threading.get_ident()

    def raise_error(*_: int | FrameType | None) -> None:
        raise InterruptedByTest

    def interrupt() -> None:
        service.entered.wait()
        signal.pthread_kill(main_thread, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, raise_error)
    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    try:
        with pytest.raises(InterruptedByTest):
            client.call("hold", "old")
    finally:
        interrupting.join()
        signal.signal(signal.SIGUSR1, before)
        service.may_return.set()
    assert client.call("echo", "new")[1] == "new"
    # So that the registry releases the puts that the connection has begun.
    wait_until(lambda: connection in service.closed)


class InterruptedByTest(BaseException):
    """Raised by a signal's handler, as for a SIGTERM."""


def test_calls_from_several_threads_get_their_own_results(service: Service) -> None:
    client = RpcClient(service.server.endpoint)
    results: dict[int, list[object]] = {}

    def call(number: int) -> None:
        results[number] = [client.call("echo", (number, repeat))[1] for repeat in range(50)]

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [[number, repeat] for repeat in range(50)] for number in range(8)}
