"""`sluice plan --cluster`: memory by phase, the limit that binds first, and what to change."""

import json
import re
import shlex
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import BloomConfig, BloomForCausalLM, Qwen3Config

from flows.configs import CONFIGS
from flows.plan.footprint import measure_step
from flows.plan.resources import Resources, plan_resources, this_machine
from flows.plan.workers import CONTEXT_BYTES, CUDA_CONTEXT
from flows.preflight import check
from infra.models.load import build_meta_model, load_model
from infra.models.tiny import make_tokenizer
from rl_core.planning.hardware import GPU_KINDS, Cluster, parse_cluster
from rl_core.planning.memory import WeightBytes
from schemas.config.load import load_config, override_config
from schemas.config.model import LoraConfig, ModelConfig
from schemas.config.run import RunConfig
from schemas.errors import ModelError
from tests.support.command import Command, assert_rejected, make_command
from tests.support.policies import load_policy
from tests.support.sft import sft_config
from tests.support.tiny import make_tiny_data, make_tiny_model, make_tiny_moe, make_tiny_reward_model, write_rows
from tests.support.workplace import Workplace

# The sizes of Qwen3 8B; its folder has no weights, which a plan doesn't need.
LARGE = Qwen3Config(
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12_288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40_960,
    tie_word_embeddings=False,
)


# And of Qwen3 32B.
LARGER = {"hidden_size": 5120, "intermediate_size": 25_600, "num_attention_heads": 64} | {
    "num_hidden_layers": 64,
    "layer_types": None,
}
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Workplace(tmp_path_factory.mktemp("resources")).folder
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "large")
    LARGE.save_pretrained(folder / "large")
    return folder


@pytest.fixture
def sluice(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that calls `sluice plan tiny.toml` in the folder."""
    monkeypatch.chdir(folder)
    return partial(make_command(monkeypatch, capsys), "plan", "tiny.toml")


@pytest.fixture
def plan(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Resources]:
    """Plan the folder's config, with overrides."""
    monkeypatch.chdir(folder)

    def planned(*overrides: str, cluster: Cluster | str | None = None) -> Resources:
        config = load_config(Path("tiny.toml"), overrides)
        machines = parse_cluster(cluster) if isinstance(cluster, str) else cluster or this_machine()
        return plan_resources(config, measure_step(config), machines)

    return planned


def whole_bytes(path: str) -> int:
    return 4 * sum(part.numel() for part in build_meta_model(ModelConfig(path=path)).parameters())


def test_a_sharded_policy_on_two_nodes_in_numbers(plan: Callable[..., Resources]) -> None:
    resources = plan("runtime.num_policy_ranks=2", "rollout.num_workers=3", cluster="2x4xH100")
    whole = whole_bytes("model")
    policy, rollout = resources.workers
    assert (policy.role, policy.count, rollout.role, rollout.count) == ("policy", 2, "rollout", 3)
    assert policy.parts["weights"] == policy.parts["gradients"] == whole // 2  # all shapes are even
    assert policy.parts["optimizer"] == whole
    assert policy.phases.load == whole // 2
    assert policy.phases.rollout == 3 * whole // 2  # weights and two moments, halved
    assert policy.phases.peak_phase == "update"


def test_a_reward_model_is_a_worker_of_its_own(folder: Path, plan: Callable[..., Resources]) -> None:
    make_tiny_reward_model(folder / "liked")
    settings = ("reward.kind=model", "reward.path=liked", "reward.max_tokens=512", "reward.num_workers=2")
    resources = plan(*settings, cluster="8xH100")
    _, reward, rollout = resources.workers
    assert (reward.role, reward.count, rollout.role) == ("reward", 2, "rollout")
    weights = load_file(folder / "liked" / "model.safetensors").values()
    assert reward.parts["weights"] == sum(2 * weight.numel() for weight in weights)  # in bfloat16
    assert reward.phases.peak_phase == "rollout"
    assert reward.phases.rollout == reward.parts["weights"] + reward.parts["forward"] > reward.phases.update > 0
    colocated = plan(*settings, "runtime.placement=colocated", cluster="2xH100")
    (shared,) = (worker for worker in colocated.workers if worker.role == "reward")
    assert (shared.phases.scoring, shared.phases.update) == (0, 0)
    assert colocated.shared is not None
    assert colocated.shared.rollout > plan("runtime.placement=colocated", cluster="2xH100").shared.rollout


def test_a_rank_loads_a_tensors_rows_at_a_time(plan: Callable[..., Resources]) -> None:
    resources = plan("runtime.num_policy_ranks=2", cluster="3x1xH100")
    embeddings = 4 * 260 * 16
    assert resources.host.parts["weights while loading"] == embeddings // 2  # one tensor at a time, a rank's rows


def test_colocated_workers_share_a_gpu(plan: Callable[..., Resources]) -> None:
    separate, colocated = (
        plan(f"runtime.placement={sharing}", cluster=f"{gpus}xH100")
        for gpus, sharing in ((2, "separate"), (1, "colocated"))
    )
    policy, rollout = separate.workers
    assert separate.limits[0].used == max(policy.phases.peak, rollout.phases.peak)
    shared = colocated.limits[0]
    both = [worker.phases for worker in colocated.workers]
    assert shared.used == (both[0] + both[1]).peak
    assert shared.where.startswith("colocated")


def test_an_engines_own_process_has_a_context_on_a_shared_gpu(plan: Callable[..., Resources]) -> None:
    settings = ("runtime.placement=colocated", "kl.coef=0", "rollout.kind=vllm")
    colocated = plan(*settings, cluster="1xH100")
    policy, engine = colocated.workers
    assert engine.parts[CUDA_CONTEXT] == CONTEXT_BYTES
    assert engine.phases.scoring == engine.phases.update == CONTEXT_BYTES  # it sleeps, and its process stays
    assert colocated.shared is not None
    assert colocated.shared.update == policy.phases.update + CONTEXT_BYTES
    assert engine.phases.rollout == sum(engine.parts.values())
    separate = plan("kl.coef=0", "rollout.kind=vllm", cluster="2xH100")
    assert CUDA_CONTEXT not in separate.workers[-1].parts  # a part of what a GPU is to be left


def test_few_engines_for_many_ranks_are_warned_of(plan: Callable[..., Resources]) -> None:
    many = ("kl.coef=0", "runtime.num_policy_ranks=16")
    wait = "GPUs sample for 16 policy ranks, which wait for them; raise rollout.num_workers ="
    assert plan(*many, "rollout.num_workers=3", cluster="19xH100").warnings == (f"3 {wait} 3",)
    assert plan(*many, "rollout.num_workers=4", cluster="20xH100").warnings == ()
    shared = (*many, "runtime.placement=colocated", "rollout.num_prompts=16")
    assert plan(*shared, cluster="2x8xH100").warnings == (f"1 {wait} 1 to 16",)
    assert plan(*shared, "rollout.num_workers=16", cluster="2x8xH100").warnings == ()
    assert plan(*many, cluster=this_machine()).warnings == ()  # on a CPU, workers take turns


def test_large_models_weights_are_those_of_their_shapes(plan: Callable[..., Resources]) -> None:
    resources = plan("model.path=large", "runtime.num_policy_ranks=8", cluster="9xH200")
    policy = resources.workers[0]
    assert whole_bytes("large") / 4 == pytest.approx(8.19e9, rel=0.001)  # as published: 8.2 B
    assert policy.parts["weights"] == pytest.approx(whole_bytes("large") / 8, rel=0.001)
    assert resources.exceeded == resources.fixes == ()


def test_what_does_not_fit_is_shown_and_its_advice_works(sluice: Command) -> None:
    arguments = ("model.path=large", "runtime.num_policy_ranks=4", "--cluster", "8xH100")
    result = sluice(*arguments, "rollout.max_response_tokens=2000", "rollout.samples_per_prompt=8", "--json")
    assert_rejected(result, "GPU memory (policy, update): the run needs", "but 1x8xH100 has 74.5 GiB; it fits with ")
    resources = json.loads(result.out)["resources"]
    limit = resources["limits"][0]
    assert limit["name"] == "GPU memory"
    assert limit["used"] > limit["available"] == 80e9
    advice = shlex.split(result.err.partition("it fits with ")[2])
    followed = sluice(*arguments, "rollout.max_response_tokens=2000", "rollout.samples_per_prompt=8", *advice)
    assert (followed.exit_code, followed.err) == (0, "")
    assert "the run fits" in followed.out


FIXES: dict[str, tuple[str, ...]] = {  # each change, and settings of runs that it makes fit
    "model.gradient_checkpointing=true": (),
    "runtime.gradient_sync=every_micro_batch": ("runtime.num_policy_ranks=2", "packing.token_budget=24"),
    "runtime.num_policy_ranks=3": ("runtime.num_policy_ranks=1", "packing.token_budget=24"),
    "packing.token_budget=28": ("data.max_prompt_tokens=16",),
    "rollout.batch_prompts=1": ("packing.token_budget=24", "rollout.num_prompts=64", "rollout.samples_per_prompt=16"),
    "model.compute_dtype=bfloat16": ("model.compute_dtype=float32",),
    "optim.offload=true": ("packing.token_budget=24", "packing.logits_chunk_tokens=1"),
}


@pytest.mark.parametrize("change", FIXES)
def test_each_kind_of_advice_makes_the_run_fit(plan: Callable[..., Resources], change: str) -> None:
    machines = parse_cluster("4xH100")
    before, after = (plan(*FIXES[change], *extra, cluster=machines).limits[0].used for extra in ((), (change,)))
    assert after < before
    tight = machines.replace(gpu_bytes=(before + after) // 2)
    planned = plan(*FIXES[change], cluster=tight)
    assert [limit.name for limit in planned.exceeded] == ["GPU memory"]
    assert change.partition("=")[0] in [fix.partition("=")[0] for fix in planned.fixes]
    for fix in planned.fixes:
        assert plan(*FIXES[change], *shlex.split(fix), cluster=tight).exceeded == (), fix


def test_advice_for_fine_tuning_is_taken_together_without_what_is_refused(folder: Path) -> None:
    write_rows(folder / "long.jsonl", [{"text": f"{number} " * 4000} for number in range(8)])
    sizes = {"sft": {"max_tokens": 10_000}, "packing": {"token_budget": 40_000}}
    base = sft_config(folder, "long.jsonl", model={"path": str(folder / "large")}, **sizes)
    machine = parse_cluster("1xH100")

    def used(gpu_bytes: int, *settings: str) -> Resources:
        config = override_config(base, settings, "plan")
        return plan_resources(config, measure_step(config), machine.replace(gpu_bytes=gpu_bytes))

    both = ("model.gradient_checkpointing=true", "optim.offload=true")
    alone = min(used(80 * 10**9, setting).limits[0].used for setting in both)
    planned = used((alone + used(80 * 10**9, *both).limits[0].used) // 2)
    assert [limit.name for limit in planned.exceeded] == ["GPU memory"]
    (fix,) = planned.fixes
    assert {*both} <= {*fix.split()}
    assert "rollout" not in fix


def test_an_engines_share_that_leaves_no_room_for_a_publish_is_lowered(plan: Callable[..., Resources]) -> None:
    run = ("model.path=large", "model.gradient_checkpointing=true", "runtime.num_policy_ranks=4", "rollout.kind=vllm")
    planned = plan(*run, "rollout.gpu_memory_utilization=0.98", cluster="8xH100")
    assert "GPU memory (rollout, publish)" in planned.verdict
    (fix,) = planned.fixes
    assert fix.startswith("rollout.gpu_memory_utilization=0.9")
    assert plan(*run, fix, cluster="8xH100").exceeded == ()


def test_without_a_fix_the_advice_is_other_hardware(sluice: Command) -> None:
    result = sluice("model.path=large", "--cluster", "2xL4")
    assert_rejected(result, "GPU memory (", "use GPUs with more memory, or more of them")


def test_vllm_needs_memory_for_its_weights(sluice: Command) -> None:
    vllm = ("rollout.kind=vllm", "rollout.dtype=bfloat16", "model.path=large", "--cluster", "16xH100")
    result = sluice(*vllm, "rollout.gpu_memory_utilization=0.1", "runtime.num_policy_ranks=15")
    assert_rejected(result, "gives vLLM 7.45 GiB of a GPU", "weights in bfloat16 take 15.3 GiB")
    advice = result.err.partition("use at least ")[2].strip().split(", or ")
    assert advice == ["rollout.gpu_memory_utilization=0.21", "rollout.tensor_parallel=4", "GPUs with more memory"]
    assert sluice(*vllm, advice[0], "runtime.num_policy_ranks=15").exit_code == 0
    assert sluice(*vllm, "rollout.gpu_memory_utilization=0.1", advice[1], "runtime.num_policy_ranks=12").exit_code == 0


def test_the_gpus_of_an_engine_share_its_weights_and_cache(plan: Callable[..., Resources], sluice: Command) -> None:
    vllm = ("rollout.kind=vllm", "model.path=large", "runtime.num_policy_ranks=4")
    alone, four = (plan(*vllm, f"rollout.tensor_parallel={count}", cluster="8xH100") for count in (1, 4))
    one, each = alone.workers[-1], four.workers[-1]
    assert (one.gpus, each.gpus) == (1, 4)
    assert each.parts["weights"] == one.parts["weights"] // 4 == whole_bytes("large") // 2 // 4
    assert each.phases.rollout == one.phases.rollout == round(0.85 * 80e9)
    arguments = (*vllm, "--cluster", "4x2xH100")
    assert_rejected(
        sluice(*arguments, "rollout.tensor_parallel=4"), "the nodes have 2, 2, 2, 2, enough for 0; what fits:"
    )
    assert_rejected(sluice(*arguments, "rollout.tensor_parallel=3"), "set it to 1, 2, 4, 8, 16 or 32")


def test_a_cluster_that_is_no_cluster_is_rejected(sluice: Command) -> None:
    assert_rejected(sluice("--cluster", "eight"), "'eight' is not of the form [NODESx]GPUSxKIND")
    assert_rejected(sluice("--cluster", "0xH100"), "not of the form")
    assert_rejected(sluice("--cluster", "8xV9000"), "V9000 is not a known GPU", "H100")
    needed = sluice("kl.coef=0.01", "--cluster", "2xH100")
    assert_rejected(needed, "needs 3 GPUs (1 policy, 1 reference, 1 rollout; separate)", "has 2")


@pytest.mark.parametrize("kind", GPU_KINDS)
def test_kinds_are_read_in_any_case(kind: str) -> None:
    cluster = parse_cluster(f"3x2x{kind.lower()}")
    assert (cluster.name, cluster.num_gpus, cluster.gpu_bytes) == (f"3x2x{kind}", 6, GPU_KINDS[kind].memory_bytes)


def test_the_limit_that_binds_first_is_the_fullest(plan: Callable[..., Resources]) -> None:
    resources = plan(cluster="2xH100")
    limits = {limit.name: limit for limit in resources.limits}
    assert list(limits) == ["GPU memory", "host memory", "store"]
    for first in limits:
        fuller = {**limits, first: limits[first].replace(used=limits[first].available)}
        binding = resources.replace(limits=tuple(fuller.values()))
        assert binding.binding.name == first
        assert f"the run fits 1x2xH100: {first} (" in binding.verdict


def test_host_memory_that_offloaded_moments_exceed_is_freed_by_keeping_them_on_gpus(
    plan: Callable[..., Resources],
) -> None:
    roomy = parse_cluster("2xH100").replace(gpu_bytes=10**12)
    on_host, on_gpus = (
        plan("model.path=large", f"optim.offload={value}", cluster=roomy).host.num_bytes for value in ("true", "false")
    )
    tight = roomy.replace(host_bytes=(on_host + on_gpus) // 2)
    planned = plan("model.path=large", "optim.offload=true", cluster=tight)
    assert "host memory (node 0, " in planned.verdict
    assert planned.fixes == ("optim.offload=false",)
    assert plan("model.path=large", *planned.fixes, cluster=tight).exceeded == ()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_gpus_that_are_not_here_are_refused(sluice: Command) -> None:
    assert_rejected(
        sluice("runtime.device=cuda"), "needs 2 GPUs", "has 0; ", 'runtime.device = "cpu"', "--cluster 8xH100"
    )


def test_weights_are_those_of_the_model(folder: Path) -> None:
    model = load_model(ModelConfig(path=str(folder / "model")))
    whole = 4 * sum(part.numel() for part in model.parameters())
    alone, halves = WeightBytes.of(model, 1), WeightBytes.of(model, 2)
    assert (alone.whole, alone.held, alone.trained, alone.optimizer, alone.gathered) == (*[whole] * 3, 2 * whole, 0)
    assert (halves.held, halves.trained, halves.optimizer) == (whole // 2, whole // 2, whole)  # all shapes are even
    assert halves.root + 2 * halves.layer == whole == halves.gathered  # two layers


def test_experts_of_which_there_are_fewer_than_ranks_are_gathered_with_padding(folder: Path) -> None:
    model = load_model(ModelConfig(path=str(make_tiny_moe(folder / "moe", num_experts=4))))
    few, many = WeightBytes.of(model, 4), WeightBytes.of(model, 8)
    experts = 4 * sum(part.numel() for part in model.parameters() if part.shape[0] == 4)
    assert experts > 0
    assert (few.padding, few.gathered) == (1, few.whole)
    assert many.layer == few.layer + experts // 2  # eight shards of one expert each, in one of two layers
    assert many.padding > 1.4


def test_a_sampling_mask_takes_a_byte_next_to_each_logit_and_exponential(plan: Callable[..., Resources]) -> None:
    chunks = [
        plan("rollout.top_k=4", f"rollout.sampling_mask={value}").workers[0].parts["logits chunk"]
        for value in ("false", "true")
    ]
    assert chunks[1] - chunks[0] == chunks[0] // 8


def test_muon_has_one_moment_of_a_matrix(folder: Path) -> None:
    model = load_model(ModelConfig(path=str(folder / "model")))
    matrices = [4 * each.numel() for name, each in model.named_parameters() if name.endswith("proj.weight")]
    adamw, muon = WeightBytes.of(model, 2), WeightBytes.of(model, 2, muon=True)
    assert muon.optimizer == adamw.optimizer - sum(matrices) // 2
    assert (adamw.orthogonalized, muon.orthogonalized) == (0, max(matrices))
    assert muon.step_buffers == adamw.step_buffers  # the embeddings are larger than 6 matrices


def test_only_an_adapter_has_gradients(folder: Path, plan: Callable[..., Resources]) -> None:
    pytest.importorskip("peft")
    adapted = load_policy(ModelConfig(path=str(folder / "model"), lora=LoraConfig(rank=2)))
    resources = plan("model.lora.rank=2", "kl.coef=0.01", cluster="2xH100")
    policy, rollout = resources.workers  # the reference is the policy without its adapter
    parameters = list(adapted.parameters())
    assert policy.parts["weights"] == 4 * sum(part.numel() for part in parameters)
    assert policy.parts["gradients"] == 4 * sum(part.numel() for part in parameters if part.requires_grad)
    assert rollout.parts["weights"] == whole_bytes(str(folder / "model"))


def test_engines_that_compute_with_adapters_hold_them(folder: Path, plan: Callable[..., Resources]) -> None:
    pytest.importorskip("peft")
    lora = ("model.lora.rank=4", "model.lora.publish=adapters")
    adapted = load_policy(ModelConfig(path=str(folder / "model"), lora=LoraConfig(rank=4)))
    adapters = 4 * sum(part.numel() for part in adapted.parameters() if part.requires_grad)
    whole = whole_bytes(str(folder / "model"))
    embedded, vllm = plan(*lora), plan(*lora, "rollout.kind=vllm")
    assert embedded.workers[-1].parts["weights"] == whole + adapters
    assert vllm.workers[-1].parts["weights"] == whole + 2 * adapters  # vLLM allocates for a rank of 8
    program = plan(*lora, "rollout.kind=program", "rollout.program=mine.py")
    assert program.workers[-1].parts["weights"] == whole + adapters
    turns = ("runtime.placement=colocated", "rollout.num_workers=2", "kl.coef=0")
    merged, kept = (plan(*turns, *settings, cluster="2xH100") for settings in (lora[:1], lora))
    in_host = [resources.host.parts["moved out of GPUs"] for resources in (merged, kept)]
    optimizer = 2 * adapters
    assert in_host[0] == optimizer + whole + adapters  # the policy, while the engines sample
    assert in_host[1] == optimizer + 2 * (whole + adapters)  # the engines, while it computes


def test_a_model_that_is_no_causal_one_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    with pytest.raises(ModelError, match="not a causal language model"):
        build_meta_model(ModelConfig(path=str(tmp_path)))


def test_padded_activations_are_those_of_the_models_own_attention(
    folder: Path, plan: Callable[..., Resources], sluice: Command
) -> None:
    sizes = {"vocab_size": 272, "hidden_size": 32, "n_layer": 2, "n_head": 4, "eos_token_id": 1}
    BloomForCausalLM(BloomConfig(**sizes)).save_pretrained(folder / "bloom")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(folder / "model" / name, folder / "bloom" / name)
    settings = ("model.path=bloom", "packing.kind=padded")
    short, long = (
        plan(*settings, f"rollout.max_response_tokens={size}", cluster="2xH100").workers[0] for size in (16, 64)
    )
    assert 0 < short.parts["activations"] < long.parts["activations"]
    result = sluice(*settings, "--cluster", "2xH100")
    assert (result.exit_code, result.err) == (0, "")
    assert "not counted" not in result.out


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_built_in_config_passes_its_own_plan(path: Path, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", vocab_size=100_000, max_position_embeddings=40_000)  # ids of four bytes
    data = str(make_tiny_data(tmp_path / "train.parquet", 8))
    overrides = [f"model.path={tmp_path / 'model'}", f"data.train_path={data}"]
    config: RunConfig = load_config(path, overrides)
    if config.data.eval_path:
        config = config.replace(data=config.data.replace(eval_path=data))
    if config.sft:
        rows = write_rows(
            tmp_path / "rows.jsonl", [{"prompt": f"{n} + 1 =", "completion": str(n + 1)} for n in range(8)]
        )
        config = config.replace(data=config.data.replace(train_path=str(rows)))
    check(config, runs_here=False)
    footprint = measure_step(config, 1.0)  # every response at its longest
    footprint.check_capacity()
    assert footprint.warnings == ()
    plan_resources(config, footprint, parse_cluster("3xH100"), fill=1.0).check()


def test_what_a_rank_holds_is_what_the_page_on_clusters_says(tmp_path: Path) -> None:
    """Of several micro-batches, whose gradients are whole on each rank by default."""
    rows = re.findall(r"^\| (.*) \|$", (ROOT / "docs" / "cluster.md").read_text(), re.MULTILINE)
    table = {name: cells for name, *cells in (row.split(" | ") for row in rows)}
    ranks = [int(cell.split(",")[0]) for cell in table["policy ranks, rollout workers"]]
    folders = [tmp_path / size for size in ("8B", "32B")]
    for folder, sizes in zip(folders, (LARGE, Qwen3Config(**{**LARGE.to_dict(), **LARGER})), strict=True):
        sizes.save_pretrained(folder)
    small, large = (build_meta_model(ModelConfig(path=str(folder))) for folder in folders)
    held = [WeightBytes.of(model, count) for model, count in zip((small, small, large, large), ranks, strict=True)]
    for name, syncs_last in (
        ("weights, gradients, optimizer of a rank, `every_micro_batch`", False),
        ("the same, `last_micro_batch` (default)", True),
    ):
        sums = [each.held + each.optimizer + each.gradients(2, syncs_last=syncs_last) for each in held]
        assert [f"{total / 1e9:.1f} GB" for total in sums] == table[name]
