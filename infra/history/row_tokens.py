"""Single rows of a kept step, token by token."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from infra.history.kept_run import KeptRun, TokenTexts
from infra.history.token_values import MASK, json_safe, token_values, value_columns, value_spec
from rl_core.columns.jagged import BRANCH_COLUMNS, branches_of, turns_followed
from rl_core.environments.calls import Call, parse_hermes, parse_json
from rl_core.views import decode_ints, select
from schemas.catalog import column_spec
from schemas.errors import RunError

MAX_TOKENS = 100_000  # of a row
MAX_TREE_TURNS = 200
MAX_NAME = 40  # characters of a tool's name in a tree


def read_row_tokens(
    kept: KeptRun, step: int, rows: Sequence[int], texts: TokenTexts | str, max_tokens: int = MAX_TOKENS
) -> list[dict[str, Any]]:
    """Return rows of a step with their tokens.

    Args:
        kept: The run's kept steps.
        step: The step.
        rows: Rows of the step's batch.
        texts: The texts of the run's tokens, or the reason that there are none.
        max_tokens: Tokens of each response that are returned, and of the end of each prompt.

    Returns:
        Of each row: `run_id`, `step`, `row`, and `num_rows` of the step; `columns` of single values; `turns`, each with
        its `tokens`, `environment_tokens`, `reward`, `advantage`, `after`, the number of the turn that it goes on from,
        and `branch`, where that is another token than the one before it, if the row has turns; `tree`, as a text;
        `prompt` and `response`, each with `num_tokens`, `ids` and `token_texts`, the tokens' texts; `values` of each
        token of the response, by name; `no_token_texts`: why the tokens have no texts, else null.

    Raises:
        RunError: The step is not kept, or has no such row.
        StoreError: Columns are lost or damaged.
    """
    batch = kept.batch(step)
    for row in rows:
        if not 0 <= row < batch.num_rows:
            raise RunError(f"step {step} of run {kept.run_id} has rows 0 to {batch.num_rows - 1}, but no row {row}")
    chosen = select(batch, rows)
    columns = kept.read(chosen, {name for name in batch.columns if not column_spec(name).is_vector})
    prompts, responses = (decode_ints(lengths) for lengths in (chosen.prompt_lengths, chosen.response_lengths))
    values = token_values({name: columns[name] for name in value_columns(columns)}, responses)
    bounds = np.concatenate([[0], np.cumsum(responses)])
    found = []
    for at, row in enumerate(rows):
        response = slice(int(bounds[at]), int(bounds[at]) + min(int(responses[at]), max_tokens))
        turns = turns_of(columns, at)
        found.append(
            {
                "run_id": kept.run_id,
                "step": step,
                "row": row,
                "num_rows": batch.num_rows,
                "columns": _single_values(columns, at),
                "turns": turns,
                "tree": _tree(columns, at, turns, int(prompts[at]), texts),
                "prompt": _part(columns, "prompt_ids", at, slice(max(0, int(prompts[at]) - max_tokens), None), texts),
                "response": _part(columns, "response_ids", at, slice(0, max_tokens), texts),
                "values": {name: json_safe(_rounded(each[response])) for name, each in values.items()},
                "no_token_texts": texts if isinstance(texts, str) else None,
            }
        )
    return found


def colorings(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return by which values the tokens of rows can be colored, with their range over the trained tokens.

    Returns:
        Of each: `name`, `title`, `unit`, `scale`, and `low` and `high`, null if there is no finite value.
    """
    names = dict.fromkeys(name for row in rows for name in row["values"])
    found = []
    for name in names:
        numbers = [
            float(value)
            for row in rows
            for value, trained in zip(row["values"].get(name, ()), _trained(row, name), strict=False)
            if trained and isinstance(value, int | float)
        ]
        low, high = (min(numbers), max(numbers)) if numbers else (None, None)
        found.append({**value_spec(name).model_dump(), "low": low, "high": high})
    return found


def _part(columns: dict[str, pa.Array], name: str, at: int, part: slice, texts: TokenTexts | str) -> dict[str, Any]:
    """Return a part of the tokens of one row's prompt or response."""
    ids = columns[name][at].values if name in columns else pa.array([], pa.int32())
    shown = ids[part]
    token_texts = None if isinstance(texts, str) else texts.of(shown).to_pylist()
    return {"num_tokens": len(ids), "ids": shown.to_pylist(), "token_texts": token_texts}


def _tree(
    columns: dict[str, pa.Array], at: int, turns: Sequence[dict[str, Any]], num_prompt: int, texts: TokenTexts | str
) -> str:
    if not turns:
        return ""
    ids = columns["response_ids"][at].values
    pieces = [] if isinstance(texts, str) else texts.of(ids).to_pylist()
    said = ["".join(pieces[part]) for part in turn_slices(turns)]
    return tree_of(turns, said, num_prompt, is_trained=columns["reward"][at].is_valid)


def _single_values(columns: dict[str, pa.Array], at: int) -> dict[str, Any]:
    names = [name for name in columns if column_spec(name).axis == "row"]
    return {name: json_safe(columns[name][at].as_py()) for name in names}


def turns_of(columns: dict[str, pa.Array], at: int) -> list[dict[str, Any]]:
    """Return the turns of one of several rows, see `read_row_tokens`; none if it has no columns of them."""
    names = {"turn_tokens": "tokens", "turn_bridge_tokens": "environment_tokens"}
    names |= {"turn_rewards": "reward", "turn_advantages": "advantage"}
    present = {short: columns[name][at].as_py() for name, short in names.items() if name in columns}
    if "tokens" not in present:
        return []
    turns = [json_safe(dict(zip(present, turn, strict=True))) for turn in zip(*present.values(), strict=True)]
    followed: Sequence[int] = range(len(turns))
    if BRANCH_COLUMNS[-1] in columns:
        followed = turns_followed(*(columns[name][at].as_py() for name in BRANCH_COLUMNS))
        found = branches_of(*(columns[name][at : at + 1] for name in BRANCH_COLUMNS))
        ends = np.cumsum([turn["tokens"] + turn["environment_tokens"] for turn in turns])
        for number, parent in zip(found.turn.tolist(), found.parent.tolist(), strict=True):
            turns[number]["branch"] = _branch(parent, ends, turns)
    for turn, number in zip(turns, followed, strict=True):
        turn["after"] = number
    return turns


def turn_slices(turns: Sequence[Mapping[str, Any]]) -> list[slice]:
    """Return where in its response the tokens of each turn are."""
    ends = np.cumsum([turn["tokens"] + turn["environment_tokens"] for turn in turns]).tolist()
    return [slice(start, start + turn["tokens"]) for start, turn in zip([0, *ends], turns, strict=False)]


def tree_of(
    turns: Sequence[Mapping[str, Any]],
    texts: Sequence[str],
    num_prompt: int,
    *,
    is_trained: bool | None,
    max_turns: int = MAX_TREE_TURNS,
) -> str:
    """Return the turns of a row as a tree, one in a line, each below the one that it goes on from.

    Those that go on from the same one are indented.

    Args:
        turns: At least one; see `turns_of`.
        texts: Their texts, in which calls of tools are found; empty where they aren't known.
        num_prompt: The tokens of the prompt.
        is_trained: Whether the row is trained on; else its reward has failed. None: that is not decided yet.
        max_turns: More are left out.

    Example:
        >>> sizes = {"tokens": 8, "environment_tokens": 5}
        >>> turns = [{**sizes, "after": 0}, {**sizes, "after": 1}, {**sizes, "after": 0, "branch": "branch at the end"}]
        >>> call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
        >>> print(tree_of(turns, [call, "", ""], 20, is_trained=True))
        prompt: 20 tokens
        ├─ turn 1: 8 tokens trained, calls add
        │  turn 2: 8 tokens trained, after 5 of the environment
        └─ turn 3: 8 tokens trained, after 5 of the environment, branch at the end
        24 of 39 tokens trained
    """
    suffix = {None: "", True: " trained", False: ", not trained"}[is_trained]
    before = [0, *(turn["environment_tokens"] for turn in turns)]
    lines = [f"prompt: {_tokens(num_prompt)}"]
    below: dict[int, list[int]] = {}
    for number, turn in enumerate(turns[:max_turns], start=1):
        said = calls_in(texts[number - 1])
        parts = [
            _tokens(turn["tokens"]) + suffix,
            f"after {before[number - 1]:,} of the environment" if number > 1 else "",
            f"calls {said}" if said else "",
            f"reward {_figure(turn['reward'])}" if turn.get("reward") else "",
            turn.get("branch", ""),
        ]
        lines.append(f"turn {number}: {', '.join(filter(None, parts))}")
        below.setdefault(turn["after"], []).append(number)
    sampled = sum(turn["tokens"] for turn in turns)
    left_out = [f"… {len(turns) - max_turns:,} more turns"] if len(turns) > max_turns else []
    total = f"{sampled * (is_trained is not False):,} of {_tokens(sampled + sum(before))} "
    total += "sampled" if is_trained is None else "trained"
    return "\n".join([*_drawn(lines, below), *left_out, total])


def _drawn(lines: Sequence[str], below: Mapping[int, Sequence[int]]) -> Iterator[str]:
    """Yield the lines of a tree, whose root is the first one, by the numbers of those below each."""
    waiting = [(0, "", "")]  # with what comes before its line, and before those below it
    while waiting:
        number, mark, margin = waiting.pop()
        yield mark + lines[number]
        children = below.get(number, ())
        if len(children) == 1:
            waiting.append((children[0], margin, margin))
        else:
            for child in reversed(children):
                is_last = child == children[-1]
                waiting.append((child, margin + ("└─ " if is_last else "├─ "), margin + ("   " if is_last else "│  ")))


def calls_in(text: str) -> str:
    """Return which tools a turn calls, in words; empty if none.

    Example:
        >>> calls_in('<tool_call>{"name": "add", "arguments": {}}</tool_call>' * 2 + "<tool_call>")
        "add (2 times), what can't be read"
        >>> calls_in('{"name": "add", "arguments": {}}<|end|>')
        'add'
    """
    whole = parse_json(text[: text.rfind("}") + 1])  # without the token that ended the turn
    found = parse_hermes(text) or [call for call in whole if isinstance(call, Call)]
    names = Counter(_name(call.name) if isinstance(call, Call) else "what can't be read" for call in found)
    return ", ".join(name if count == 1 else f"{name} ({count} times)" for name, count in names.items())


def _name(name: str) -> str:
    return name if name.isprintable() and 0 < len(name) <= MAX_NAME else repr(name[:MAX_NAME])


def _tokens(count: int) -> str:
    return f"{count:,} token{'s' * (count != 1)}"


def _figure(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def _branch(parent: int, ends: NDArray[Any], turns: Sequence[dict[str, Any]]) -> str:
    """Return after what a branch goes on."""
    if parent < 0:
        left_out = f", less {-1 - parent:,} token{'s' * (parent < -2)}" if parent < -1 else ""
        return f"branch at the prompt's end{left_out}"
    turn = int(np.searchsorted(ends, parent, side="right"))
    at = parent + 1 - (int(ends[turn - 1]) if turn else 0)
    sampled = turns[turn]["tokens"]
    if at == sampled:
        return f"branch after turn {turn + 1}"
    if at < sampled:
        return f"branch after token {at:,} of turn {turn + 1}"
    return f"branch after token {at - sampled:,} of those before turn {turn + 2}"


def _trained(row: dict[str, Any], name: str) -> list[bool]:
    mask = row["values"].get(MASK)
    return mask if mask is not None and name != MASK else [True] * len(row["values"][name])


def _rounded(values: NDArray[Any]) -> list[Any]:
    """Return numbers with the digits that float32 has."""
    if values.dtype.kind != "f":
        return values.tolist()
    return [float(text) for text in np.char.mod("%.9g", values.astype(np.float64))]
