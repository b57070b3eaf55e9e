"""The rows of a run's newest readable step that are worth reading, token by token."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from infra.history.row_tokens import tree_of, turn_slices, turns_of
from infra.storage.runs import RunDirectory
from infra.stores.offline import RunColumns, open_run_columns
from rl_core.columns.jagged import BRANCH_COLUMNS, TURN_COLUMNS
from rl_core.views import decode_ints, select
from schemas.batch import BatchHandle
from schemas.config.model import ModelConfig
from schemas.errors import RunError, StoreError

MAX_TOKENS = 400  # of a response
MAX_PROMPT = 2000  # characters
GAP_LEVELS = (0.01, 0.05, 0.2, 1.0)  # nats from which a token has shade 1, 2, 3 and 4

SCALARS = ("reward", "advantages")
_NEWEST = 3  # steps that are looked at: the last ones may be without advantages yet
TEXTS = ("prompt_text", "response_text", "answer", "finish_reason", "group_id")
TOKENS = ("response_ids", "sampler_logprobs", "loss_mask")
TURNS = ("turn_rewards", "episode_end")  # if an environment answers the model's turns
OF_TREES = dict.fromkeys((*BRANCH_COLUMNS, *TURN_COLUMNS, *TURNS))  # the same
TRAINER = "behavior_logprobs"  # kept if the trainer computes them before the update


@dataclass(frozen=True)
class Token:
    """One token of a response."""

    text: str
    level: int  # shade of the log-prob gap, with its sign; 0: none
    hint: str
    is_sampled: bool = True  # by the model; else it is its environment's


@dataclass(frozen=True)
class SampleView:
    """One row: the reason it is shown, its figures, its prompt, and its response by token."""

    title: str
    facts: str
    prompt: str
    tokens: Sequence[Token]
    rest: str  # in place of the tokens that are left out
    command: str  # that shows all values of all its tokens
    response: str = ""  # the whole text, if the tokens are shown as ids
    tree: str = ""  # of its turns, if an environment answers them


@dataclass(frozen=True)
class StepSamples:
    """The rows shown of one step; or the reason that there are none."""

    step: int | None
    samples: Sequence[SampleView] = ()
    reason: str = ""


def read_samples(directory: RunDirectory) -> StepSamples:
    """Read the best, the worst and the largest-advantage row of the newest step that has advantages."""
    try:
        if directory.config().sft is not None:
            return StepSamples(None, reason="supervised fine-tuning has no rewards; sluice inspect shows its rows")
        store = open_run_columns(directory)
        batch = _newest_batch(store)
        if batch is None:
            return StepSamples(None, reason="no step with advantages is kept on disk (store.keep_steps)")
        return StepSamples(batch.step, _views(store, batch, directory))
    except (RunError, StoreError) as error:
        return StepSamples(None, reason=f"the rows can't be read: {error}")


def _newest_batch(store: RunColumns) -> BatchHandle | None:
    wanted = {*SCALARS, *TEXTS, *TOKENS}
    batches = map(store.load_batch, store.steps()[: -1 - _NEWEST : -1])
    return next((batch for batch in batches if batch is not None and wanted <= set(batch.columns)), None)


def _views(store: RunColumns, batch: BatchHandle, directory: RunDirectory) -> list[SampleView]:
    scalars = store.read(batch, SCALARS)
    rewards, advantages = (scalars[name].to_numpy(zero_copy_only=False) for name in SCALARS)
    chosen = {
        "best reward": int(rewards.argmax()),
        "worst reward": int(rewards.argmin()),
        "largest advantage": int(np.abs(advantages).argmax()),
    }
    rows = list(dict.fromkeys(chosen.values()))
    titles = {row: ", ".join(title for title, its_row in chosen.items() if its_row == row) for row in rows}
    others = [name for name in (*OF_TREES, TRAINER) if name in batch.columns]
    chosen_rows = select(batch, rows)
    columns = store.read(chosen_rows, (*SCALARS, *TEXTS, *TOKENS, *others))
    prompts = decode_ints(chosen_rows.prompt_lengths).tolist()
    tokenizer = _tokenizer(directory.config().model)
    command = f"sluice view {shlex.quote(directory.argument)} --step {batch.step} --row"
    return [
        _view(f"{titles[row]}: row {row}", f"{command} {row}", columns, at, prompts[at], tokenizer)
        for at, row in enumerate(rows)
    ]


def _view(
    title: str, command: str, columns: pa.RecordBatch, at: int, num_prompt: int, tokenizer: Tokenizer | None
) -> SampleView:
    values = {name: columns[name][at].as_py() for name in columns.schema.names}
    ids, sampler, trained = (np.array(values[name]) for name in TOKENS)
    trainer = np.array(values[TRAINER]) if TRAINER in values else None
    facts = [
        f"reward {values['reward']:.4g}, advantage {values['advantages']:.4g}, group {values['group_id']}",
        f"{len(ids)} tokens, {values['finish_reason']}, expected answer {values['answer']!r}",
        *_turns(values),
    ]
    if trainer is not None and len(ids):
        gaps = (trainer - sampler)[trained]
        facts.append(f"trainer minus engine log-prob: mean {gaps.mean():.3g}, largest {np.abs(gaps).max():.3g} nat")
    by_trainer = repeat(None) if trainer is None else trainer.tolist()
    shown = zip(ids[:MAX_TOKENS].tolist(), trained.tolist(), sampler.tolist(), by_trainer, strict=False)
    left_out = len(ids) - MAX_TOKENS
    return SampleView(
        title=title,
        facts="; ".join(facts),
        prompt=_shorten(values["prompt_text"]),
        tokens=[_token(tokenizer, *each) for each in shown],
        rest=f" … {left_out:,} more tokens" if left_out > 0 else "",
        command=command,
        response="" if tokenizer else _shorten(values["response_text"]),
        tree=_tree(columns, at, num_prompt, tokenizer),
    )


def _turns(values: Mapping[str, Any]) -> list[str]:
    """Say how many turns a row has and why it ended, if its environment answers them."""
    if TURNS[0] not in values:
        return []
    return [f"{len(values[TURNS[0]])} turns, ended: {values[TURNS[1]]}"]


def _tree(columns: pa.RecordBatch, at: int, num_prompt: int, tokenizer: Tokenizer | None) -> str:
    """Return a row's turns as a tree, if its environment answers them."""
    named = {name: columns[name] for name in columns.schema.names}
    if not (turns := turns_of(named, at)):
        return ""
    ids = columns["response_ids"][at].as_py()
    parts = [ids[part] for part in turn_slices(turns)]
    texts = tokenizer.decode_batch(parts, skip_special_tokens=False) if tokenizer else [""] * len(parts)
    return tree_of(turns, texts, num_prompt, is_trained=columns["reward"][at].is_valid)


def _token(
    tokenizer: Tokenizer | None, token_id: int, is_sampled: bool, sampler: float, trainer: float | None
) -> Token:
    text = f"{token_id} " if tokenizer is None else tokenizer.decode([token_id], skip_special_tokens=False)
    if not is_sampled:
        return Token(text, 0, f"token {token_id}: of the environment, not trained on", is_sampled=False)
    if trainer is None:
        return Token(text, 0, f"token {token_id}: engine {sampler:.4f} nat")
    gap = trainer - sampler
    level = int(np.searchsorted(GAP_LEVELS, abs(gap), side="right"))
    hint = f"token {token_id}: engine {sampler:.4f}, trainer {trainer:.4f}, difference {gap:+.4f} nat"
    return Token(text, level if gap > 0 else -level, hint)


def _tokenizer(model: ModelConfig) -> Tokenizer | None:
    """Return the model's tokenizer if it is in the model's folder; else tokens are shown as ids."""
    file = Path(model.path) / "tokenizer.json"
    return Tokenizer.from_file(str(file)) if file.is_file() else None


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_PROMPT else f"… {text[-MAX_PROMPT:]}"
