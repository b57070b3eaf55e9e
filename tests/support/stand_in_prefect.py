"""What answers in place of a Prefect server."""

import json
import logging
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

logging.getLogger("prefect.events.clients").setLevel(logging.CRITICAL)  # events, which nothing here takes


class LimitServer(BaseHTTPRequestHandler):
    """A server of one limit with free slots; each path of `dropped` is not answered so many times."""

    dropped: dict[str, int]
    requests: list[str]  # the answered ones' last part of the path

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.rstrip("/").rpartition("/")[2]
        if self.dropped.get(path, 0) > 0:
            self.dropped[path] -= 1
            self.close_connection = True
            return
        self.requests.append(path)
        limit = {"id": str(uuid.UUID(int=1)), "name": path, "limit": 2, "active_slots": 0, "slot_decay_per_second": 0.0}
        lease = {"lease_id": str(uuid.uuid4()), "limits": [limit]}
        body: object = True if path == "health" else lease if path == "increment-with-lease" else limit
        self.send_response(404 if path.startswith("csrf-token") else 200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    do_GET = do_POST = answer

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def answered_by(handler: type[BaseHTTPRequestHandler]) -> Iterator[None]:
    """Have Prefect's client ask a server of `handler`, each request once."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/api"
        try:
            with temporary_settings({PREFECT_API_URL: url, PREFECT_CLIENT_MAX_RETRIES: 0}):
                yield
        finally:
            server.shutdown()
            thread.join()
