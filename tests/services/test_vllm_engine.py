"""The vLLM engine against the transformers model of the same weights: its samples, log-probs and weights."""

import copy
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from infra.engines.base import EngineModel, EngineUsage, Sampling, generate, generate_all
from infra.engines.open import open_engine
from infra.engines.program.engine import ProgramEngine
from infra.engines.program.process import StartedEngine
from infra.engines.vllm.start import open_vllm
from infra.models.flat_tensors import tensor_specs
from infra.models.load import load_model, load_tokenizer
from infra.weights.probe import check_probe
from schemas.config.model import ModelConfig
from schemas.config.rollout import VllmRollout
from schemas.errors import ConfigError, EngineLostError, NonFiniteError, StaleWeightsError
from schemas.weights import ProbeRow, WeightsHandle
from tests.support.configs import run_config
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
    assert_requests_have_stops_of_their_own,
    assert_sleeper_wakes_by_parts,
    assert_stop_strings_end_responses,
    assert_stop_tokens_end_responses,
    assert_turns_are_exact,
    assert_unfit_weights_change_nothing,
    counting_python,
    greedy,
    plain_logprobs,
    request,
    starts_of,
)
from tests.support.engine_side_by_side import measure
from tests.support.progress import children_running
from tests.support.tiny import make_tiny_model
from tests.support.weight_tensors import load_state

pytestmark = NEEDS_VLLM

BLOCK_TOKENS = 32  # of vLLM's KV cache on a CPU
ROLLOUT = VllmRollout(python=ENGINE_PYTHON, cache_bytes=2**22, max_response_tokens=50, stop=("never in any text",))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), head_dim=HEAD_DIM)


@pytest.fixture(scope="module")
def started(folder: Path) -> Iterator[ProgramEngine]:
    """One engine for all tests of this module: a start takes seconds."""
    data = {"max_prompt_tokens": MAX_MODEL_LEN - 50}
    config = run_config(model={"path": str(folder)}, data=data, rollout=ROLLOUT)
    engine = open_engine(config, load_tokenizer(config.model))
    assert isinstance(engine, ProgramEngine)
    yield engine
    engine.close()


@pytest.fixture
def engine(started: ProgramEngine, model: PreTrainedModel) -> ProgramEngine:
    """The engine with the folder's weights, whatever the previous test has loaded."""
    if started.version != 0:
        load_state(started, dict(model.named_parameters()), version=0)
    return started


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return load_model(ModelConfig(path=str(folder)))


def of(folder: Path) -> EngineModel:
    """Return a model as an engine gets it."""
    return EngineModel(ModelConfig(path=str(folder)), MAX_MODEL_LEN)


@pytest.mark.extended
def test_a_model_or_size_that_vllm_cannot_run_is_rejected(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't run the model .* in float32 with sequences of 128 tokens: .*cache"):
        open_vllm(VllmRollout(python=ENGINE_PYTHON, cache_bytes=2**10), of(folder))
    odd = make_tiny_model(tmp_path, head_dim=8)
    with pytest.raises(ConfigError, match=r"Unsupported CPU attention configuration: head_dim=8"):
        open_vllm(ROLLOUT, of(odd))


def test_a_closed_engine_leaves_no_process(folder: Path, model: PreTrainedModel, tmp_path: Path) -> None:
    python = counting_python(tmp_path, ENGINE_PYTHON)
    other = open_vllm(ROLLOUT.replace(dtype="bfloat16", python=python), of(folder))
    assert starts_of(python) == [os.getpid()]
    load_state(other, dict(model.named_parameters()), version=1)  # from float32
    (generation,) = generate_all(other, [request(PROMPTS[0], 1)], Sampling(30))
    expected = plain_logprobs(copy.deepcopy(model).to(torch.bfloat16), PROMPTS[0], generation.token_ids, 1)
    assert_logprobs(generation, expected, tolerance=0.3)  # a significand of 8 bits
    assert psutil.pid_exists(other.processes[0])
    other.close()
    assert not psutil.pid_exists(other.processes[0])
    with pytest.raises(EngineLostError, match="vLLM's process was ended"):
        other.check()


@pytest.mark.extended
def test_it_samples_what_vllm_does_within_one_process() -> None:
    found = measure(num_pairs=2, max_tokens=8, sizes={"head_dim": HEAD_DIM})  # and checks that all samples are the same
    assert set(found["median_ratios"]) == {"tokens_per_second", "load", "load_mapped"}
    assert all(len(ratios) == 2 and min(ratios) > 0 for ratios in found["ratios"].values())


def test_greedy_equals_transformers_generate(engine: ProgramEngine, model: PreTrainedModel) -> None:
    generations = generate_all(engine, [request(prompt, 0) for prompt in PROMPTS], Sampling(24, temperature=0))
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        assert generation.token_ids.dtype == np.int32
        assert generation.token_ids.tolist() == greedy(model, prompt, 24)
        assert generation.finish_reason == "length"
        assert_logprobs(generation, plain_logprobs(model, prompt, generation.token_ids, 1))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.9, "top_k": 40}, {"min_p": 0.1}, {"top_k": 1}])
def test_logprobs_are_those_before_truncation(
    engine: ProgramEngine, model: PreTrainedModel, temperature: float, truncation: dict[str, float]
) -> None:
    sampling = Sampling(50, temperature, stop_token_ids=(5, 50, 150), **truncation)  # type: ignore[arg-type]
    generations = generate_all(engine, [request(prompt, 1, 2) for prompt in PROMPTS], sampling)
    for row, generation in enumerate(generations):
        expected = plain_logprobs(model, PROMPTS[row // 2], generation.token_ids, temperature)
        assert_logprobs(generation, expected, tolerance=2e-5)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(1, 1.3), Sampling(1, top_p=0.6), Sampling(1, 2.0, top_k=4), Sampling(1, 1.3, min_p=0.2)],
    ids=["temperature", "top_p", "top_k", "min_p"],
)
def test_samples_follow_the_probabilities(engine: ProgramEngine, model: PreTrainedModel, sampling: Sampling) -> None:
    num_samples = 2000
    generations = generate_all(engine, [request(PROMPTS[0], *range(num_samples))], sampling)
    counts = np.bincount([g.token_ids[0] for g in generations], minlength=model.config.vocab_size)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPTS[0]])).logits[0, -1].double() / sampling.temperature
    probs = np.sort(logits.softmax(-1).numpy())[::-1]
    order = np.argsort(-logits.numpy(), kind="stable")
    kept = np.arange(len(probs)) < (sampling.top_k or len(probs))
    kept &= np.cumsum(probs) - probs < sampling.top_p
    kept &= probs >= sampling.min_p * probs[0]
    assert counts[order[~kept]].sum() == 0
    expected = num_samples * probs[kept] / probs[kept].sum()
    likely = expected > 5
    deviations = (counts[order[kept]] - expected)[likely] / np.sqrt(expected * (1 - expected / num_samples))[likely]
    assert np.abs(deviations).max() < 4.5  # a normal's 4.5 sigma: once in 150,000


def test_a_repeated_call_gives_the_same_samples_bit_for_bit(engine: ProgramEngine) -> None:
    requests = [request(prompt, 1, 2**64 - 1, 2**63) for prompt in PROMPTS]
    sampling = Sampling(40, top_p=0.95, stop_token_ids=(5, 50))
    first = generate_all(engine, requests, sampling)
    assert len({g.token_ids.tobytes() for g in first}) == 9
    assert_identical(generate_all(engine, requests, sampling), first)
    generate_all(engine, [request(PROMPTS[1], *range(20)), request(PROMPTS[0], 4)], Sampling(9, 0.5))
    assert_identical(generate_all(engine, requests, sampling), first)


def test_a_sample_does_not_depend_on_its_batch(engine: ProgramEngine) -> None:
    together = generate_all(engine, [request(prompt, 7, 8) for prompt in PROMPTS], Sampling(30))
    alone = [generate_all(engine, [request(prompt, 8)], Sampling(30))[0] for prompt in PROMPTS]
    for a, b in zip(together[1::2], alone, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-5)


def test_more_samples_than_fit_are_generated_one_after_another(engine: ProgramEngine, model: PreTrainedModel) -> None:
    # 300 rows of up to 120 tokens of 1,024 bytes: more than max_num_seqs, and 36 MB in a cache of 4 MiB.
    usage = engine.usage = EngineUsage()
    generations = generate_all(engine, [request(PROMPTS[1], *range(300))], Sampling(50, stop_token_ids=(5, 50, 150)))
    assert len({generation.token_ids.tobytes() for generation in generations}) > 250  # some are short
    assert sum(len(generation.token_ids) for generation in generations) <= usage.running <= 300 * usage.num_steps
    assert usage.waiting > 0
    assert 0.5 < usage.peak_cache <= 1
    assert engine.take_peak_memory()["rss"] > 2**22
    for generation in generations[::30]:
        expected = plain_logprobs(model, PROMPTS[1], generation.token_ids, 1)
        assert_logprobs(generation, expected, tolerance=2e-5)


def test_samples_are_yielded_as_soon_as_they_finish(engine: ProgramEngine) -> None:
    sampling = Sampling(50, temperature=1.5, stop_token_ids=tuple(range(0, 256, 16)))
    found = list(generate(engine, [request(prompt, *range(8)) for prompt in PROMPTS], sampling))
    lengths = [len(generation.token_ids) for _, generation in found]
    assert sorted(number for number, _ in found) == list(range(24))
    assert lengths == sorted(lengths)  # all start together, so the shortest comes first
    assert lengths[0] < lengths[-1]


def test_an_abandoned_call_leaves_nothing_behind(engine: ProgramEngine) -> None:
    requests, sampling = [request(prompt, 1, 2, 3) for prompt in PROMPTS], Sampling(40, stop_token_ids=(5, 50))
    whole = generate_all(engine, requests, sampling)
    abandoned = generate(engine, requests, sampling)
    number, generation = next(abandoned)
    assert_identical([generation], [whole[number]])
    abandoned.close()  # type: ignore[attr-defined]
    assert_identical(generate_all(engine, requests, sampling), whole)


def test_requests_have_limits_and_stops_of_their_own(engine: ProgramEngine, model: PreTrainedModel) -> None:
    assert_requests_have_limits_of_their_own(engine, model)
    assert_requests_have_stops_of_their_own(engine)


@pytest.mark.parametrize("joins", [False, True])
def test_a_row_goes_on_with_at_most_a_block_of_its_history_computed_again(
    engine: ProgramEngine, model: PreTrainedModel, joins: bool
) -> None:
    usage = engine.usage = EngineUsage()
    num_between = assert_turns_are_exact(engine, model, joins=joins)
    num_rows, num_prompt = 2 * len(PROMPTS), 2 * sum(map(len, PROMPTS))
    assert usage.prefilled <= 2 * (num_prompt + num_between + 2 * num_rows * BLOCK_TOKENS)  # it has played twice


def test_rows_branch_as_those_of_every_engine(engine: ProgramEngine, model: PreTrainedModel) -> None:
    assert assert_branches_are_exact(engine, model, joins=True)


def test_responses_end_with_their_first_stop_token(engine: ProgramEngine) -> None:
    assert_stop_tokens_end_responses(engine, PROMPTS[0])


def test_stop_strings_end_a_response_with_the_token_that_completes_them(engine: ProgramEngine, folder: Path) -> None:
    assert_stop_strings_end_responses(engine, load_tokenizer(ModelConfig(path=str(folder))), PROMPTS[0])


def test_degenerate_requests(engine: ProgramEngine) -> None:
    assert_degenerate_requests_work(engine, PROMPTS[0])
    with pytest.raises(ValueError, match=r"request 0 has a prompt of 70 tokens.*prompts of at most 28"):
        generate_all(engine, [request(PROMPTS[1], 1)], Sampling(100))


def test_loaded_weights_are_those_of_a_fresh_engine(engine: ProgramEngine, tmp_path: Path) -> None:
    other = load_model(ModelConfig(path=str(make_tiny_model(tmp_path, seed=1, head_dim=HEAD_DIM))))
    requests, sampling = [request(prompt, 1, 2) for prompt in PROMPTS], Sampling(30, 0.7)
    before = generate_all(engine, requests, sampling)
    state = load_file(tmp_path / "model.safetensors")  # the tied head is not among them
    load_state(engine, state, version=3)
    assert engine.version == 3
    after = generate_all(engine, requests, sampling)
    assert before[0].token_ids.tolist() != after[0].token_ids.tolist()
    for row, generation in enumerate(after):
        expected = plain_logprobs(other, PROMPTS[row // 2], generation.token_ids, 0.7)
        assert_logprobs(generation, expected, tolerance=2e-5)


def test_a_stale_weight_fails_the_probe(engine: ProgramEngine, model: PreTrainedModel, tmp_path: Path) -> None:
    other = load_model(ModelConfig(path=str(make_tiny_model(tmp_path, seed=1, head_dim=HEAD_DIM))))
    state = dict(other.named_parameters())
    tokens = np.array(PROMPTS[1])
    logprobs = tuple(plain_logprobs(other, PROMPTS[1][:1], tokens[1:], 1.0).tolist())
    probe = ProbeRow(token_ids=tuple(PROMPTS[1]), logprobs=logprobs, temperature=1.0, compute_dtype="float32")
    handle = WeightsHandle(run_id="run", version=1, tensors=tensor_specs(state), bucket_bytes=64, probe=probe)
    load_state(engine, state, version=1)
    difference = check_probe(engine, handle)
    assert difference is not None
    assert difference < 2e-5
    load_state(engine, state | {"model.norm.weight": 1.5 * state["model.norm.weight"]}, version=1)
    with pytest.raises(StaleWeightsError, match=r"ProgramEngine .* version 1 of run run"):
        check_probe(engine, handle)
    assert engine.version is None
    load_state(engine, dict(model.named_parameters()), version=0)


def test_a_bucket_that_is_not_what_was_sent_is_refused(
    engine: ProgramEngine, model: PreTrainedModel, tmp_path: Path
) -> None:
    assert_damaged_buckets_are_refused(engine, dict(model.named_parameters()), tmp_path / "bucket")


@UNFIT_WEIGHTS
def test_weights_that_do_not_fit_change_nothing(
    engine: ProgramEngine, model: PreTrainedModel, changes: dict[str, torch.Tensor | None], text: str
) -> None:
    assert_unfit_weights_change_nothing(engine, model, changes, text)


def test_asleep_it_frees_what_vllm_can_and_says_what_it_keeps(engine: ProgramEngine, model: PreTrainedModel) -> None:
    before = generate_all(engine, [request(PROMPTS[0], 1)], Sampling(12))
    slept = engine.sleep(("weights", "cache"))
    assert slept.freed == {}  # the CPU build has no sleep mode
    assert slept.kept == slept.resident
    assert slept.kept["weights"] == 4 * sum(weight.numel() for weight in model.parameters())
    assert 0.9 * ROLLOUT.cache_bytes < slept.kept["cache"] <= ROLLOUT.cache_bytes
    assert engine.wake(("weights", "cache")).resident == slept.resident
    assert_identical(generate_all(engine, [request(PROMPTS[0], 1)], Sampling(12)), before)


def test_in_sleep_mode_it_wakes_by_parts_and_samples_the_same(engine: ProgramEngine, model: PreTrainedModel) -> None:
    """As on CUDA, through the same calls of vLLM, which in its CPU build free nothing."""
    started = StartedEngine(dtype="float32", itemsize=4, max_model_len=MAX_MODEL_LEN, processes=[], cache_bytes=1)
    assert_sleeper_wakes_by_parts(ProgramEngine(engine._process, started, model, can_sleep=True), model)


def test_diverged_weights_raise(engine: ProgramEngine, model: PreTrainedModel) -> None:
    load_state(engine, {n: torch.full_like(t, torch.nan) for n, t in model.named_parameters()}, version=1)
    with pytest.raises(NonFiniteError, match="diverged"):
        generate_all(engine, [request(PROMPTS[0], 1, 2)], Sampling(4))


def test_nothing_listens_beyond_this_machine(engine: ProgramEngine) -> None:
    process = psutil.Process(engine.processes[0])
    listening = {c.laddr.ip for c in process.net_connections() if c.status == psutil.CONN_LISTEN}
    assert listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    others = [" ".join(child.cmdline()) for child in children_running("vllm", process)]
    assert all("multiprocessing.resource_tracker" in command for command in others)
