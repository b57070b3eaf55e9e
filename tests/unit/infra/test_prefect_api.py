"""The check of a configured Prefect server, one with a login included, and whether a server is gone or slow."""

import base64
import json
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from threading import Thread

import pytest
from prefect.settings import PREFECT_API_KEY, PREFECT_CLOUD_API_URL, temporary_settings

from flows.lifecycle.outages import cloud_key
from infra.services import prefect_api
from infra.services.local import free_port
from infra.services.prefect_api import check_prefect_api, prefect_is_gone, prefect_responds
from schemas.errors import ServiceError

KEY = "pnu_secret"
LOGIN = "sluice:correct horse"


class _Locked(BaseHTTPRequestHandler):
    """Answers as a Prefect server with PREFECT_SERVER_API_AUTH_STRING: only `health` needs no login."""

    def do_GET(self) -> None:
        wanted = f"Basic {base64.b64encode(LOGIN.encode()).decode()}"
        is_allowed = self.path == "/api/health" or self.headers["Authorization"] == wanted
        if self.path.startswith("/cloud"):
            is_allowed = self.headers["Authorization"] == f"Bearer {KEY}"
        self.send_response(200 if is_allowed else 401)
        self.end_headers()
        self.wfile.write(json.dumps(True if self.path == "/api/health" else version("prefect")).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def api_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Locked)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/api"
    server.shutdown()
    server.server_close()


def test_the_right_login_is_accepted(api_url: str) -> None:
    check_prefect_api(api_url, LOGIN)


def test_prefect_cloud_is_asked_with_its_key(api_url: str) -> None:
    workspace = f"{api_url.removesuffix('/api')}/cloud/accounts/a/workspaces/w"
    with temporary_settings({PREFECT_CLOUD_API_URL: api_url.replace("/api", "/cloud"), PREFECT_API_KEY: KEY}):
        check_prefect_api(workspace, key=cloud_key(workspace))
        assert prefect_responds(workspace, cloud_key(workspace))
        assert cloud_key(api_url) is None  # a key is not sent to another server
    with pytest.raises(ServiceError, match="refuses PREFECT_API_KEY; log in again: prefect cloud login") as refused:
        check_prefect_api(workspace, key="pnu_wrong")
    assert "pnu_wrong" not in str(refused.value)


@pytest.mark.parametrize("login", [None, "sluice:wrong"])
def test_a_refused_login_names_the_setting(api_url: str, login: str | None) -> None:
    with pytest.raises(ServiceError, match="refuses the login; set PREFECT_API_AUTH_STRING to user:password"):
        check_prefect_api(api_url, login)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "nonsense",
        "127.0.0.1:4200/api",
        "http://",
        "http:///api",
        "http://127.0.0.1:abc/api",
        "http://127.0.0.1:99999/api",
        "http://[::1/api",
        "http://exa mple/api",
    ],
)
def test_what_is_no_url_names_the_setting(url: str) -> None:
    with pytest.raises(ServiceError, match=rf"^'{re.escape(url)}' is not the URL .* and PREFECT_API_URL"):
        check_prefect_api(url)
    assert not prefect_responds(url)


@pytest.mark.parametrize(
    "answer",
    [b"SSH-2.0-x\r\n", b"HTTP/1.1 200 OK\r\n\r\n<html>", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ntrue"],
    ids=["no-http", "no-json", "cut"],
)
def test_a_service_of_another_kind_is_told(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        Thread(target=answer_all, args=(server, answer), daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/api"
        with pytest.raises(ServiceError, match=r"^what responds at .* is not a Prefect API"):
            check_prefect_api(url)
        assert not prefect_responds(url)
        assert not prefect_is_gone(url)


def test_a_server_that_can_not_be_used_tells_how_to_have_a_local_one() -> None:
    with pytest.raises(ServiceError, match=r"no Prefect API responds .*prefect config unset PREFECT_API_URL$"):
        check_prefect_api(f"http://127.0.0.1:{free_port()}/api")
    with socket.create_server(("127.0.0.1", 0)) as server:
        answer = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ntrue"  # healthy, and of no version that is known
        Thread(target=answer_all, args=(server, answer), daemon=True).start()
        with pytest.raises(ServiceError, match=r"same minor version .*prefect config unset PREFECT_API_URL$"):
            check_prefect_api(f"http://127.0.0.1:{server.getsockname()[1]}/api")


def answer_all(server: socket.socket, answer: bytes) -> None:
    with suppress(OSError):  # the test closes it
        while True:
            connection = server.accept()[0]
            with connection:
                connection.recv(4096)
                connection.sendall(answer)


def test_a_server_that_does_not_answer_in_time_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefect_api, "TIMEOUT_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/api"
        assert not prefect_responds(url)
        assert not prefect_is_gone(url)


def test_a_server_whose_port_is_closed_is_gone() -> None:
    assert prefect_is_gone(f"http://127.0.0.1:{free_port()}/api")
