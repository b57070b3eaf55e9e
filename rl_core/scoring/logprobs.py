"""Log-probs of the response tokens of a packed row by a packed or a padded forward, without keeping logits.

T tokens, R response tokens, V vocabulary entries, C tokens per chunk, K most likely tokens. Only the R predicting
positions pass through the LM head, C at a time.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from rl_core.scoring.forward import decoder, packed_hidden_states, padded_hidden_states
from rl_core.scoring.head import HeadOptions, lm_head, score_targets
from rl_core.scoring.packing import PackedRow

EntropyMode = Literal[False, "no_grad", "grad"]


class TokenScores(NamedTuple):
    """Scores of R response tokens, in the order of the row's `targets`; nats, float32 (float64 for a float64 model).

    This is a named tuple because FSDP doesn't find tensors that need a gradient in other user-defined classes.
    """

    logprobs: Tensor  # [R], with gradient
    entropy: Tensor | None  # [R], of the predicting distributions; with gradient if requested
    top_logprobs: Tensor | None  # [R, K], in descending order or that of the row's `top_ids`, with gradient
    top_ids: Tensor | None  # [R, K] int64, the tokens of `top_logprobs`


def packed_scores(
    model: PreTrainedModel,
    row: PackedRow,
    *,
    temperature: float,
    chunk_tokens: int,
    entropy: EntropyMode = False,
    top_k: int = 0,
    num_tokens: int | None = None,
) -> TokenScores:
    """Score every response token under the model at a temperature; what wasn't requested is None.

    The decoder computes in the model's dtype; scores are float32 (see `rl_core.scoring.head`).

    Args:
        model: A causal language model that uses packed attention.
        row: The packed row, on the model's device. Without response tokens the result is empty but still has a graph,
            so that its backward takes part in collectives and gives zero gradients.
        temperature: Positive; divides the logits, as in the sampler.
        chunk_tokens: C, the number of tokens whose logits exist at once.
        entropy: Whether to compute the entropy of each predicting distribution, to report it or to train on it.
            "no_grad" adds one pass over the logits to the forward and nothing to the backward.
        top_k: K, the number of most likely tokens to return; 0 for none, or for those of the row, `row.top_ids`.
        num_tokens: The most likely tokens are sought among the first of these; None: among all.

    Raises:
        ScoringError: The model's attention or LM head isn't supported, or a sequence is longer than its positions.
        ValueError: `temperature`, `chunk_tokens` or `top_k` is out of range.
    """
    options = _head_options(model, temperature, chunk_tokens, entropy, top_k, num_tokens)
    states = packed_hidden_states(model, row).index_select(0, row.predict_index)
    return score_hidden_states(model, states, row.targets, options, row.top_ids, row.sampling_mask)


def padded_scores(
    model: PreTrainedModel,
    row: PackedRow,
    *,
    temperature: float,
    chunk_tokens: int,
    entropy: EntropyMode = False,
    top_k: int = 0,
    num_tokens: int | None = None,
) -> TokenScores:
    """Compute the result of `packed_scores` by a right-padded forward with a mask and the model's own attention.

    It is the oracle and the fallback for packed scoring, and computes S * max(len) positions for sum(len) tokens. The
    model must not use packed attention; the other arguments are as there.

    Raises:
        ScoringError: The model uses packed attention, its LM head isn't supported, or a sequence is longer than its
            positions.
        ValueError: `temperature`, `chunk_tokens` or `top_k` is out of range.
    """
    options = _head_options(model, temperature, chunk_tokens, entropy, top_k, num_tokens)
    states, index = padded_hidden_states(model, row)
    return score_hidden_states(
        model, states.index_select(0, index[row.predict_index]), row.targets, options, row.top_ids, row.sampling_mask
    )


@torch.no_grad()
def head_logprobs(model: PreTrainedModel, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the log-probs of a sequence by the scoring head and by the model's own LM head, both float32 [T - 1].

    Args:
        model: A causal language model with an attention of transformers.
        token_ids: int64 [T], T > 1, on its device.

    Raises:
        ScoringError: The LM head isn't supported.
    """
    states = decoder(model)(input_ids=token_ids[None], use_cache=False).last_hidden_state[0, :-1]
    own = model(input_ids=token_ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
    options = _head_options(model, 1.0, len(token_ids), entropy=False, top_k=0)
    ours = score_hidden_states(model, states, token_ids[1:], options).logprobs
    return ours, own.gather(-1, token_ids[1:, None])[:, 0]


def score_hidden_states(
    model: PreTrainedModel,
    states: Tensor,
    targets: Tensor,
    options: HeadOptions,
    top_ids: Tensor | None = None,
    sampling_mask: tuple[Tensor, Tensor] | None = None,
) -> TokenScores:
    """Score targets [R], and `top_ids` [R, K] if given, from the hidden states [R, hidden] that predict them.

    With a `sampling_mask`, numbers [R] and ids [M], scores are over these tokens alone.

    Raises:
        ScoringError: The model's LM head isn't supported.
    """
    logprobs, entropy, top_logprobs, found_ids = score_targets(
        states, lm_head(model), targets, options, top_ids, sampling_mask
    )
    has_top = options.top_k or top_ids is not None
    return TokenScores(
        logprobs=logprobs,
        entropy=entropy if options.has_entropy else None,
        top_logprobs=top_logprobs if has_top else None,
        top_ids=found_ids if has_top else None,
    )


def _head_options(
    model: PreTrainedModel,
    temperature: float,
    chunk_tokens: int,
    entropy: EntropyMode,
    top_k: int,
    num_tokens: int | None = None,
) -> HeadOptions:
    config = model.config.get_text_config()
    if not temperature > 0 or chunk_tokens < 1:
        raise ValueError(f"temperature {temperature} must be positive and chunk_tokens {chunk_tokens} at least 1")
    if not 0 <= top_k <= config.vocab_size:
        raise ValueError(f"top_k {top_k} must be from 0 to the vocabulary's {config.vocab_size} tokens")
    if entropy not in (False, "no_grad", "grad"):
        raise ValueError(f'entropy {entropy!r} must be False, "no_grad" or "grad"')
    return HeadOptions(
        temperature=temperature,
        scale=_logit_scale(config),
        softcap=_logit_softcap(config),
        chunk_tokens=chunk_tokens,
        top_k=top_k,
        has_entropy=bool(entropy),
        has_entropy_grad=entropy == "grad",
        num_tokens=num_tokens,
    )


def _logit_scale(config: PretrainedConfig) -> float:
    """Return the factor on the LM head's output: of Cohere and Falcon-H1, or one over Granite's `logits_scaling`."""
    names = "logit_scale", "lm_head_multiplier", "logits_scaling"
    factor, multiplier, divisor = (1.0 if (value := getattr(config, name, None)) is None else value for name in names)
    return float(factor) * float(multiplier) / float(divisor)


def _logit_softcap(config: PretrainedConfig) -> float | None:
    """Return the softcap of the logits: Gemma's, or RecurrentGemma's."""
    return getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
