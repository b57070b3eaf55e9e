"""The server of `sluice view`: who may ask, and what is answered. Requests go over real sockets."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import httpx
import pytest

from flows.view.api import ViewApi
from flows.view.server import ViewServer
from infra.storage.runs import RunDirectory
from infra.stores.files import FsspecColumnStore
from schemas.errors import RunError, ServiceError
from tests.support.command import Command, assert_rejected, make_command
from tests.support.ended import note_ended
from tests.support.view_run import ATTACK, make_tokenizer, make_view_run, write_step

STEP = {"run": "demo", "step": "1"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return make_view_run(tmp_path_factory.mktemp("view"), steps=2)


@pytest.fixture(scope="module")
def server(run: RunDirectory) -> Iterator[ViewServer]:
    with ViewServer(ViewApi([run])) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def anyone(server: ViewServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}") as client:
        yield client


@pytest.fixture(scope="module")
def user(server: ViewServer) -> Iterator[httpx.Client]:
    """A browser that has opened the printed URL once."""
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}") as client:
        assert client.get(server.url()).status_code == 200
        yield client


def test_the_token_is_asked_for_and_kept_as_a_cookie(server: ViewServer, anyone: httpx.Client) -> None:
    for path in ("/", "/run/demo/step/1", "/static/app.js", "/api/runs", "/nothing"):
        for query in ({}, {"token": "wrong"}, {"token": ""}, {"token": "ü"}):
            assert anyone.get(path, params=query).status_code == 401
        for cookie in (f"{server.cookie}=wrong", f"{server.cookie}=", "other=1", "\x01=;"):
            assert anyone.get(path, headers={"Cookie": cookie}).status_code == 401
    answer = httpx.get(server.url())
    assert answer.status_code == 200
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith(f"{server.cookie}={server.token}; ")
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} < set(cookie.split("; "))
    assert server.token not in answer.text


def test_only_the_served_address_is_answered(server: ViewServer, user: httpx.Client) -> None:
    for host in ("evil.example", f"evil.example:{server.port}", "127.0.0.1", f"127.0.0.1:{server.port + 1}", ""):
        assert user.get("/api/runs", headers={"Host": host}).status_code == 403
    assert user.get("/api/runs", headers={"Host": f"localhost:{server.port}"}).status_code == 200


def test_hosts_of_other_addresses(run: RunDirectory) -> None:
    with ViewServer(ViewApi([run]), "0.0.0.0") as server:
        assert server.is_own(f"10.1.2.3:{server.port}")
        assert server.is_own(f"{socket.gethostname()}:{server.port}")
        assert server.url().startswith(f"http://{socket.gethostname()}:{server.port}/?token=")
        assert not server.is_own(f"evil.example:{server.port}")
    with ViewServer(ViewApi([run]), "localhost") as server:
        assert server.is_own(f"localhost:{server.port}")
        assert not server.is_own(f"10.1.2.3:{server.port}")
        with pytest.raises(ServiceError, match="can't be listened on"):
            ViewServer(ViewApi([run]), "localhost", server.port)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "ANYTHING"])
def test_other_methods_are_refused(user: httpx.Client, method: str) -> None:
    answer = user.request(method, "/api/runs", headers={"Connection": "close"})
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET")


def test_every_answer_is_labelled(user: httpx.Client) -> None:
    for path, kind in {
        "/": "text/html",
        "/run/demo/step/1/row/0": "text/html",
        "/static/app.js": "text/javascript",
        "/static/style.css": "text/css",
        "/api/runs": "application/json",
        "/api/nothing": "application/json",
    }.items():
        headers = user.get(path).headers
        assert headers["content-type"] == f"{kind}; charset=utf-8"
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
        assert "unsafe" not in policy
        assert (headers["x-content-type-options"], headers["cache-control"]) == ("nosniff", "no-store")


@pytest.mark.parametrize("path", ["/static/", "/static/../server.py", "/static/%2e%2e/server.py", "/etc/passwd"])
def test_no_other_file_is_served(server: ViewServer, user: httpx.Client, path: str) -> None:
    url = httpx.URL(f"http://127.0.0.1:{server.port}").copy_with(raw_path=path.encode())
    assert user.get(url).status_code == 404


def test_hostile_texts_are_json(user: httpx.Client) -> None:
    answer = user.get("/api/row", params={**STEP, "row": 3})
    assert answer.headers["content-type"].startswith("application/json")
    assert ATTACK in answer.json()["rows"][0]["columns"]["response_text"]
    assert answer.json()["runs"] == ["demo"]  # for the form of another row; the metrics of long runs are megabytes
    group = user.get("/api/group", params={**STEP, "group": 0}).json()
    assert [row["row"] for row in group["rows"]] == [0, 1]
    assert group["num_found"] == 2


def test_what_there_is_not_is_one_line_of_error(user: httpx.Client) -> None:
    def error(status: int, path: str, **parameters: object) -> str:
        answer = user.get(path, params={**STEP, **parameters})
        assert answer.status_code == status
        text = answer.json()["error"]
        assert "\n" not in text
        return str(text)

    assert "steps that have: 0, 1" in error(404, "/api/rows", step=7)
    assert "no row 9" in error(404, "/api/row", row=9)
    assert "no group 9" in error(404, "/api/group", group=9)
    assert "run 'other' is not open" in error(404, "/api/rows", run="other")
    assert "step must be a number from 0, got '-1'" in error(400, "/api/rows", step=-1)
    assert "row must be a number" in error(400, "/api/row")
    assert "disabled by configuration" in error(
        400, "/api/rows", where="row in (select 1 from read_csv('/etc/passwd'))"
    )
    assert "no column" in error(400, "/api/rows", sort="nothing")


def test_new_steps_appear_while_the_run_goes_on(tmp_path: Path) -> None:
    run = make_view_run(tmp_path, steps=1)
    api = ViewApi([run])
    assert api.answer("/api/runs", {})[1]["runs"][0]["kept"] == [0]
    store = FsspecColumnStore(run.run_id, run.columns)
    write_step(run, store, make_tokenizer(tmp_path / "model"), 1)
    assert api.answer("/api/runs", {})[1]["runs"][0]["kept"] == [0, 1]
    assert api.answer("/api/rows", {"run": "demo", "step": "1"})[1]["num_rows"] == 4


def test_tokens_are_ids_if_the_model_is_gone(tmp_path: Path) -> None:
    run = make_view_run(tmp_path, steps=1)
    (tmp_path / "model" / "tokenizer.json").unlink()
    found = ViewApi([run]).answer("/api/row", {"run": "demo", "step": "0", "row": "0"})[1]["rows"][0]
    assert found["response"]["token_texts"] is None
    assert "config.json is missing" in found["no_token_texts"]


@pytest.mark.command("view")
def test_the_command_serves_until_ctrl_c(run: RunDirectory) -> None:
    arguments, root = ("view", "demo", "--step", "1"), str(Path(__file__).parents[3])
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has it ignored in the background
    with subprocess.Popen(
        [sys.executable, "-m", "flows.cli.main", *arguments],
        cwd=run.path.parents[1],
        env=os.environ | {"PYTHONPATH": root},
        stdout=subprocess.PIPE,
        text=True,
    ) as command:
        signal.signal(signal.SIGINT, handler)
        assert command.stdout is not None
        assert httpx.get(command.stdout.readline().strip()).status_code == 200
        command.send_signal(signal.SIGINT)
        assert command.wait() == 0
    note_ended(arguments)


def test_the_command_refuses_what_it_cannot_show(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run.path.parents[1])
    sluice: Command = make_command(monkeypatch, capsys)
    assert_rejected(sluice("view", "nothing"), "no run 'nothing'")
    assert_rejected(sluice("view", "demo", "--step", "9"), "step 9 of run demo has no columns")
    assert_rejected(sluice("view", "demo", "--step", "1", "--row", "9"), "no row 9")
    assert_rejected(sluice("view", "demo", "--row", "1"), "--row 1 requires --step")
    assert_rejected(sluice("view", "demo", "--host", "256.0.0.1"), "256.0.0.1:0 can't be listened on")
    with pytest.raises(RunError, match="two of the runs have the id demo"):
        ViewApi([run, run])
