"""A judge on a loopback port that speaks the protocol of chat completions, and does what a question says."""

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROMPT = "Question: {prompt} Answer: {answer} Response: {response}"
READY_QUESTION = "Reply with the number 1."


class JudgeServer(ThreadingHTTPServer):
    """Answers a question with the text after "Response: ".

    Words in it ask for something else: `status 500 twice` and `status 429 once` for failures first, `again 429` for
    failures only, `denied` for a refusal that repeats the key, `cut` for an empty answer cut at its limit, `ends X` for
    the finish_reason X, `uncounted` for an answer without its tokens, `null` for tokens that are null, `parts` for a
    content in parts, `odd` for something else than a completion, `hang` for no answer.

    Attributes:
        requests: The requests so far: question, body, authorization and time.
        gate: Each request waits for it; set at first.
        is_down: Whether every request is refused with status 503.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.requests: list[dict[str, Any]] = []
        self.gate, self.ended, self.lock = threading.Event(), threading.Event(), threading.Lock()
        self.num_open = self.max_open = 0
        self.is_down = False
        self.gate.set()

    def handle_error(self, request: object, client_address: object) -> None:
        """Print errors, but not that a client has gone."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    @property
    def questions(self) -> list[str]:
        """What was judged, in the order of the requests, without the first question of each process."""
        found = [request["question"] for request in self.requests]
        return [text.partition("Response: ")[2] for text in found if text != READY_QUESTION]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: JudgeServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question, server = body["messages"][0]["content"], self.server
        asked = {"question": question, "body": body, "key": self.headers["Authorization"], "time": time.monotonic()}
        with server.lock:
            server.requests.append(asked)
            num_earlier = sum(request["question"] == question for request in server.requests) - 1
            server.num_open += 1
            server.max_open = max(server.max_open, server.num_open)
        server.gate.wait()
        status, reply, headers = _reply(question, num_earlier, server, asked["key"])
        with server.lock:
            server.num_open -= 1
        data = json.dumps(reply).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def _reply(question: str, num_earlier: int, server: JudgeServer, key: str | None) -> tuple[int, Any, dict[str, str]]:
    text = question.partition("Response: ")[2] or "1"
    if server.is_down:
        return 503, {"error": "down"}, {}
    if "hang" in text:
        server.ended.wait()
    if "status 500 twice" in text and num_earlier < 2:
        return 500, {"error": "overloaded"}, {}
    if "status 429 once" in text and num_earlier < 1:
        return 429, {"error": "slow down"}, {"Retry-After": "1"}
    if "busy" in text:
        return 429, {"error": "slow down"}, {"Retry-After": "300"}
    if "again 429" in text:
        return 429, {"error": "slow down"}, {}
    if "denied" in text:
        return 401, {"error": f"incorrect key {key}"}, {}
    if "odd" in text:
        return 200, {"reply": text}, {}
    message: dict[str, Any] = {"role": "assistant", "content": None if "cut" in text else text}
    usage: dict[str, Any] = {"prompt_tokens": len(question.split()), "completion_tokens": len(text.split())}
    if "parts" in text:
        thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "9"}]}
        message["content"] = [thinking, *({"type": "text", "text": part} for part in text.partition(" "))]
    if "null" in text:
        usage |= {"prompt_tokens": None}
    reason = "length" if "cut" in text else "stop"
    if "ends " in text:
        reason = text.partition("ends ")[2].partition(" ")[0]
    choice = {"index": 0, "message": message, "finish_reason": reason}
    reply: dict[str, Any] = {"object": "chat.completion", "choices": [choice]}
    return 200, reply if "uncounted" in text else {**reply, "usage": usage}, {}


@contextmanager
def served(port: int = 0) -> Iterator[JudgeServer]:
    """Hold a judge, by default on a free port."""
    server = JudgeServer(port)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.gate.set()
        server.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()
