"""An engine of one's own: the program of `examples/own_engine` passes the checks of every engine, and a run trains."""

import json
import os
import re
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from flows.preflight import check_cluster, check_engine
from infra.engines.base import EngineModel, Sampling, generate_all
from infra.engines.open import engine_versions, open_engine
from infra.engines.program import frames
from infra.engines.program.engine import ProgramEngine
from infra.engines.program.process import EngineInstallation, StartedEngine
from infra.engines.program.start import find_program, open_program
from infra.models.flat_tensors import tensor_specs
from infra.models.load import build_meta_model, load_model, load_tokenizer
from infra.models.lora import add_adapter, is_adapter
from infra.storage.shared_memory import choose_root
from schemas.config.model import LoraConfig, ModelConfig
from schemas.config.rollout import ProgramRollout
from schemas.errors import ConfigError, EngineLostError, WeightsError, WorkerLostError
from tests.support.commands import sluice_in_turn
from tests.support.configs import run_config
from tests.support.engine_checks import (
    MAX_MODEL_LEN,
    PROMPTS,
    assert_branches_are_exact,
    assert_damaged_buckets_are_refused,
    assert_degenerate_requests_work,
    assert_identical,
    assert_logprobs,
    assert_requests_have_limits_of_their_own,
    assert_stop_tokens_end_responses,
    assert_turns_are_exact,
    counting_python,
    greedy,
    kill_in_the_middle,
    plain_logprobs,
    request,
    starts_of,
)
from tests.support.odd_engine import BEHAVIOUR, ODD, calls_of, open_odd_engine
from tests.support.progress import children_running
from tests.support.tiny import make_tiny_model
from tests.support.weight_tensors import bucket_of, load_state
from tests.support.workplace import Workplace

PROGRAM = Path(__file__).parents[2] / "examples" / "own_engine" / "engine.py"
DOOMED = f"""
import os, signal, socket, sys
from importlib.metadata import version
sys.path += [{str(PROGRAM.parent)!r}, {str(Path(frames.__file__).parent)!r}]
import frames

class Doomed:  # needs no torch
    def hello(self, arguments, buffers):
        found = {{"engine": "plain", "version": version("transformers"), "device": "cpu"}}
        return {{"protocol": frames.PROTOCOL, **found}}, []

    def start(self, arguments, buffers):
        print("no memory is left", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

if has_memory := os.path.exists(__file__ + ".memory"):
    import engine
frames.serve(socket.socket(fileno=int(sys.argv[1])), engine.PlainEngine() if has_memory else Doomed())
"""
STARTED = {"dtype": "float32", "max_model_len": 64, "processes": [], "itemsize": 4, "cache_bytes": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return counting_python(tmp_path_factory.mktemp("python"), sys.executable)


@pytest.fixture(scope="module")
def engine(folder: Path, python: str) -> Iterator[ProgramEngine]:
    rollout = {"kind": "program", "program": str(PROGRAM), "python": python, "max_response_tokens": 50}
    data = {"max_prompt_tokens": MAX_MODEL_LEN - 50}
    config = run_config(model={"path": str(folder)}, data=data, rollout=rollout)
    engine = open_engine(config, load_tokenizer(config.model))
    assert isinstance(engine, ProgramEngine)
    yield engine
    engine.close()
    assert not psutil.pid_exists(engine.processes[0])


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return load_model(ModelConfig(path=str(folder)))


def test_it_is_started_once(engine: ProgramEngine, python: str) -> None:
    assert starts_of(python) == [os.getpid()]


def test_samples_have_the_log_probs_of_one_forward(engine: ProgramEngine, model: PreTrainedModel) -> None:
    for prompt, generation in zip(
        PROMPTS, generate_all(engine, [request(prompt, 0) for prompt in PROMPTS], Sampling(9, 0)), strict=True
    ):
        assert generation.token_ids.tolist() == greedy(model, prompt, 9)
    sampling = Sampling(20, 0.7, top_p=0.9, top_k=40, min_p=0.01)
    for row, generation in enumerate(generate_all(engine, [request(prompt, 1, 2) for prompt in PROMPTS], sampling)):
        assert_logprobs(generation, plain_logprobs(model, PROMPTS[row // 2], generation.token_ids, 0.7), 2e-5)


def test_a_sample_is_its_seed_s(engine: ProgramEngine) -> None:
    requests = [request(prompt, 1, 2**64 - 1, 2**63) for prompt in PROMPTS]
    first = generate_all(engine, requests, Sampling(12))
    assert_identical(generate_all(engine, requests, Sampling(12)), first)
    assert_identical(generate_all(engine, [request(PROMPTS[2], 2**63)], Sampling(12)), first[-1:])


def test_rows_end_and_go_on_as_those_of_every_engine(engine: ProgramEngine, model: PreTrainedModel) -> None:
    assert_stop_tokens_end_responses(engine, PROMPTS[0])
    assert_requests_have_limits_of_their_own(engine, model)
    assert assert_turns_are_exact(engine, model, joins=True)
    assert assert_branches_are_exact(engine, model, joins=True)
    assert_degenerate_requests_work(engine, PROMPTS[0])


def test_it_takes_new_weights(engine: ProgramEngine, tmp_path: Path) -> None:
    other = load_model(ModelConfig(path=str(make_tiny_model(tmp_path, seed=1))))
    load_state(engine, load_file(tmp_path / "model.safetensors"), version=3)
    (generation,) = generate_all(engine, [request(PROMPTS[0], 1)], Sampling(9))
    assert_logprobs(generation, plain_logprobs(other, PROMPTS[0], generation.token_ids, 1))
    np.testing.assert_allclose(
        engine.score(np.array(PROMPTS[0]), 1.0), plain_logprobs(other, PROMPTS[0][:1], np.array(PROMPTS[0][1:]), 1.0),
        atol=1e-5,
    )  # fmt: skip


def test_a_bucket_that_is_not_what_was_sent_is_refused(engine: ProgramEngine, folder: Path, tmp_path: Path) -> None:
    state = load_file(folder / "model.safetensors")
    load_state(engine, state, version=0)
    assert_damaged_buckets_are_refused(engine, state, tmp_path / "bucket")


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Have the kernel refuse larger files, those in memory included, as it does when memory is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_memory_leaves_no_version_and_an_engine_that_can_load(engine: ProgramEngine, folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    load_state(engine, state, version=0)
    (before,) = generate_all(engine, [request(PROMPTS[0], 1)], Sampling(9))
    said = r"no shared memory for a bucket of \d{5} bytes of weights: .*; lower weights.bucket_bytes"
    with files_of_at_most(2**12), pytest.raises(WeightsError, match=said):
        load_state(engine, state, version=4)
    assert engine.version is None
    load_state(engine, state, version=0)
    assert_identical(generate_all(engine, [request(PROMPTS[0], 1)], Sampling(9)), [before])


def test_adapters_for_which_there_is_no_space(folder: Path, small_memory: Path) -> None:
    shapes, lora = build_meta_model(ModelConfig(path=str(folder))), LoraConfig(rank=5000, publish="adapters")
    add_adapter(shapes, lora)  # 12 MB, and the file system has 8 MiB
    process, root = open_odd_engine(), choose_root(str(small_memory), 0)
    engine = ProgramEngine(process, StartedEngine(**STARTED), shapes, lora=lora, shared_memory=str(small_memory))
    adapters = {name: torch.zeros(each.shape) for name, each in shapes.named_parameters() if is_adapter(name)}
    said = r"has no space for 12\d{6} bytes of adapters: No space left on device; .*runtime.shared_memory to another"
    with pytest.raises(WeightsError, match=said):
        engine.load_weights(tensor_specs(adapters), [bucket_of(adapters)], version=1, is_complete=False)
    assert engine.version is None
    assert calls_of(process) == []
    assert not list(root.glob("adapters*"))
    engine.close()


@pytest.mark.parametrize("moment", ["load", "batch"])
def test_a_kill_in_the_middle_loses_the_engine(folder: Path, moment: str) -> None:
    config = run_config(model={"path": str(folder)}, rollout={"kind": "program", "program": str(PROGRAM)})
    engine = open_engine(config, load_tokenizer(config.model))
    state, (program,) = load_file(folder / "model.safetensors"), engine.processes
    with pytest.raises(EngineLostError, match=r"is lost: signal 9 \(Killed\)"):
        kill_in_the_middle(engine, state, moment, lambda: os.kill(program, signal.SIGKILL))
    assert engine.is_lost
    assert not psutil.pid_exists(program)


def test_its_last_words_are_in_the_error(folder: Path) -> None:
    rollout = {"kind": "program", "program": str(PROGRAM), "settings": {"threads": "many"}}
    config = run_config(model={"path": str(folder)}, rollout=rollout)
    with pytest.raises(ConfigError, match=r"rollout.kind = 'program': plain \S+ can't run the model .*: .*str"):
        open_engine(config, load_tokenizer(config.model))


@pytest.mark.command("ps", "stop")
def test_a_run_trains_with_it_and_outlives_its_program_and_one_that_does_not_start_again(
    workplace: Workplace, tmp_path: Path
) -> None:
    """Another worker starts it; without memory for that, the run has all its restarts. Last, it is stopped."""
    run, python = workplace.run("own"), counting_python(tmp_path, sys.executable)
    program, memory = tmp_path / "doomed.py", tmp_path / "doomed.py.memory"
    program.write_text(DOOMED)
    memory.touch()
    settings = ("rollout.kind=program", f"rollout.program={program}", f"rollout.python={python}", "steps=10000")
    driver = workplace.start("train", "tiny.toml", "--run-id", run.run_id, "runtime.max_restarts=9", *settings)
    driver.wait_standing(lambda: run.num_done > 0)
    killed_at = run.num_done
    (worker,) = workplace.find_workers("RolloutWorker")
    (first,) = children_running(str(program), worker)
    first.kill()
    driver.resume()
    driver.wait_for(lambda: run.num_done > killed_at + 1)
    assert "(restart 1)" not in driver.printed
    starts = starts_of(python)
    assert worker.pid in starts
    assert len(starts) == len({*starts}) == 3  # the driver's check, the worker and its successor
    memory.unlink()
    (successor,) = workplace.find_workers("RolloutWorker")
    for child in children_running(str(program), successor):
        child.kill()
    driver.wait_for(lambda: "(restart 2)" in driver.printed)  # the first ended as no worker could start
    memory.touch()
    done = run.num_done
    driver.wait_for(lambda: run.num_done > done)
    list_runs = ("ps", "--json")
    ended = sluice_in_turn(workplace, list_runs, ("stop", run.run_id), list_runs)
    assert [code for code, _ in ended] == [0, 0, 0], ended
    listed, stopped, left = (printed.splitlines() for _, printed in ended)
    (found,) = json.loads(next(line for line in listed if line.startswith("[{")))
    assert (found["run_id"], found["num_processes"]) == (run.run_id, 3)  # with the store's index
    assert f"stopped {run.run_id}; resume with: sluice resume {run.run_id}" in stopped
    assert "[]" in left
    assert f"plain's process {first.pid} is lost: signal 9 (Killed)" in driver.finish(143)
    assert all(0 <= step["mismatch/max"] < 1e-4 for step in run.step_metrics())  # sampler and trainer agree


def test_a_run_whose_program_is_killed_at_each_start_ends_with_its_last_lines(
    workplace: Workplace, tmp_path: Path
) -> None:
    python, program = counting_python(tmp_path, sys.executable), tmp_path / "doomed.py"
    program.write_text(DOOMED)
    settings = ("rollout.kind=program", f"rollout.program={program}", f"rollout.python={python}")
    printed = workplace.sluice("train", "tiny.toml", "--run-id", "doomed", *settings, exit_code=1)
    ended = r"WorkerLostError: plain's process \d+ is lost: signal 9 \(Killed\); its last lines:\s+no memory is left"
    assert re.search(ended, printed)
    assert len(starts_of(python)) == 1 + 3  # the driver's check; the task that starts workers is run three times


@pytest.mark.parametrize(
    ("hello", "said"),
    [
        ('{"protocol": 0, "engine": "odd", "version": "1", "device": "cpu"}', "speaks version 0 of the protocol, but"),
        ('{"protocol": 1, "engine": "odd", "version": "1", "device": "tpu"}', "computes on 'tpu'; expected cpu or"),
        ('{"protocol": 1, "device": "cpu"}', "it answers hello without 'engine'"),
        ("die no such library", "is lost: exit code 3; its last lines:\n  no such library"),
    ],
)
def test_a_program_that_is_no_engine(monkeypatch: pytest.MonkeyPatch, hello: str, said: str) -> None:
    monkeypatch.setenv(BEHAVIOUR, json.dumps({"hello": hello}))
    find_program.cache_clear()
    with pytest.raises(ConfigError, match=re.escape(said)):
        find_program(str(ODD), None)


def test_a_program_that_is_killed_as_it_starts_is_a_lost_worker(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    behaviour = {"hello": '{"protocol": 1, "engine": "odd", "version": "1", "device": "cpu"}', "start": "killed busy"}
    monkeypatch.setenv(BEHAVIOUR, json.dumps(behaviour))
    with pytest.raises(WorkerLostError, match=r"^odd's process \d+ is lost: signal 9 .*:\n  busy$") as caught:
        open_program(ProgramRollout(program=str(ODD)), EngineModel(ModelConfig(path=str(folder)), max_tokens=64))
    assert type(caught.value) is WorkerLostError
    monkeypatch.setenv(BEHAVIOUR, json.dumps({"hello": "killed busy"}))
    find_program.cache_clear()
    with pytest.raises(WorkerLostError, match=r"odd_engine.py's process \d+ is lost: signal 9 .*:\n  busy$"):
        find_program(str(ODD), None)


def test_a_program_that_does_not_say_what_it_is_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BEHAVIOUR, json.dumps({"hello": "hang"}))
    monkeypatch.setattr("infra.engines.program.process.LOOK_SECONDS", 0.5)
    find_program.cache_clear()
    with pytest.raises(ConfigError, match=r"killed: it has not answered 'hello' within 0.5 s$"):
        find_program(str(ODD), None)


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ("die no memory", r"odd 1 can't run the model .* is lost: exit code 3; its last lines:\n  no memory$"),
        ("raise no\nmemory", r"odd 1 can't run the model .* with sequences of 64 tokens: no$"),
        ("{}", r"the engine of .*odd_engine.py answers start with an unfit 'dtype': Field required"),
        (json.dumps(STARTED | {"dtype": "float16"}), r"an unfit 'dtype': Input should be 'float32' or 'bfloat16'"),
        (json.dumps(STARTED | {"itemsize": "4"}), r"an unfit 'itemsize': Input should be a valid integer"),
        (
            json.dumps(STARTED | {"max_model_len": 63}),
            r"asked to start with max_model_len 64, but has 63: lower data.max_prompt_tokens, rollout.max_response_t",
        ),
        (
            json.dumps(STARTED | {"dtype": "bfloat16", "itemsize": 2}),
            r"with dtype 'float32', but has 'bfloat16': set rollout.dtype = 'bfloat16', or have the program take",
        ),
        (json.dumps(STARTED | {"itemsize": 2}), r"with dtype 'float32', but answers itemsize 2: have the program"),
        (
            json.dumps(STARTED | {"adapted_layers": ["model.layers.0.mlp.up"]}),
            "odd has no adapter for .*q_proj of this",
        ),
    ],
)
def test_a_program_that_cannot_run_the_model_is_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch, start: str, said: str
) -> None:
    hello = '{"protocol": 1, "engine": "odd", "version": "1", "device": "cpu"}'
    monkeypatch.setenv(BEHAVIOUR, json.dumps({"hello": hello, "start": start}))
    model = ModelConfig(path=str(folder), lora=LoraConfig(rank=600, publish="adapters"))  # more than vLLM can
    with pytest.raises(ConfigError, match=said):
        open_program(ProgramRollout(program=str(ODD)), EngineModel(model, max_tokens=64))
    assert not children_running(str(ODD))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({}, "'running'"),
        ({"rows": [[7, "stop", 0]], "running": 1, "waiting": 0, "cache": 0.0}, "7"),
        ({"rows": [[0, "done", 0]], "running": 1, "waiting": 0, "cache": 0.0}, "the reason 'done', expected stop or"),
        ({"rows": [], "running": 1, "waiting": 0, "cache": 0.0}, "zip"),
    ],
)
def test_an_answer_that_is_no_turn_loses_the_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch, answer: dict[str, object], said: str
) -> None:
    assert_lost(folder, monkeypatch, answer, said, np.array([5], np.int32), np.array([-1.0], np.float32))


@pytest.mark.parametrize(
    ("tokens", "logprobs", "said"),
    [([], [], "0 tokens"), ([5, 6], [-1.0], "2 tokens with 1 log-probs"), ([9999], [-1.0], "a token id that is not")],
)
def test_tokens_that_are_no_turn_lose_the_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tokens: list[int], logprobs: list[float], said: str
) -> None:
    answer = {"rows": [[0, "stop", 0]], "running": 1, "waiting": 0, "cache": 0.0}
    assert_lost(folder, monkeypatch, answer, said, np.array(tokens, np.int32), np.array(logprobs, np.float32))


def assert_lost(
    folder: Path, monkeypatch: pytest.MonkeyPatch, answer: object, said: str, tokens: np.ndarray, logprobs: np.ndarray
) -> None:
    """Assert that an engine which answers a step so, with these buffers, is lost for that reason."""
    process = open_odd_engine(step=json.dumps(answer))
    call = process.call
    monkeypatch.setattr(process, "call", lambda name, arguments=None, buffers=(), **options: call(
        name, arguments, [tokens, logprobs] if name == "step" else buffers, **options
    ))  # fmt: skip
    engine = ProgramEngine(process, StartedEngine(**STARTED), build_meta_model(ModelConfig(path=str(folder))))
    rows = engine.open_rows(Sampling(4))
    rows.begin([request(PROMPTS[0], 1)])
    with pytest.raises(EngineLostError, match=re.escape(said)):
        rows.step()
    assert engine.is_lost


def test_a_program_that_forgets_a_row_is_not_asked_for_it_for_ever(folder: Path) -> None:
    process = open_odd_engine(step='{"rows": [], "running": 0, "waiting": 0, "cache": 0.0}')
    engine = ProgramEngine(process, StartedEngine(**STARTED), build_meta_model(ModelConfig(path=str(folder))))
    with pytest.raises(EngineLostError, match=r"no turn of a row: no row runs or waits, but turns have not ended: 2"):
        generate_all(engine, [request(PROMPTS[0], 1, 2)], Sampling(4))
    assert engine.is_lost


def test_scores_and_peaks_that_are_none_lose_the_engine(folder: Path) -> None:
    shapes, started = build_meta_model(ModelConfig(path=str(folder))), StartedEngine(**STARTED)
    engine = ProgramEngine(open_odd_engine(), started, shapes)  # which answers with the tokens
    with pytest.raises(EngineLostError, match=r"answered 'score' without the log-probs, float32, of 2 tokens"):
        engine.score(np.array([1, 2, 3]), 1.0)
    assert engine.is_lost
    engine = ProgramEngine(open_odd_engine(peak_memory='{"rss": "much"}'), started, shapes)
    with pytest.raises(EngineLostError, match=r"with what are no bytes by kind: {'rss': 'much'}"):
        engine.take_peak_memory()
    assert engine.is_lost


def write_near(folder: Path, device: str) -> str:
    """Write a program that says what a file next to it has; return its path."""
    hello = {"protocol": 1, "engine": "near", "version": "2", "device": device}
    (folder / "calls.py").write_text(f"HELLO = {hello}")
    (folder / "frames.py").write_text(Path(frames.__file__).read_text())
    (folder / "near.py").write_text(
        "import socket, sys\nimport calls, frames\nclass Near:\n    def hello(self, *_): return calls.HELLO, []\n"
        "frames.serve(socket.socket(fileno=int(sys.argv[1])), Near())\n"
    )
    return str(folder / "near.py")


def test_a_program_imports_what_is_next_to_it(tmp_path: Path) -> None:
    assert find_program(write_near(tmp_path, "cpu"), None).engine == "near"


def test_a_missing_program_or_interpreter_and_another_device(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout.program '.*/none.py' is not a file; set it to the path of"):
        find_program(str(tmp_path / "none.py"), None)
    with pytest.raises(ConfigError, match=r"rollout.python '.*/none' can't be run: No such file or directory; set it"):
        find_program(str(PROGRAM), str(tmp_path / "none"))
    rollout = ProgramRollout(program=str(PROGRAM))
    assert engine_versions(rollout).keys() == {"plain"}
    assert find_program(str(PROGRAM), None) == EngineInstallation("plain", "cpu", engine_versions(rollout)["plain"])
    config = run_config(model={"path": str(folder)}, rollout=rollout.model_dump(), runtime={"device": "cuda"})
    with pytest.raises(ConfigError, match=r"runtime.device = 'cuda', but plain of rollout.program .* computes on cpu"):
        check_engine(config, rollout)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.usefixtures("ray_cluster")
def test_an_engine_for_gpus_is_refused_where_there_are_none(folder: Path, tmp_path: Path) -> None:
    rollout = ProgramRollout(program=write_near(tmp_path, "cuda"))
    config = run_config(model={"path": str(folder)}, rollout=rollout.model_dump())
    with pytest.raises(ConfigError, match=r"has no GPU, but near of rollout.program .* computes on cuda"):
        check_engine(config, rollout)
    elsewhere = config.replace(services=config.services.replace(ray_address="head:6379"))
    check_engine(elsewhere, rollout)  # which may have some
    with pytest.raises(ConfigError, match=r"the Ray cluster has no GPU, but near of rollout.program .* on cuda; set"):
        check_cluster(elsewhere)  # it is connected to, and has none
