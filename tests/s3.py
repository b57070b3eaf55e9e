"""A local S3 server for tests, in a process of its own."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3

HOST, TIMEOUT_SECONDS = "127.0.0.1", 60


@contextmanager
def s3_server(bucket: str) -> Iterator[dict[str, Any]]:
    """Serve one empty bucket on loopback; gives how fsspec reaches it."""
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    # Not within this process: vLLM looks at all modules that are imported, and the server's don't bear that.
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(server, port)
        url, region = f"http://{HOST}:{port}", "us-east-1"
        login = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": region}
        boto3.client("s3", endpoint_url=url, **login).create_bucket(Bucket=bucket)
        yield {"key": "test", "secret": "test", "client_kwargs": {"endpoint_url": url, "region_name": region}}
    finally:
        server.kill()
        server.wait()


def _wait_for(server: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection((HOST, port), timeout=1).close()
            return
        except ConnectionRefusedError:
            time.sleep(0.1)
    raise AssertionError(f"the S3 server did not start: exit code {server.poll()}")
