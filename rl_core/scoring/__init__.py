"""Packed scoring: `packed_scores` computes exact log-probs of jagged rows without padding or stored logits."""

from rl_core.scoring.attention import PACKED_ATTENTION, register, use_packed_attention, use_padded_attention
from rl_core.scoring.logprobs import TokenScores, packed_scores, padded_scores
from rl_core.scoring.packing import Branch, PackedRow, pack_row
from rl_core.scoring.probe import leak_probe, padded_probe
from rl_core.scoring.routing import RouterReplay
from rl_core.scoring.structure import Structure, check_structure

__all__ = [
    "PACKED_ATTENTION",
    "Branch",
    "PackedRow",
    "RouterReplay",
    "Structure",
    "TokenScores",
    "check_structure",
    "leak_probe",
    "pack_row",
    "packed_scores",
    "padded_probe",
    "padded_scores",
    "register",
    "use_packed_attention",
    "use_padded_attention",
]
