"""Where each worker of a planned run is, and its device memory by phase; on a CPU, its part of the node's."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from pydantic import NonNegativeInt, PositiveInt
from transformers import PreTrainedModel

from flows.plan.footprint import Footprint
from infra.engines.embedded.cache import cache_bytes_per_token
from infra.engines.sizes import tensor_parallel_sizes
from infra.engines.vllm.start import allocated_rank
from infra.models.load import build_meta_model, enable_gradient_checkpointing, max_positions
from infra.models.lora import add_adapter, is_adapter
from infra.workers.layout import Role, decide_device, num_workers, spread_over_gpus
from rl_core.planning.activations import Activations, trace_activations
from rl_core.planning.hardware import Cluster, format_bytes
from rl_core.planning.memory import (
    FLOAT_BYTES,
    FORWARD_BUFFERS,
    HALF_BYTES,
    PHASES,
    SAMPLING_BYTES,
    HeadSizes,
    PhaseBytes,
    WeightBytes,
    cache_bytes,
    scoring_bytes,
    update_bytes,
)
from rl_core.rewards.model import build_meta_reward_model
from schemas.base import Frozen
from schemas.config.reward import ModelReward, reward_models
from schemas.config.rollout import ProcessRollout, VllmRollout
from schemas.config.run import RunConfig
from schemas.errors import ConfigError, ModelError
from schemas.placement import Device

MAX_PADDING = 1.25  # times the bytes of gathered weights, above which a plan warns
KV_CACHE = "KV cache"  # of vLLM on a GPU, with its working memory
CUDA_CONTEXT = "CUDA context"  # of the process of an engine, next to that of a worker that trains
CONTEXT_BYTES = 512 * 2**20  # of a process on a GPU: PyTorch's users report 300 to 800 MB; not measured here
_TRACED: dict[Any, tuple[Activations, tuple[str, ...]]] = {}  # most changes that are tried for advice change no forward


@dataclass(frozen=True)
class Placement:
    """The node of each worker, by role and number; with GPUs, each worker has its own, shared only if colocated."""

    nodes: dict[Role, tuple[int, ...]]  # by role, the node of each worker
    is_colocated: bool  # whether a worker of each role shares a GPU
    on_gpus: bool  # whether workers have GPUs
    time_shares_gpus: bool = False  # whether workers of a GPU move out of its memory while others compute

    def of_node(self, node: int) -> dict[Role, int]:
        """Return how many workers of each role are on a node."""
        return {role: nodes.count(node) for role, nodes in self.nodes.items()}

    @property
    def used_nodes(self) -> tuple[int, ...]:
        """The nodes with workers."""
        return tuple(sorted({node for nodes in self.nodes.values() for node in nodes}))


def place(config: RunConfig, cluster: Cluster) -> Placement:
    """Place workers on GPUs as a run does, node by node; without GPUs, all on one node.

    Raises:
        ConfigError: The cluster has too few GPUs, in all or on one node.
    """
    counts = num_workers(config)
    device = config.runtime.device
    if device == "cpu" or (device == "auto" and not cluster.gpus_per_node):
        return Placement({role: (0,) * count for role, count in counts.items()}, False, False)
    gpus = [cluster.gpus_per_node] * cluster.num_nodes
    try:
        decide_device(config, gpus, num_cpus=0)  # raises if there are too few GPUs
    except ConfigError as error:
        if cluster.is_here:
            raise ConfigError(f"{error}; or plan for hardware that is not here, with --cluster 8xH100") from None
        raise
    spread = spread_over_gpus(config, gpus)
    nodes = {role: tuple(spread[role, number] for number in range(count)) for role, count in counts.items()}
    return Placement(nodes, config.runtime.placement == "colocated", True, config.time_shares_gpus)


@dataclass(frozen=True)
class RewardBytes:
    """The bytes of a reward worker."""

    weights: int  # of the model, in the compute dtype
    forward: int  # beyond the weights, of a packed row at the token budget
    warnings: tuple[str, ...] = ()  # what could not be counted

    @classmethod
    def of(cls, config: RunConfig, *, on_gpus: bool) -> "RewardBytes | None":
        """Return those of the reward model that takes most; None without one.

        Raises:
            ModelError: A folder holds no such model.
        """
        device: Device = "cuda" if on_gpus else "cpu"
        measured = [_measure(model, device) for model in reward_models(config.reward)]
        return max(measured, key=lambda each: each.weights + each.forward, default=None)


def _measure(config: ModelReward, device: Device) -> RewardBytes:
    model = build_meta_reward_model(config).to(getattr(torch, config.dtype_on(device)))
    weights = sum(weight.nbytes for weight in model.parameters())
    try:
        traced = trace_activations(model, config.token_budget, longest=config.max_tokens)
    except ModelError as error:
        return RewardBytes(weights, 0, (f"activations of the reward model are not counted: {error}",))
    return RewardBytes(weights, FORWARD_BUFFERS * (traced.widest + traced.layer_input))


class WorkerMemory(Frozen):
    """The device memory of one worker of a role: of each of its GPUs, or without GPUs of all its processes."""

    role: Role
    count: PositiveInt
    gpus: PositiveInt = 1  # of the worker
    parts: dict[str, NonNegativeInt]  # what the phases consist of, in bytes
    phases: PhaseBytes


@dataclass(frozen=True)
class ModelMemory:
    """What the memory of a run's workers is computed from."""

    policy: WeightBytes  # the weights of a policy rank, adapters included
    reference: WeightBytes | None  # those of a reference rank; None without reference workers
    reward: RewardBytes | None  # those of a reward worker; None without one
    whole: int  # all weights of an engine, in float32: with adapters merged, or with room for them as such
    activations: Activations  # of a micro-batch with the most tokens
    micro_tokens: int  # its tokens
    token_bytes: int  # float32 KV-cache bytes of a token
    engine_itemsize: int  # bytes of a number in the engine's weights and KV cache
    vocab_size: int  # entries
    warnings: tuple[str, ...]  # what could not be counted
    # The same of the teacher that takes most, whose weights stand for a policy rank's; None without one.
    teacher: "ModelMemory | None" = None

    @classmethod
    def of(
        cls, config: RunConfig, footprint: Footprint, *, on_gpus: bool, reward: RewardBytes | None = None
    ) -> "ModelMemory":
        """Measure a config's model on the meta device.

        Args:
            config: The run.
            footprint: Its step.
            on_gpus: Whether it computes on GPUs, which decides the compute dtype unless the config does.
            reward: What a reward worker takes, if it was measured before.

        Raises:
            UserError: The model's config is not that of a causal language model, or its adapter can't be made.
        """
        base = build_meta_model(config.model)
        whole = WeightBytes.of(base, 1).whole
        reference, runtime = None, config.runtime
        device: Device = "cuda" if on_gpus else "cpu"
        half = config.model.dtype_on(device) == "bfloat16"
        if config.needs_reference_worker:
            reference = WeightBytes.of(base, runtime.num_reference_ranks, bfloat16=half)
        if (lora := config.model.lora) is not None:
            add_adapter(base, lora)
        if lora is not None and config.model.publishes_adapters:
            adapters = sum(FLOAT_BYTES * weight.numel() for name, weight in base.named_parameters() if is_adapter(name))
            is_vllm = isinstance(config.rollout, VllmRollout)
            whole += adapters * (allocated_rank(lora.rank) if is_vllm else lora.rank) // lora.rank
        tokens = footprint.micro_tokens
        if half:
            base.bfloat16()
        longest = min(config.max_row_tokens, max_positions(config.model), tokens)
        activations, warnings = _activations(config, base, tokens, longest)
        if config.model.gradient_checkpointing:
            enable_gradient_checkpointing(base)  # raises if the model's layers can't be checkpointed
        reward = reward or RewardBytes.of(config, on_gpus=on_gpus)
        num_shards = runtime.num_policy_ranks // runtime.num_policy_replicas
        weights = WeightBytes.of(base, num_shards, bfloat16=half, muon=config.optim.kind == "muon")
        if weights.padding > MAX_PADDING:
            warnings = (
                *warnings,
                f"{num_shards} ranks that share the weights gather {weights.padding:.1f} times their bytes, as some "
                "have fewer rows, such as experts; raise runtime.num_policy_replicas",
            )
        policy = cls(
            policy=weights,
            reference=reference,
            reward=reward,
            whole=whole,
            activations=activations,
            micro_tokens=tokens,
            token_bytes=cache_bytes_per_token(base.config, torch.float32),
            engine_itemsize=HALF_BYTES if config.rollout.dtype_on(device) == "bfloat16" else FLOAT_BYTES,
            vocab_size=base.config.get_text_config().vocab_size,
            warnings=(*warnings, *(reward.warnings if reward else ())),
        )
        teachers = list(_teachers(config, footprint, policy, device))
        largest = max(teachers, key=lambda each: each.policy.held + each.activations.widest, default=None)
        missed = (warning for each in teachers for warning in each.warnings)
        return replace(policy, teacher=largest, warnings=(*policy.warnings, *missed))


def _teachers(config: RunConfig, footprint: Footprint, policy: ModelMemory, device: Device) -> Iterator[ModelMemory]:
    """Yield what the memory of a rank of each teacher with its own weights is computed from."""
    response = config.rollout.max_response_tokens
    for teacher in config.distillation.teachers.values() if config.distillation else ():
        if teacher.model is None:
            continue
        base, half = build_meta_model(teacher.model), teacher.model.dtype_on(device) == "bfloat16"
        weights = WeightBytes.of(base, teacher.num_ranks, bfloat16=half)
        if half:
            base.bfloat16()
        own = teacher.prompt is not None
        tokens = config.packing.token_budget if own else footprint.micro_tokens
        longest = (teacher.max_prompt_tokens if own else config.data.max_prompt_tokens) + response
        longest = min(longest, max_positions(teacher.model), tokens)
        activations, warnings = _activations(config, base, tokens, longest)
        vocab_size = base.config.get_text_config().vocab_size
        yield replace(
            policy,
            policy=weights,
            activations=activations,
            micro_tokens=tokens,
            vocab_size=vocab_size,
            warnings=tuple(f"of a teacher, {warning}" for warning in warnings),
        )


def _activations(
    config: RunConfig, model: PreTrainedModel, tokens: int, longest: int
) -> tuple[Activations, tuple[str, ...]]:
    kind = config.packing.kind
    key = (model.config.to_json_string(), config.model.lora, model.dtype, tokens, longest, kind)
    if key not in _TRACED:
        try:
            _TRACED[key] = trace_activations(model, tokens, longest=longest, kind=kind), ()
        except ModelError as error:
            _TRACED[key] = Activations((), 0, 0, 0), (f"activations are not counted: {error}",)
    return _TRACED[key]


def worker_memory(
    config: RunConfig, footprint: Footprint, model: ModelMemory, cluster: Cluster, placement: Placement
) -> tuple[WorkerMemory, ...]:
    """Return the memory of one worker of each role that the run has."""
    workers = [_policy(config, footprint, model, placement)]
    if model.reference is not None:
        workers.append(_frozen("reference", config, model, model.reference, placement))
    if model.teacher is not None:
        workers.append(_frozen("teacher", config, model.teacher, model.teacher.policy, placement))
    if model.reward is not None:
        workers.append(_reward(config, model.reward, placement))
    if config.sft is None:
        workers.append(_rollout(config, footprint, model, cluster, placement))
    return tuple(workers)


def weight_carrier(config: RunConfig, placement: Placement) -> Literal["nccl", "gloo", "shared_memory"]:
    """Return what carries weights to the rollout workers; see `infra.weights.sync`."""
    setting = config.weights.transport
    own_gpus = placement.on_gpus and not placement.is_colocated
    one_node = len({placement.nodes["policy"][0], *placement.nodes["rollout"]}) == 1
    if setting == "shared_memory" or (setting == "auto" and one_node and not own_gpus):
        return "shared_memory"
    return "nccl" if own_gpus else "gloo"


def engine_weight_bytes(model: ModelMemory) -> int:
    """Return the bytes of an engine's weights, all of which it is sent if it has no version."""
    return model.whole * model.engine_itemsize // FLOAT_BYTES


def bucket_bytes(config: RunConfig, model: ModelMemory) -> int:
    """Return the bytes of the largest bucket of weights: a tensor larger than the setting is one of its own."""
    largest = model.policy.largest * model.engine_itemsize // FLOAT_BYTES
    return max(largest, min(config.weights.bucket_bytes, engine_weight_bytes(model)))


def _head(config: RunConfig, model: ModelMemory, placement: Placement, *, is_update: bool) -> HeadSizes:
    return HeadSizes(
        chunk_tokens=min(config.packing.logits_chunk_tokens, model.micro_tokens),
        vocab_size=model.vocab_size,
        has_entropy=is_update,
        has_entropy_grad=is_update and bool(config.loss.entropy_coef),
        bfloat16=model.policy.bfloat16,
        on_cpu=not placement.on_gpus,
        has_mask=config.rollout.sampling_mask,
    )


def _policy(config: RunConfig, footprint: Footprint, model: ModelMemory, placement: Placement) -> WorkerMemory:
    weights, head = model.policy, _head(config, model, placement, is_update=True)
    previous = weights.trained if config.runtime.max_staleness else 0
    on_host = weights.optimizer if config.optim.offload and placement.on_gpus else 0
    idle = weights.held + weights.optimizer - on_host + previous
    checkpointing, num_micros = config.model.gradient_checkpointing, footprint.num_micros
    syncs_last = config.runtime.gradient_sync == "last_micro_batch"
    update = update_bytes(
        weights,
        model.activations,
        head,
        num_micros=num_micros,
        checkpointing=checkpointing,
        syncs_last=syncs_last,
    )
    scoring = scoring_bytes(weights, model.activations, _head(config, model, placement, is_update=False))
    sent = weights.largest if weights.is_sharded else 0
    sent += 0 if config.sft else _buckets_on_device(config, model, placement)
    layers = model.activations
    saved = len(layers.layers) * layers.layer_input if checkpointing else sum(layers.layers)
    return WorkerMemory(
        role="policy",
        count=config.runtime.num_policy_ranks,
        parts={
            "weights": weights.held,
            "gradients": weights.gradients(num_micros, syncs_last=syncs_last) or weights.trained,
            "optimizer": weights.optimizer - on_host,
            **({"previous weights": previous} if previous else {}),
            **({"gathered layers": weights.gathered} if weights.gathered else {}),
            "activations": layers.other + saved,
            "logits chunk": head.forward(weights),
        },
        phases=PhaseBytes(
            load=weights.held,
            rollout=0 if placement.time_shares_gpus else idle,
            scoring=(weights.held if placement.time_shares_gpus else idle) + scoring,
            update=idle + update,
            publish=(weights.held if placement.time_shares_gpus else idle) + sent,
        ),
    )


def _frozen(
    role: Role, config: RunConfig, model: ModelMemory, weights: WeightBytes, placement: Placement
) -> WorkerMemory:
    head = _head(config, model, placement, is_update=False)
    forward = scoring_bytes(weights, model.activations, head)
    held = weights.computed(weights.held)  # frozen weights are kept in the compute dtype
    parts = {"weights": held, "logits chunk": head.forward(weights)}
    if weights.gathered:
        parts["gathered layers"] = weights.gathered
    phases = PhaseBytes(load=held, rollout=held, scoring=held + forward, update=held, publish=held)
    if placement.time_shares_gpus:
        phases = phases.replace(rollout=0, update=0, publish=0)
    return WorkerMemory(role=role, count=num_workers(config)[role], parts=parts, phases=phases)


def _reward(config: RunConfig, reward: RewardBytes, placement: Placement) -> WorkerMemory:
    held, forward, count = reward.weights, reward.forward, num_workers(config)["reward"]
    phases = PhaseBytes(load=held, rollout=held + forward, scoring=held, update=held, publish=held)
    if placement.time_shares_gpus:
        phases = phases.replace(scoring=0, update=0)
    return WorkerMemory(role="reward", count=count, parts={"weights": held, "forward": forward}, phases=phases)


def _rollout(
    config: RunConfig, footprint: Footprint, model: ModelMemory, cluster: Cluster, placement: Placement
) -> WorkerMemory:
    if is_program := isinstance(config.rollout, ProcessRollout):
        parts = _vllm_parts(config, config.rollout, model, cluster, placement)
    else:
        parts = _embedded_parts(config, footprint, model)
    weights, total = parts["weights"], sum(parts.values())
    # A program reserves its memory for good, unless it sleeps between rollouts; the other engine allocates as needed.
    busy = total if is_program and not placement.time_shares_gpus else weights
    idle = 0 if placement.time_shares_gpus else busy
    received = _buckets_on_device(config, model, placement)
    phases = PhaseBytes(
        load=total if is_program else weights, rollout=total, scoring=idle, update=idle, publish=busy + received
    )
    if is_program and placement.is_colocated:  # the engine's process stays, though its memory is given up
        parts = {**parts, CUDA_CONTEXT: CONTEXT_BYTES}
        phases += PhaseBytes(**dict.fromkeys(PHASES, CONTEXT_BYTES))
    gpus = config.rollout.gpus_per_worker if placement.on_gpus else 1
    return WorkerMemory(role="rollout", count=config.rollout.num_workers, gpus=gpus, parts=parts, phases=phases)


def _buckets_on_device(config: RunConfig, model: ModelMemory, placement: Placement) -> int:
    """Return the two buckets that each side of a broadcast holds, where the workers' tensors are."""
    carrier = weight_carrier(config, placement)
    on_device = carrier == "nccl" or (carrier == "gloo" and not placement.on_gpus)
    return 2 * bucket_bytes(config, model) if on_device else 0


def _vllm_parts(
    config: RunConfig, rollout: ProcessRollout, model: ModelMemory, cluster: Cluster, placement: Placement
) -> dict[str, int]:
    """Return what each GPU of an engine holds, a shard of weights and cache; on a CPU, what all ranks hold."""
    whole = engine_weight_bytes(model)
    if not placement.on_gpus:
        return {"weights": whole, KV_CACHE: rollout.cache_bytes}
    weights, fraction = whole // rollout.tensor_parallel, rollout.gpu_fraction(is_colocated=placement.is_colocated)
    reserved = round(fraction * cluster.gpu_bytes)
    if reserved > weights:
        return {"weights": weights, KV_CACHE: reserved - weights}
    lowest = (100 * weights // cluster.gpu_bytes + 1) / 100
    sizes = [size for size in tensor_parallel_sizes(config.model) if whole // size < reserved]
    advice = [f"rollout.gpu_memory_utilization={lowest:g}"] if lowest < 1 else []
    advice += [f"rollout.tensor_parallel={size}" for size in sizes[:1] if not placement.is_colocated]
    raise ConfigError(
        f"rollout.gpu_memory_utilization = {fraction:g} gives vLLM {format_bytes(reserved)} of a GPU, but weights in "
        f"{rollout.dtype_on('cuda')} take {format_bytes(weights)} of each; use at least "
        f"{', or '.join([*advice, 'GPUs with more memory'])}"
    )


def _embedded_parts(config: RunConfig, footprint: Footprint, model: ModelMemory) -> dict[str, int]:
    rollout, group = config.rollout, config.rollout.samples_per_prompt
    assert not isinstance(rollout, ProcessRollout)
    num_rows = min(rollout.prompts_per_batch, rollout.num_prompts) * group
    row_tokens = footprint.longest_prompt + rollout.max_response_tokens
    cache = cache_bytes(num_rows, row_tokens, model.token_bytes, rollout.max_cache_bytes, group)
    batch = cache // (row_tokens * model.token_bytes)
    per_token = FORWARD_BUFFERS * (model.activations.widest + model.activations.layer_input) // model.micro_tokens
    return {
        "weights": model.whole,
        KV_CACHE: cache,
        "prefill": batch // group * footprint.longest_prompt * per_token,
        "sampling": batch * model.vocab_size * SAMPLING_BYTES,
    }
