"""A local S3 server for tests, in a process of its own."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
import psutil

from tests.progress import Progress, wait_until

HOST = "127.0.0.1"


@contextmanager
def s3_server(bucket: str) -> Iterator[dict[str, Any]]:
    """Serve one empty bucket on loopback; yield the options with which fsspec reaches it."""
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    # Not within this process: vLLM looks at all modules that are imported, and the server's don't bear that.
    server = psutil.Popen(
        [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: server.poll() is not None or _responds(port), Progress(lambda: [server]))
        assert server.poll() is None, f"the S3 server ended with exit code {server.returncode}"
        url, region = f"http://{HOST}:{port}", "us-east-1"
        login = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": region}
        boto3.client("s3", endpoint_url=url, **login).create_bucket(Bucket=bucket)
        yield {"key": "test", "secret": "test", "client_kwargs": {"endpoint_url": url, "region_name": region}}
    finally:
        server.kill()
        server.wait()


def _responds(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0
