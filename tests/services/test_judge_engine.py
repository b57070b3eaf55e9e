"""A judge that the run hosts, in vLLM."""

from pathlib import Path

import pytest

from tests.support.engine_checks import NEEDS_VLLM
from tests.support.judge_models import assert_a_judge_scores_all_responses, make_judge

pytestmark = [NEEDS_VLLM, pytest.mark.extended]


def test_a_judge_scores_all_responses_to_a_prompt(tmp_path: Path) -> None:
    assert_a_judge_scores_all_responses(make_judge(tmp_path), "vllm")
