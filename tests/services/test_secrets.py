"""Secrets from blocks of a real Prefect server: each start has the present values, and no file of the run has any."""

import os
import threading
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import botocore.session
import pytest
import wandb
from mlflow import MlflowClient
from prefect.blocks.system import Secret
from prefect.settings import PREFECT_API_URL, temporary_settings
from pydantic import ValidationError

from flows.lifecycle.secrets import take_secrets
from infra.monitors.wandb import require_login
from schemas.config.monitor import WandbMonitor
from schemas.config.runtime import ServicesConfig
from schemas.errors import ConfigError, ServiceError
from tests.support.workplace import Workplace

RUN_ID, BLOCK = "secretive", "{{ prefect.blocks.secret.judge-key }}"
REWARD = """
import hashlib, os, pathlib
import tiny_rewards

def keyed(prompt, completion, answer, info):
    with pathlib.Path("seen").open("a") as file:
        print(hashlib.sha256(os.environ["JUDGE_KEY"].encode()).hexdigest(), file=file)
    return tiny_rewards.short(prompt, completion, answer, info)
"""


@pytest.fixture
def api_url(workplace: Workplace) -> Iterator[str]:
    """The URL of a server, which the tests' own calls use."""
    workplace.services.start(prefect=True, ray=False)
    url = str(workplace.services.prefect_api_url)
    with temporary_settings({PREFECT_API_URL: url}):
        yield url


def save(value: object, name: str = "judge-key") -> None:
    Secret(value=value).save(name, overwrite=True)


def secrets(**references: str) -> ServicesConfig:
    return ServicesConfig(secrets=references)


@pytest.mark.extended
def test_a_resumed_run_has_the_rotated_secret_and_no_file_has_any(workplace: Workplace, api_url: str) -> None:
    first, second = "first-" + "7f3a" * 8, "second-" + "9c1e" * 8
    (workplace.folder / "keyed_rewards.py").write_text(REWARD)
    settings = (f'services.secrets.JUDGE_KEY="{BLOCK}"', "reward.path=keyed_rewards:keyed", "reward.num_processes=1")
    save(first)
    printed = workplace.sluice("train", "tiny.toml", *settings, "steps=1", "--run-id", RUN_ID)
    save(second)
    seen = workplace.folder / "seen"
    assert set(seen.read_text().split()) == {sha256(first.encode()).hexdigest()}
    seen.unlink()
    printed += workplace.sluice("resume", RUN_ID, "steps=2")
    assert set(seen.read_text().split()) == {sha256(second.encode()).hexdigest()}

    files = [path for path in (workplace.folder / "runs" / RUN_ID).rglob("*") if path.is_file()]
    for content in (printed.encode(), *(path.read_bytes() for path in files)):
        assert first.encode() not in content
        assert second.encode() not in content
    assert BLOCK.encode() in (workplace.folder / "runs" / RUN_ID / "config.json").read_bytes()


def test_the_present_value_is_taken(api_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("one", "two"):
        monkeypatch.setenv("JUDGE_KEY", "exported")
        save(value)
        take_secrets(secrets(JUDGE_KEY=BLOCK))
        assert os.environ["JUDGE_KEY"] == value
    save({"user": {"key": "inner"}}, "nested")
    take_secrets(secrets(JUDGE_KEY="{{ prefect.blocks.secret.nested.user.key }}"))
    assert os.environ["JUDGE_KEY"] == "inner"


def test_what_is_not_there_is_one_line(api_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no such block; create it in its UI") as missing:
        take_secrets(secrets(JUDGE_KEY="{{ prefect.blocks.secret.absent }}"))
    assert "\n" not in str(missing.value)
    save({"user": "hidden-value"}, "table")
    with pytest.raises(ConfigError, match="holds dict, expected a text") as table:
        take_secrets(secrets(JUDGE_KEY="{{ prefect.blocks.secret.table }}"))
    assert "hidden-value" not in str(table.value)
    with temporary_settings({PREFECT_API_URL: None}), pytest.raises(ServiceError, match="none is configured"):
        take_secrets(secrets(JUDGE_KEY=BLOCK))


@pytest.mark.parametrize("value", ["the-key-itself", "{{ prefect.blocks.secret }}", f"x{BLOCK}"])
def test_a_config_holds_references_alone(value: str) -> None:
    with pytest.raises(ValidationError, match="secrets"):
        secrets(JUDGE_KEY=value)


class Tracker(BaseHTTPRequestHandler):
    """Answers as an MLflow server without runs, and keeps the headers of each request."""

    seen: ClassVar[list[str | None]] = []

    def do_POST(self) -> None:
        self.seen.append(self.headers["Authorization"])
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        pass


def test_a_store_and_trackers_take_their_keys_from_blocks(
    api_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save({"id": "the-id", "secret": "the-secret", "session": "the-session"}, "bucket")
    save("the-token", "mlflow")
    save("0" * 40, "wandb")
    references = {
        "AWS_ACCESS_KEY_ID": "{{ prefect.blocks.secret.bucket.id }}",
        "AWS_SECRET_ACCESS_KEY": "{{ prefect.blocks.secret.bucket.secret }}",
        "AWS_SESSION_TOKEN": "{{ prefect.blocks.secret.bucket.session }}",
        "MLFLOW_TRACKING_TOKEN": "{{ prefect.blocks.secret.mlflow }}",
        "WANDB_API_KEY": "{{ prefect.blocks.secret.wandb }}",
    }
    for name in references:
        monkeypatch.setenv(name, "exported")  # and removed at the end
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))  # nothing of the user's
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    take_secrets(secrets(**references))
    found = botocore.session.Session().get_credentials().get_frozen_credentials()
    assert (found.access_key, found.secret_key, found.token) == ("the-id", "the-secret", "the-session")
    require_login(WandbMonitor(project="any"))
    wandb.teardown()  # else this process is logged in for later tests, too
    Tracker.seen.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Tracker) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        MlflowClient(tracking_uri=f"http://127.0.0.1:{server.server_port}").search_experiments()
        server.shutdown()
    assert set(Tracker.seen) == {"Bearer the-token"}
