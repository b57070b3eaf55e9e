"""The web server of `sluice view`: who may ask, for what, and how the answers are labelled.

Every request must name the served address in its `Host` header, or a page elsewhere could reach the server by a name
that resolves to loopback; and bring the token, in the URL that was printed or in the cookie that it leaves.
"""

import json
import secrets
import socket
import sys
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from flows.view.api import ViewApi
from schemas.errors import ServiceError

STATIC = Path(__file__).parent / "static"
PAGE = "page.html"
TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript"}
PAGES = ("/", "/run/")  # the beginnings of the page's own URLs
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class ViewServer(ThreadingHTTPServer):
    """Serves the page and its API.

    Args:
        api: Answers the page's questions.
        host: The address to listen on.
        port: Its port; 0: any that is free.

    Attributes:
        token: What a request must know.

    Raises:
        ServiceError: The address can't be listened on.
    """

    daemon_threads = True

    def __init__(self, api: ViewApi, host: str = "127.0.0.1", port: int = 0) -> None:
        self.api, self.host, self.token = api, host, secrets.token_urlsafe(24)
        self.files = {path.name: path.read_bytes() for path in STATIC.iterdir() if path.suffix in TYPES}
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ServiceError(
                f"{host}:{port} can't be listened on: {error}; choose another --host or --port"
            ) from None

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self.server_address[1])

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        served = _address(self.host)
        return self.host == "localhost" if served is None else served.is_loopback

    @property
    def cookie(self) -> str:
        """The name of the cookie; browsers send cookies to all ports of a host."""
        return f"sluice_view_{self.port}"

    def url(self, path: str = "/") -> str:
        """Return the URL of a page, with the token."""
        host = socket.gethostname() if _is_unspecified(self.host) else self.host
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.port}{path}?token={self.token}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print what went wrong, unless the browser closed the connection."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def is_own(self, host: str) -> bool:
        """Return whether a `Host` header names the served address."""
        name, _, port = host.rpartition(":")
        if port != str(self.port):
            return False
        name = name.strip("[]").lower()
        if _is_unspecified(self.host):  # all of this machine's addresses; no name but its own can be trusted
            return name in {"localhost", socket.gethostname().lower()} or _address(name) is not None
        return name == self.host.lower() or (self.is_loopback and name == "localhost")


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer
    server_version, sys_version = "sluice", ""
    timeout = 60  # seconds without a request, after which a connection is closed
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer a request, if it may be asked."""
        if not self._is_addressed():
            return
        url = urlsplit(self.path)
        parameters = dict(parse_qsl(url.query, keep_blank_values=True))
        if not self._is_known(parameters.pop("token", "")):
            self._send_error(HTTPStatus.UNAUTHORIZED, "open the URL that sluice view printed: it has the token")
        elif url.path.startswith("/api/"):
            status, value = self.server.api.answer(url.path, parameters)
            self._send(status, "application/json", json.dumps(value, allow_nan=False).encode())
        elif (name := url.path.removeprefix("/static/")) != url.path and name in self.server.files:
            self._send(HTTPStatus.OK, TYPES[Path(name).suffix], self.server.files[name])
        elif url.path == PAGES[0] or url.path.startswith(PAGES[1]):
            self._send(HTTPStatus.OK, TYPES[".html"], self.server.files[PAGE])
        else:
            self._send_error(HTTPStatus.NOT_FOUND, f"there is no {url.path}")

    def __getattr__(self, name: str) -> Any:
        """Refuse all other methods, each of which is looked up as `do_<method>`."""
        if name.startswith("do_"):
            return self._refuse_method
        raise AttributeError(name)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: URLs of requests may have the token."""

    def _refuse_method(self) -> None:
        self.close_connection = True  # a body may follow, which isn't read
        if self._is_addressed():
            self._send_error(HTTPStatus.METHOD_NOT_ALLOWED, f"{self.command} is not allowed, only GET")

    def _is_addressed(self) -> bool:
        if self.server.is_own(self.headers.get("Host", "")):
            return True
        self._send_error(HTTPStatus.FORBIDDEN, "the Host header is not the served address")
        return False

    def _is_known(self, token: str) -> bool:
        """Return whether a request has the token; one in the URL is kept as the browser's cookie."""
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
        except CookieError:
            cookie = None
        self._is_new = _equal(token, self.server.token)
        return self._is_new or (cookie is not None and _equal(cookie.value, self.server.token))

    def _send_error(self, status: HTTPStatus, message: str) -> None:
        self._is_new = False
        self._send(status, "application/json", json.dumps({"error": message}).encode())

    def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET")
        if self._is_new:
            options = "Path=/; HttpOnly; SameSite=Strict"
            self.send_header("Set-Cookie", f"{self.server.cookie}={self.server.token}; {options}")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _address(host: str) -> IPv4Address | IPv6Address | None:
    """Return the address that a text is; None for a name."""
    try:
        return ip_address(host)
    except ValueError:
        return None


def _is_unspecified(host: str) -> bool:
    address = _address(host)
    return address is not None and address.is_unspecified


def _equal(one: str, other: str) -> bool:
    return secrets.compare_digest(one.encode(), other.encode())
