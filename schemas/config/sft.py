"""Supervised fine-tuning: the settings of its rows, and the keys of a run that it doesn't use."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, PositiveInt

from schemas.base import FrozenConfig
from schemas.config.data import DataConfig
from schemas.config.loss import CrossEntropyLoss
from schemas.config.reward import ExactReward

if TYPE_CHECKING:
    from schemas.config.run import RunConfig

_SECTIONS = (
    *("reward", "environment", "rollout", "overlong", "advantage"),
    *("kl", "distillation", "correction", "weights"),
)
_KEYS = {
    "data": ("max_prompt_tokens", "curriculum", "reuse"),
    "loss": ("behavior",),
    "runtime": ("placement", "max_staleness", "num_reference_ranks"),
}
_OF_EVAL = ("every_steps", "num_prompts")  # the others are for samples


class SftConfig(FrozenConfig):
    """Supervised fine-tuning: steps take their rows from the data set, and there is no rollout."""

    num_rows: PositiveInt = 64
    """Rows per step."""

    max_tokens: PositiveInt = 4096
    """Longest row in tokens, chat template included; `data.overlong` says what happens to longer ones."""

    loss_on: Literal["assistant", "last_turn", "all"] = "assistant"
    """Tokens with loss: of all turns of the assistant, or a completion; of the last one alone; or every token."""

    tools: tuple[dict[str, Any], ...] = ()
    """JSON schemas of the tools of chats that have no column `tools` of their own."""


def with_sft_defaults(given: Any) -> Any:
    """Return what a config is made of, with the loss of `[sft]`, and the reward that the schema asks for, if it has it.

    The reward is never computed.
    """
    if not isinstance(given, dict) or given.get("sft") is None:
        return given
    loss = given.get("loss") or {}
    if isinstance(loss, dict):
        loss = {"kind": CrossEntropyLoss.model_fields["kind"].default, **loss}
    return {"reward": {"kind": "exact"}, **given, "loss": loss}


def check_sft(config: "RunConfig") -> None:
    """Check that a config with `[sft]` sets nothing that supervised fine-tuning doesn't use.

    Raises:
        ValueError: It does, or the loss is for another method; the message names the keys.
    """
    is_cross_entropy = isinstance(config.loss, CrossEntropyLoss)
    if config.sft is None:
        if is_cross_entropy:
            raise ValueError(
                'loss.kind = "cross_entropy" trains on the rows of a data set; add a section [sft], or choose another '
                "loss.kind"
            )
        return
    if not is_cross_entropy:
        raise ValueError(
            f'[sft] trains with loss.kind = "cross_entropy", not "{config.loss.kind}"; leave loss.kind out, or remove '
            "[sft]"
        )
    if unused := list(_unused_keys(config)):
        raise ValueError(
            f"[sft], supervised fine-tuning, doesn't use {', '.join(unused)}; leave it out, or remove [sft]"
        )
    if config.loss.aggregation == "seq_mean_token_sum_norm" and config.loss.norm_tokens is None:
        raise ValueError('loss.aggregation = "seq_mean_token_sum_norm" needs loss.norm_tokens with [sft]; set it')


def _unused_keys(config: "RunConfig") -> Iterator[str]:
    """Yield the keys that supervised fine-tuning doesn't use, and that are not at their defaults."""
    for section in _SECTIONS:
        default = ExactReward() if section == "reward" else _default_of(config, section)
        yield from _changed(section, getattr(config, section), default)
    defaults: dict[str, BaseModel] = {
        "data": DataConfig(train_path="any"),
        "loss": CrossEntropyLoss(),
        "runtime": _default_of(config, "runtime"),
    }
    for section, names in _KEYS.items():
        for name in names:
            if getattr(getattr(config, section), name) != getattr(defaults[section], name):
                yield f"{section}.{name}"
    of_eval = _changed("eval", config.eval, _default_of(config, "eval"))
    yield from (key for key in of_eval if key.partition(".")[2] not in _OF_EVAL)


def _default_of(config: "RunConfig", section: str) -> Any:
    return type(config).model_fields[section].get_default(call_default_factory=True)


def _changed(section: str, value: BaseModel | None, default: BaseModel | None) -> Iterator[str]:
    """Yield the keys of a section that differ from the default's; its `kind` if that differs."""
    if value is None or default is None or type(value) is not type(default):
        if value != default:
            yield section
        return
    for name in type(value).model_fields:
        if getattr(value, name) != getattr(default, name):
            yield f"{section}.{name}"
