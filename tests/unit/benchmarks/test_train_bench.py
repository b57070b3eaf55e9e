"""The benchmark of updates with shared prompts: what it compares, on a tiny model; no time is asserted."""

from dataclasses import replace

import pytest

from benchmarks.train import QUICK, Case, measure


def test_both_trainers_update_the_same_rows() -> None:
    case = Case.of(QUICK, ratio=2, samples=4)
    assert case.groups == [0, 0, 0, 0, 1, 1, 1, 1]
    assert case.prompts == [2 * QUICK.response] * QUICK.rows
    rows = case.rows(64, ["sampler_logprobs"]).columns
    prompts = rows["prompt_ids"].to_pylist()
    assert prompts[0] == prompts[3] != prompts[4] == prompts[7]
    apart, shared = (case.update(QUICK, share_prompts=share) for share in (False, True))
    assert set(apart.rows) == set(shared.rows) == set(range(QUICK.rows))
    assert sum(micro.num_tokens for micro in shared.ranks[0]) == 2 * 16 + sum(case.responses)


def test_what_it_reports() -> None:
    report = measure(replace(QUICK, ratios=(2,), samples=(1, 4)))
    alone, grouped = report["cases"]["tiny, 2:1, n = 1"], report["cases"]["tiny, 2:1, n = 4"]
    total = 8 * 16 + sum(Case.of(QUICK, 2, 4).responses)
    assert alone["token_ratio"] == 1
    assert grouped["token_ratio"] == pytest.approx(total / (total - 6 * 16))
    assert alone["work_ratio"] == 1 < grouped["work_ratio"] < grouped["token_ratio"]
    for case in (alone, grouped):
        assert case["speedup"] == pytest.approx(case["seconds_apart"] / case["seconds"])
        assert case["of_work"] == pytest.approx(case["speedup"] / case["work_ratio"])
        assert min(case.values()) > 0
