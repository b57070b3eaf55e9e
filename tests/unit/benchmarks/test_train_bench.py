"""The trainer's benchmark: its rows, its paths and its plans."""

import numpy as np
import pytest
import torch

from benchmarks.train.models import make_model
from benchmarks.train.paths import Path as BenchPath
from benchmarks.train.paths import Workload, all_paths, random_lengths
from benchmarks.train.run import Plan, measure
from schemas.errors import ConfigError

PATHS = ["packed", "padded", "row_by_row", "dense", "dense_equal_count"]
CPU = torch.device("cpu")


@pytest.mark.parametrize(("tokens", "fill", "longest"), [(4096, 0.1, 1024), (512, 0.5, 128), (1000, 0.33, 100)])
def test_lengths_have_the_tokens_and_the_fill(tokens: int, fill: float, longest: int) -> None:
    lengths = random_lengths(tokens, fill, longest)
    assert lengths.sum() == tokens
    assert lengths.max() == longest
    assert lengths.min() >= 4
    assert tokens / (len(lengths) * longest) == pytest.approx(fill, rel=0.05)
    assert np.array_equal(lengths, random_lengths(tokens, fill, longest))


def test_paths_run_the_positions_that_they_say() -> None:
    workload = Workload(random_lengths(1024, 0.1, 128), 260, token_budget=256, chunk_tokens=64, device=CPU)
    paths = {path.name: path for path in all_paths(workload)}
    assert list(paths) == PATHS
    num_rows = len(workload.lengths)

    def tokens(path: BenchPath) -> int:
        return sum(len(row.input_ids) for row in path.micro_batches)

    assert tokens(paths["packed"]) == paths["packed"].run_positions == 1024
    assert all(len(row.input_ids) <= 256 for row in paths["packed"].micro_batches)
    # 80 rows padded to 128 positions, two at a time; three forwards of forty are run.
    assert (num_rows, paths["padded"].num_positions) == (80, 80 * 128)
    assert paths["padded"].run_positions == 3 * 2 * 128
    assert len(paths["row_by_row"].micro_batches) == 32
    assert tokens(paths["row_by_row"]) == paths["row_by_row"].run_positions
    squares = {
        name: sum(int(row.cu_seqlens.diff().square().sum()) for row in paths[name].micro_batches)
        for name in ("packed", "dense", "dense_equal_count")
    }
    assert squares["dense"] == pytest.approx(squares["packed"], rel=0.1)
    assert squares["dense_equal_count"] < squares["packed"]


def test_all_paths_give_a_log_prob_per_target() -> None:
    model = make_model("tiny", CPU, torch.float32)
    workload = Workload(random_lengths(256, 0.5, 64), 260, token_budget=256, chunk_tokens=64, device=CPU)
    for path in all_paths(workload):
        path.switch(model)
        with torch.no_grad():
            logprobs = torch.cat([path.score(model, row) for row in path.micro_batches])
        assert len(logprobs) == sum(len(row.targets) for row in path.micro_batches)
        # A random model is near uniform over its 260 tokens.
        assert float(-logprobs.mean()) == pytest.approx(np.log(260), rel=0.1)


def test_lengths_that_no_rows_can_have_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--fills 1\.0: 2 rows of at most 400 tokens can't hold 1000"):
        random_lengths(1000, 1.0, 400)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(models=("huge",)), "--models: 'huge' is not one of tiny, small"),
        (Plan(device="tpu"), "--device: 'tpu' is not one of auto"),
        (Plan(fills=(0.1, 1.5)), r"--fills: 1\.5 is not a fraction"),
        (Plan(dtype="int8"), "--dtype: 'int8' is not one of float32, bfloat16"),
        (Plan(longest=9000), "--longest 9000 is over --token-budget 8192"),
    ],
)
def test_a_plan_that_cannot_run_is_refused(plan: Plan, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        measure(plan)
