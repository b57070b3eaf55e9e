"""A local S3 server for tests, in a process of its own."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
import psutil
import pytest
from s3fs import S3FileSystem

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


@contextmanager
def s3_in_environment(bucket: str) -> Iterator[None]:
    """Serve one empty bucket, which this process and its children reach by their environment alone."""
    with s3_server(bucket) as options, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", options["key"])
        patch.setenv("AWS_SECRET_ACCESS_KEY", options["secret"])
        patch.setenv("AWS_ENDPOINT_URL", options["client_kwargs"]["endpoint_url"])
        patch.setenv("AWS_DEFAULT_REGION", options["client_kwargs"]["region_name"])
        S3FileSystem.clear_instance_cache()  # else those of another environment are used
        yield
    S3FileSystem.clear_instance_cache()


def _responds(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0
