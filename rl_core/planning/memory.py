"""The memory of a worker's device in each phase of a step, computed from sizes alone.

R ranks, V vocabulary entries, H hidden size, C tokens of a logits chunk. Weights, gradients and the optimizer's moments
are float32, as the trainer keeps them. Figures are of live tensors: allocators, kernels and CUDA itself take more.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from pydantic import NonNegativeInt
from transformers import PreTrainedModel

from rl_core.planning.activations import Activations
from rl_core.training.muon import matrices_of
from rl_core.training.sharding import layer_modules
from schemas.base import Frozen

Phase = Literal["load", "rollout", "scoring", "update", "publish"]
PHASES: tuple[Phase, ...] = get_args(Phase)

FLOAT_BYTES, HALF_BYTES = 4, 2
ADAM_MOMENTS = 2
MUON_BUFFERS = 6  # a gathered matrix, what is sent for it, and what its orthogonalization has at once
BACKWARD_BUFFERS = 3  # a gated MLP's backward holds gradients of its product and of both factors at once
FORWARD_BUFFERS = 3  # its forward holds the two factors and their product
GATHERED_LAYERS = 2  # FSDP gathers the next layer while one computes
SAMPLING_BYTES = 24  # per logit: twice float32 logits, ratios, float64 cumulative sums, and the model's own logits


class PhaseBytes(Frozen):
    """The peak bytes of each phase; in a phase of other workers, those that are held throughout."""

    load: NonNegativeInt
    rollout: NonNegativeInt
    scoring: NonNegativeInt
    update: NonNegativeInt
    publish: NonNegativeInt

    def __add__(self, other: "PhaseBytes") -> "PhaseBytes":
        return PhaseBytes(**{phase: getattr(self, phase) + getattr(other, phase) for phase in PHASES})

    def loading_after(self, first: "PhaseBytes") -> "PhaseBytes":
        """Return the sum with workers that gave their memory up before these began to load."""
        return (self + first).replace(load=max(self.load, first.load))

    def scaled(self, count: int) -> "PhaseBytes":
        """Return the bytes of `count` such workers."""
        return PhaseBytes(**{phase: count * getattr(self, phase) for phase in PHASES})

    @property
    def peak_phase(self) -> Phase:
        """The phase with the most bytes, the first of several."""
        return max(PHASES, key=lambda phase: int(getattr(self, phase)))

    @property
    def peak(self) -> int:
        """The most bytes of all phases."""
        return int(getattr(self, self.peak_phase))


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of float32 weights, of which the fullest of R ranks holds a shard of each along its first dimension."""

    whole: int  # all weights, not sharded
    held: int  # the rank's shards
    trained: int  # the part of `held` that trains
    trained_whole: int  # all weights that train, not sharded
    root: int  # all weights outside the decoder layers, gathered: of each, R shards of the fullest rank's size
    layer: int  # the largest decoder layer, gathered
    head: int  # the LM head's weight [V, H], not sharded
    is_head_trained: bool  # whether it has a gradient
    largest: int  # the largest weight, not sharded
    optimizer: int  # the rank's moments: AdamW's two, Muon's one
    orthogonalized: int  # the largest matrix that Muon has whole on a rank; 0 without Muon
    num_ranks: int  # R
    bfloat16: bool  # whether forward and backward compute in bfloat16, with copies of the weights in it

    @classmethod
    def of(cls, model: PreTrainedModel, num_ranks: int, *, bfloat16: bool = False, muon: bool = False) -> "WeightBytes":
        """Return the bytes of a model, which may be on the meta device; with AdamW, or Muon for its matrices."""
        parts = list(model.parameters())
        sizes = [FLOAT_BYTES * part.numel() for part in parts]
        shards = [FLOAT_BYTES * -(-part.shape[0] // num_ranks) * math.prod(part.shape[1:]) for part in parts]
        trained = sum(size for size, part in zip(shards, parts, strict=True) if part.requires_grad)
        matrices = matrices_of(model) if muon else []
        of_shards = dict(zip(map(id, parts), shards, strict=True))
        by_muon = [of_shards[id(matrix)] for matrix in matrices]
        gathered = [FLOAT_BYTES * matrix.numel() for matrix in matrices if matrix.ndim == 2]
        layers = [num_ranks * sum(of_shards[id(part)] for part in layer.parameters()) for layer in layer_modules(model)]
        head = model.get_output_embeddings().weight  # type: ignore[no-untyped-call]
        return cls(
            whole=sum(sizes),
            held=sum(shards),
            trained=trained,
            trained_whole=sum(size for size, part in zip(sizes, parts, strict=True) if part.requires_grad),
            root=num_ranks * sum(shards) - sum(layers),
            layer=max(layers, default=0),
            head=FLOAT_BYTES * head.numel(),
            is_head_trained=head.requires_grad,
            largest=max(sizes),
            optimizer=ADAM_MOMENTS * trained - sum(by_muon),
            orthogonalized=max((*by_muon, *gathered), default=0),
            num_ranks=num_ranks,
            bfloat16=bfloat16,
        )

    @property
    def gathered(self) -> int:
        """What a forward gathers: the root's weights, and two layers', in the compute dtype."""
        return self.computed(self.root + GATHERED_LAYERS * self.layer) if self.is_sharded else 0

    @property
    def padding(self) -> float:
        """How many times their bytes the gathered weights take, as some have fewer rows than there are ranks."""
        return self.held * self.num_ranks / self.whole

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP gathers weights: for several ranks, or to have them in bfloat16."""
        return self.num_ranks > 1 or self.bfloat16

    def gradients(self, num_micros: int, *, syncs_last: bool) -> int:
        """Return the gradients of an update's earlier micro-batches, whole if ranks sum them after the last only."""
        if num_micros == 1:
            return 0
        return self.trained_whole if syncs_last and self.is_sharded else self.trained

    @property
    def step_buffers(self) -> int:
        """What the optimizer needs for the largest weight while it steps."""
        return max(ADAM_MOMENTS * self.largest // self.num_ranks, MUON_BUFFERS * self.orthogonalized)

    def computed(self, num_bytes: int) -> int:
        """Return what float32 weights of so many bytes take in the compute dtype."""
        return num_bytes * HALF_BYTES // FLOAT_BYTES if self.bfloat16 else num_bytes


@dataclass(frozen=True)
class HeadSizes:
    """The scoring head of a micro-batch."""

    chunk_tokens: int  # C, at most the tokens of the micro-batch
    vocab_size: int  # V
    has_entropy: bool  # whether entropies are computed: always in an update, never in a scoring pass
    has_entropy_grad: bool = False  # whether they are trained on
    bfloat16: bool = False  # whether operands are bfloat16; a CPU widens them again
    on_cpu: bool = False  # whether it runs on a CPU
    has_mask: bool = False  # whether it scores over the tokens that could be sampled

    @property
    def logits(self) -> int:
        """Float32 logits of a chunk."""
        return FLOAT_BYTES * self.chunk_tokens * self.vocab_size

    @property
    def mask(self) -> int:
        """Which of a chunk's logits count, a byte each."""
        return self.chunk_tokens * self.vocab_size if self.has_mask else 0

    def forward(self, weights: WeightBytes) -> int:
        """Return the bytes of a forward: the logits, their exponentials if an entropy needs both, operands."""
        return self.logits * (2 if self.has_entropy else 1) + self.mask + self._operand(weights)

    def backward(self, weights: WeightBytes) -> int:
        """Return the bytes of a backward: a chunk's logits, the weight's gradient, operands."""
        chunk = self.logits * (2 if self.has_entropy_grad else 1) + self.mask
        if self.bfloat16:
            chunk += self.logits // 2
        gradient = weights.head if weights.is_head_trained else 0
        summed = gradient if self.bfloat16 and not self.on_cpu else 0  # a chunk's part of it, added to the sum
        return chunk + gradient + summed + self._operand(weights)

    def _operand(self, weights: WeightBytes) -> int:
        if not self.bfloat16:
            return 0
        return weights.head if self.on_cpu else 0  # a CPU has no kernel that sums bfloat16 products in float32


def scoring_bytes(weights: WeightBytes, activations: Activations, head: HeadSizes) -> int:
    """Return the bytes of a forward without gradients, beyond what the worker holds throughout.

    Args:
        weights: The model's.
        activations: Of a micro-batch at the token budget, as `trace_activations` counts them.
        head: Of the same micro-batch.
    """
    layers = FORWARD_BUFFERS * activations.widest + FORWARD_BUFFERS * activations.layer_input
    return weights.gathered + max(layers, activations.layer_input + head.forward(weights))


def update_bytes(
    weights: WeightBytes,
    activations: Activations,
    head: HeadSizes,
    *,
    num_micros: int,
    checkpointing: bool,
    syncs_last: bool = True,
) -> int:
    """Return the bytes of an update beyond weights and optimizer: gradients, activations and working memory.

    Args:
        weights: The model's.
        activations: Of a micro-batch at the token budget, without gradient checkpointing.
        head: Of the same micro-batch.
        num_micros: Micro-batches of the update; from the second on, all gradients exist in each forward.
        checkpointing: Whether layers save only their input, and are computed again in the backward.
        syncs_last: Whether ranks sum gradients after the last micro-batch only; before, they are whole on each rank.
    """
    layers, largest = sum(activations.layers), max(activations.layers, default=0)
    saved = activations.other + (len(activations.layers) * activations.layer_input if checkpointing else layers)
    buffers = BACKWARD_BUFFERS * activations.widest
    before = weights.gradients(num_micros, syncs_last=syncs_last)
    # FSDP: full gradients of the layers in flight and of the root, then the buffer that is reduced.
    in_flight = weights.gathered + weights.layer if weights.is_sharded else 0
    head_gradient = weights.head if weights.is_head_trained else 0
    return weights.gathered + max(
        before + saved + head.forward(weights),
        before + saved + head.backward(weights) + activations.layer_input,
        before + saved + (largest if checkpointing else 0) + buffers + head_gradient + in_flight,
        # The first layers come last: all gradients exist, and the embeddings' is added to the head's.
        max(before, weights.trained) + largest + buffers + head_gradient + in_flight,
        weights.trained + weights.step_buffers,
    )


def cache_bytes(num_rows: int, row_tokens: int, token_bytes: int, limit: int, group_rows: int) -> int:
    """Return the embedded engine's KV cache: rows at their longest, in batches of whole groups under the limit.

    Args:
        num_rows: Rows that are dispatched together.
        row_tokens: Tokens of the longest prompt and response.
        token_bytes: Cache bytes of a token.
        limit: `rollout.max_cache_bytes`; one group may exceed it.
        group_rows: Rows of a group, whose prompt is one request.
    """
    row_bytes = row_tokens * token_bytes
    fitting = max(group_rows, limit // row_bytes // group_rows * group_rows)
    return min(num_rows, fitting) * row_bytes
