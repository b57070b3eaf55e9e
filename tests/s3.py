"""A local S3 server for tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
from moto.server import ThreadedMotoServer


@contextmanager
def s3_server(bucket: str) -> Iterator[dict[str, Any]]:
    """Serve one empty bucket on loopback; gives how fsspec reaches it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url, region = f"http://{host}:{port}", "us-east-1"
    login = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": region}
    boto3.client("s3", endpoint_url=url, **login).create_bucket(Bucket=bucket)
    yield {"key": "test", "secret": "test", "client_kwargs": {"endpoint_url": url, "region_name": region}}
    server.stop()
