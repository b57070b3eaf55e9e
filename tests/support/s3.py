"""A local S3 server for tests, in a process of its own."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
import pytest
from s3fs import S3FileSystem

HOST = "127.0.0.1"
# Serves at a port that the kernel chooses, and prints it. Of two objects with If-None-Match that were put at once, moto
# would store both: it looks for an object and stores it later, and doesn't lock meanwhile.
SERVER = """
import sys, threading
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer

lock, put_object = threading.Lock(), S3Response.put_object

def put_in_turn(response):
    with lock:
        return put_object(response)

S3Response.put_object = put_in_turn
server = ThreadedMotoServer(sys.argv[1], 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
threading.Event().wait()
"""


@contextmanager
def s3_server(bucket: str) -> Iterator[dict[str, Any]]:
    """Serve one empty bucket on loopback; yield the options with which fsspec reaches it."""
    # Not within this process: vLLM looks at all modules that are imported, and the server's don't bear that.
    command = [sys.executable, "-c", SERVER, HOST]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            port = server.stdout.readline().strip() if server.stdout else ""
            assert port, f"the S3 server ended with exit code {server.wait()}"
            url, region = f"http://{HOST}:{port}", "us-east-1"
            login = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": region}
            boto3.client("s3", endpoint_url=url, **login).create_bucket(Bucket=bucket)
            yield {"key": "test", "secret": "test", "client_kwargs": {"endpoint_url": url, "region_name": region}}
        finally:
            server.kill()


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
