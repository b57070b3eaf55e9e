"""vLLM with two tensor-parallel ranks, each a process: what its engine returns, and that no process is left behind."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import PreTrainedModel

from infra.engines.base import EngineModel, Sampling, WeightsBucket, generate, generate_all
from infra.engines.program.engine import ProgramEngine
from infra.engines.program.process import StartedEngine
from infra.engines.vllm.start import open_vllm
from infra.models.flat_tensors import tensor_specs
from infra.models.load import load_model, load_tokenizer
from schemas.config.model import ModelConfig
from schemas.config.rollout import VllmRollout
from schemas.errors import ConfigError, EngineLostError, NonFiniteError, WorkerLostError
from tests.support.engine_checks import (
    ENGINE_PYTHON,
    HEAD_DIM,
    MAX_MODEL_LEN,
    NEEDS_VLLM,
    PROMPTS,
    UNFIT_WEIGHTS,
    assert_branches_are_exact,
    assert_damaged_buckets_are_refused,
    assert_degenerate_requests_work,
    assert_identical,
    assert_logprobs,
    assert_requests_have_limits_of_their_own,
    assert_sleeper_wakes_by_parts,
    assert_stop_strings_end_responses,
    assert_stop_tokens_end_responses,
    assert_turns_are_exact,
    assert_unfit_weights_change_nothing,
    greedy,
    kill_in_the_middle,
    plain_logprobs,
    request,
)
from tests.support.odd_engine import shared_by
from tests.support.progress import wait_until
from tests.support.site_on_loopback import run_with_shared_memory
from tests.support.tiny import make_tiny_model
from tests.support.weight_tensors import bucket_of, load_state

pytestmark = [NEEDS_VLLM, pytest.mark.extended]

NUM_RANKS = 2
NUM_SHARED = 1 + NUM_RANKS + 1  # vLLM's queues, to all ranks and from each, and a lock
ROLLOUT = VllmRollout(python=ENGINE_PYTHON, cache_bytes=2**22, tensor_parallel=NUM_RANKS, stop=("never in any text",))
HOST = """
import sys
import psutil
from infra.engines.base import EngineModel
from infra.engines.vllm.start import open_vllm
from tests.support.odd_engine import shared_by
from schemas.config.model import ModelConfig
from schemas.config.rollout import VllmRollout
if __name__ == "__main__":
    rollout = VllmRollout(python=sys.argv[2], cache_bytes=2**22, tensor_parallel=2)
    engine = open_vllm(rollout, EngineModel(ModelConfig(path=sys.argv[1]), 64))
    pids = [child.pid for child in psutil.Process().children(recursive=True)]
    print(*pids, *shared_by(*pids), flush=True)
    sys.stdin.read()
"""
FULL = """
import sys
from infra.engines.base import EngineModel, Sampling, generate_all
from infra.engines.vllm.start import open_vllm
from schemas.config.model import ModelConfig
from schemas.config.rollout import VllmRollout
from schemas.errors import ConfigError, EngineLostError
from tests.support.engine_checks import PROMPTS, request
if __name__ == "__main__":
    rollout = VllmRollout(python=sys.argv[2], cache_bytes=2**22, tensor_parallel=2)
    try:
        engine = open_vllm(rollout, EngineModel(ModelConfig(path=sys.argv[1]), 128))
        with open("/dev/shm/rest", "wb", buffering=0) as file:
            while file.write(bytes(4096)) == 4096:
                pass
    except OSError:
        pass
    except ConfigError as error:
        sys.exit(print(error))
    try:
        generate_all(engine, [request(PROMPTS[1], *range(20))], Sampling(50))
    except EngineLostError as error:
        print(str(error).splitlines()[0])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), head_dim=HEAD_DIM)


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return load_model(ModelConfig(path=str(folder)))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[ProgramEngine]:
    """One engine for all tests of this module, of which the last one ends it."""
    started = open_vllm(
        ROLLOUT.replace(prefix_cache="version"), EngineModel(ModelConfig(path=str(folder)), MAX_MODEL_LEN)
    )
    yield started
    started.close()


@pytest.fixture
def plain(engine: ProgramEngine, model: PreTrainedModel) -> ProgramEngine:
    """The same engine with the folder's weights, which forgets prefixes between calls, and can sleep."""
    started = StartedEngine(dtype="float32", itemsize=4, max_model_len=MAX_MODEL_LEN, processes=[], cache_bytes=1)
    found = ProgramEngine(engine._process, started, model, can_sleep=True)
    load_state(found, dict(model.named_parameters()), version=0)
    return found


def rank_processes(engine: ProgramEngine) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in engine.processes]


def assert_engine_is(model: PreTrainedModel, engine: ProgramEngine) -> None:
    """Check the greedy tokens and all log-probs against the model's."""
    for prompt, generation in zip(
        PROMPTS, generate_all(engine, [request(p, 0) for p in PROMPTS], Sampling(24, temperature=0)), strict=True
    ):
        assert generation.token_ids.tolist() == greedy(model, prompt, 24)
        assert_logprobs(generation, plain_logprobs(model, prompt, generation.token_ids, 1))
    sampling = Sampling(50, 0.7, top_p=0.9, top_k=40, stop_token_ids=(5, 50, 150))
    for row, generation in enumerate(generate_all(engine, [request(p, 1, 2) for p in PROMPTS], sampling)):
        expected = plain_logprobs(model, PROMPTS[row // 2], generation.token_ids, 0.7)
        assert_logprobs(generation, expected, tolerance=2e-5)


def test_numbers_of_ranks_that_do_not_divide_the_heads_are_refused(folder: Path) -> None:
    for ranks in (3, 8):
        with pytest.raises(ConfigError, match=r"4 attention heads, 2 key-value heads .* of 32; set it to 1, 2 or 4"):
            open_vllm(
                VllmRollout(python=ENGINE_PYTHON, tensor_parallel=ranks),
                EngineModel(ModelConfig(path=str(folder)), MAX_MODEL_LEN),
            )


def test_ranks_generate_what_the_model_does(engine: ProgramEngine, model: PreTrainedModel) -> None:
    processes = rank_processes(engine)
    assert len({process.pid for process in processes} - {os.getpid()}) == NUM_RANKS
    assert_engine_is(model, engine)
    assert_engine_is(model, engine)  # with prefixes of the previous call
    assert engine.usage.running > 0
    assert engine.take_peak_memory()["rss"] >= max(process.memory_info().rss for process in processes) / 2
    listening = {c.laddr.ip for p in processes for c in p.net_connections() if c.status == psutil.CONN_LISTEN}
    assert listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_rows_end_and_go_on_as_those_of_every_engine(
    plain: ProgramEngine, model: PreTrainedModel, folder: Path
) -> None:
    assert_stop_tokens_end_responses(plain, PROMPTS[0])
    assert_stop_strings_end_responses(plain, load_tokenizer(ModelConfig(path=str(folder))), PROMPTS[0])
    assert_requests_have_limits_of_their_own(plain, model)
    assert assert_turns_are_exact(plain, model, joins=True)
    assert assert_branches_are_exact(plain, model, joins=True)
    assert_degenerate_requests_work(plain, PROMPTS[0])


@UNFIT_WEIGHTS
def test_weights_that_do_not_fit_change_nothing(
    plain: ProgramEngine, model: PreTrainedModel, changes: dict[str, torch.Tensor | None], text: str
) -> None:
    assert_unfit_weights_change_nothing(plain, model, changes, text)


def test_damaged_buckets_are_refused(plain: ProgramEngine, model: PreTrainedModel, tmp_path: Path) -> None:
    assert_damaged_buckets_are_refused(plain, dict(model.named_parameters()), tmp_path / "bucket")


def test_asleep_it_wakes_by_parts_and_samples_the_same(plain: ProgramEngine, model: PreTrainedModel) -> None:
    assert_sleeper_wakes_by_parts(plain, model)


def test_each_rank_loads_its_part_of_mapped_weights(engine: ProgramEngine, tmp_path: Path) -> None:
    other = load_model(ModelConfig(path=str(make_tiny_model(tmp_path, seed=1, head_dim=HEAD_DIM))))
    state = dict(other.named_parameters())
    load_state(engine, state, version=1)
    assert_engine_is(other, engine)
    third = load_model(ModelConfig(path=str(make_tiny_model(tmp_path / "third", seed=2, head_dim=HEAD_DIM))))
    bucket = bucket_of(dict(third.named_parameters()), tmp_path / "weights.bin")
    engine.load_weights(tensor_specs(bucket.tensors), [bucket], version=2)
    assert_engine_is(third, engine)
    assert engine.version == 2


def test_given_tokens_are_scored_as_the_model_does(engine: ProgramEngine, model: PreTrainedModel) -> None:
    load_state(engine, dict(model.named_parameters()), version=0)
    requests, sampling = [request(prompt, 1, 2) for prompt in PROMPTS], Sampling(20, 0.7)
    before = generate_all(engine, requests, sampling)
    tokens = np.array(PROMPTS[1])
    for temperature in (1.0, 0.7):
        expected = plain_logprobs(model, PROMPTS[1][:1], tokens[1:], temperature)
        np.testing.assert_allclose(engine.score(tokens, temperature), expected, rtol=0, atol=2e-5)
    assert_identical(generate_all(engine, requests, sampling), before)


def test_weights_in_buckets_are_those_of_one_and_a_load_can_fail_between(
    engine: ProgramEngine, model: PreTrainedModel, tmp_path: Path
) -> None:
    other = load_model(ModelConfig(path=str(make_tiny_model(tmp_path, seed=1, head_dim=HEAD_DIM))))
    state = dict(other.named_parameters())
    buckets = [bucket_of({name: tensor}) for name, tensor in state.items()]  # queries, keys and values apart

    def broken() -> Iterator[WeightsBucket]:
        yield from buckets[:4]
        raise WorkerLostError("the sender is gone")

    with pytest.raises(WorkerLostError, match="the sender is gone"):
        engine.load_weights(tensor_specs(state), broken(), version=1)
    assert engine.version is None
    engine.load_weights(tensor_specs(state), buckets, version=1)
    requests, sampling = [request(prompt, 1, 2) for prompt in PROMPTS], Sampling(20, 0.7)
    after = generate_all(engine, requests, sampling)
    load_state(engine, state, version=2)
    assert_identical(generate_all(engine, requests, sampling), after)
    attention = {name: tensor * 1.1 for name, tensor in state.items() if ".self_attn." in name}
    engine.load_weights(tensor_specs(attention), [bucket_of(attention)], version=3, is_complete=False)
    partly = generate_all(engine, requests, sampling)
    load_state(engine, state | attention, version=3)
    assert_identical(generate_all(engine, requests, sampling), partly)


def test_a_call_that_was_abandoned_can_be_repeated(engine: ProgramEngine) -> None:
    requests, sampling = [request(prompt, 1, 2, 3) for prompt in PROMPTS], Sampling(40, stop_token_ids=(5, 50))
    generate_all(engine, requests, sampling)
    whole = generate_all(engine, requests, sampling)  # all prefixes are cached now
    abandoned = generate(engine, requests, sampling)
    number, generation = next(abandoned)
    assert_identical([generation], [whole[number]])
    abandoned.close()  # type: ignore[attr-defined]
    assert_identical(generate_all(engine, requests, sampling), whole)


def test_diverged_weights_raise(plain: ProgramEngine, model: PreTrainedModel) -> None:
    load_state(plain, {name: torch.full_like(each, torch.nan) for name, each in model.named_parameters()}, version=1)
    with pytest.raises(NonFiniteError, match="diverged"):  # and leaves such values in vLLM's cache
        generate_all(plain, [request(PROMPTS[0], 1, 2)], Sampling(4))


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (
            "64m",
            r"can't run the model .*Insufficient space in /dev/shm .*; /dev/shm has \d+ of 64 MiB free: enlarge",
        ),
        ("300m", r"vLLM's process \d+ is lost.*; /dev/shm has \d of 300 MiB free: enlarge it \(for Docker: --shm-size"),
    ],
)
def test_too_little_shared_memory_is_named_in_one_line_at_the_start_and_later(
    folder: Path, size: str, said: str
) -> None:
    printed = run_with_shared_memory(size, [sys.executable, "-c", FULL, str(folder), ENGINE_PYTHON])
    assert re.search(said, printed), printed
    assert printed.count("\n") == 1


def test_ranks_end_with_a_killed_host_and_leave_no_shared_memory(folder: Path) -> None:
    host = subprocess.Popen(
        [sys.executable, "-c", HOST, str(folder), ENGINE_PYTHON],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert host.stdout is not None
    found = host.stdout.readline().split()
    pids, shared = [int(each) for each in found if each.isdecimal()], [each for each in found if "/" in each]
    assert len(pids) >= NUM_RANKS
    assert len(shared) >= NUM_SHARED
    host.send_signal(signal.SIGKILL)
    host.wait()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids) and not any(map(os.path.exists, shared)))


@pytest.mark.parametrize(("moment", "killed"), [("batch", "rank"), ("load", "rank"), ("batch", "program")])
def test_an_engine_that_loses_a_process_ends_the_others_and_says_so(
    engine: ProgramEngine, model: PreTrainedModel, folder: Path, moment: str, killed: str
) -> None:
    if engine.is_lost:  # by this test of another moment
        engine = open_vllm(ROLLOUT, EngineModel(ModelConfig(path=str(folder)), MAX_MODEL_LEN))
    processes = rank_processes(engine)
    program = psutil.Process(engine._process.pid)
    shared = shared_by(program.pid, *engine.processes)
    assert len(shared) >= NUM_SHARED
    victim = program if killed == "program" else processes[1]
    with pytest.raises(EngineLostError, match=r"vLLM's process .* is lost"):
        kill_in_the_middle(engine, dict(model.named_parameters()), moment, victim.kill)
    wait_until(lambda: not any(process.is_running() for process in processes))
    assert not any(map(os.path.exists, shared))
    with pytest.raises(EngineLostError, match="is lost"):
        engine.check()
