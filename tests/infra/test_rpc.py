"""Requests between processes: typed errors, no stranger, and no answer taken for another."""

import signal
import threading
import time
from types import FrameType

import pytest

from infra.stores.rpc import Endpoint, RpcClient, RpcServer
from schemas.errors import LeaseError, StoreError


class Books:
    """What the server under test does."""

    def __init__(self) -> None:
        self.closed: list[int] = []
        self.server = RpcServer("127.0.0.1", {"echo": self.echo, "refuse": self.refuse, "fail": self.fail}, self.close)

    def echo(self, connection: int, value: object, seconds: float = 0, data: bytes = b"") -> list[object]:
        time.sleep(seconds)
        return [connection, value, len(data)]

    def refuse(self, _: int, step: int) -> None:
        raise LeaseError(f"step {step} has no lease")

    def fail(self, _: int) -> None:
        raise KeyError("a bug")

    def close(self, connection: int) -> None:
        self.closed.append(connection)


@pytest.fixture(scope="module")
def books() -> Books:
    return Books()


def test_requests_are_answered_with_their_bytes(books: Books) -> None:
    client = RpcClient(books.server.endpoint)
    first, value, num_bytes = client.call("echo", {"a": [1, None]}, 0, data=bytes(5_000_000))
    assert (value, num_bytes) == ({"a": [1, None]}, 5_000_000)
    assert RpcClient(books.server.endpoint).call("echo", 1)[0] != first


def test_errors_keep_their_types(books: Books) -> None:
    client = RpcClient(books.server.endpoint)
    with pytest.raises(LeaseError, match="step 7 has no lease"):
        client.call("refuse", 7)
    with pytest.raises(StoreError, match="fail failed: KeyError: 'a bug'"):
        client.call("fail")
    with pytest.raises(StoreError, match="nosuch"):
        client.call("nosuch")
    assert client.call("echo", 2)[1] == 2


def test_a_stranger_is_refused(books: Books) -> None:
    host, port, _ = books.server.endpoint
    with pytest.raises(Exception, match="digest"):
        RpcClient(Endpoint(host, port, b"guessed"))
    assert RpcClient(books.server.endpoint).call("echo", 3)[1] == 3


def test_an_interrupted_requests_answer_is_not_taken_for_the_next_ones(books: Books) -> None:
    client = RpcClient(books.server.endpoint)
    connection = client.call("echo", 0)[0]

    def interrupt(*_: int | FrameType | None) -> None:
        raise InterruptedByTest

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        threading.Timer(0.2, signal.raise_signal, [signal.SIGUSR1]).start()
        with pytest.raises(InterruptedByTest):
            client.call("echo", "old", 1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert client.call("echo", "new")[1] == "new"
    deadline = time.monotonic() + 10
    while connection not in books.closed and time.monotonic() < deadline:
        time.sleep(0.05)
    assert connection in books.closed  # so that what it had begun is released


class InterruptedByTest(BaseException):
    """As a SIGTERM is raised by the command."""


def test_threads_take_turns(books: Books) -> None:
    client = RpcClient(books.server.endpoint)
    answers: dict[int, object] = {}

    def ask(number: int) -> None:
        answers[number] = client.call("echo", number, 0.01)[1]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: number for number in range(8)}
