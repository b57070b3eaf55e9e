"""Checkpoints in an S3 bucket."""

import pytest

from infra.checkpoints import writing
from tests.support.checkpoint_tensors import assert_checkpoints_are_kept
from tests.support.s3 import s3_server


def test_another_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "FILE_BYTES", 40)  # several files
    with s3_server("runs") as options:
        assert_checkpoints_are_kept("s3://runs/run-7", options)
