"""Tools in trajectories, with turns that are given: a tiny model writes no calls."""

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from infra.datasets import PromptRow
from infra.datasets.environments import schemas_of_tools
from infra.engines.base import Generation, GenerationRequest, Sampling
from infra.environments.dialogue import Dialogue
from infra.environments.episodes import Episodes
from infra.environments.open import environment_class
from infra.environments.pool import EnvironmentPool
from infra.environments.trajectory import Trajectory
from infra.history.row_tokens import tree_of, turns_of
from infra.models.tiny import CHAT_TEMPLATE, make_tokenizer
from rl_core.columns.jagged import BRANCH_COLUMNS, jagged
from rl_core.rollout.chat import ChatTemplate
from schemas.config.environment import ClassEnvironment, EnvironmentConfig, ToolsEnvironment
from schemas.config.rollout import TransformersRollout
from schemas.errors import ChatTemplateError
from tests.support.programs import program
from tests.unit.rl_core.test_branches import paths_of

CONFIG = ToolsEnvironment(
    tools=("tests.support.games:add", "tests.support.games:wait"),
    num_processes=1,
    step_timeout_seconds=2,
    max_turns=4,
)
ADD = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
WAIT = '<tool_call>{"name": "wait", "arguments": {}}</tool_call>'


class GivenTurns:
    """An engine, and its rows: they take their turns from lists of texts, each ended by the chat's end token."""

    def __init__(self, turns: Sequence[Sequence[str]]) -> None:
        self._tokenizer, self._turns = make_tokenizer(), [list(texts) for texts in turns]
        self._histories: list[np.ndarray] = []
        self._unfinished: list[int] = []
        self._limits: list[int] = []
        self.prompts: list[str] = []  # of each turn

    @property
    def num_unfinished(self) -> int:
        return len(self._unfinished)

    def open_rows(self, sampling: Sampling, *, several_turns: bool) -> "GivenTurns":
        assert several_turns
        return self

    def begin(self, requests: Sequence[GenerationRequest]) -> range:
        begun = [(request.prompt_ids, request.max_tokens) for request in requests for _ in request.seeds]
        rows = range(len(self._histories), len(self._histories) + len(begun))
        self._histories += [prompt for prompt, _ in begun]
        self._limits += [limit or 0 for _, limit in begun]
        self._unfinished += rows
        return rows

    def extend(self, row: int, token_ids: np.ndarray, seed: int, max_tokens: int, stop: tuple[str, ...]) -> None:
        self._histories[row] = np.concatenate([self._histories[row], token_ids])
        self._limits[row] = max_tokens
        self._unfinished.append(row)

    def branch(self, row: int, request: GenerationRequest) -> int:
        (place,) = self.begin([request])
        self._turns.append(self._turns[row])
        self.end(row)
        return place

    def step(self) -> list[tuple[int, Generation]]:
        rows, self._unfinished = self._unfinished, []
        return [(row, self._turn(row)) for row in rows]

    def end(self, row: int) -> None:
        self._histories[row] = np.empty(0)

    def close(self) -> None:
        self._histories.clear()

    def _turn(self, row: int) -> Generation:
        self.prompts.append(self._tokenizer.decode(self._histories[row]))
        whole = [*self._tokenizer(self._turns[row].pop(0))["input_ids"], self._tokenizer.eos_token_id]
        ids = np.array(whole[: self._limits[row]])
        self._histories[row] = np.concatenate([self._histories[row], ids])
        reason = "length" if len(ids) < len(whole) else "stop"
        return Generation(ids, -np.arange(len(ids), dtype=np.float32), reason)


def play(
    engine: GivenTurns,
    answers: Sequence[str],
    config: EnvironmentConfig = CONFIG,
    branch_fault: Callable[[], str | None] = lambda: None,
    response_template: dict[str, Any] | None = None,
) -> list[Trajectory]:
    tokenizer = make_tokenizer()
    tokenizer.response_template = response_template
    tokenizer.chat_template = "{{ '<|pad|>' if tools else '' }}" + CHAT_TEMPLATE
    chat = ChatTemplate(tokenizer, {}, schemas_of_tools(config))
    pool = EnvironmentPool(environment_class(config, TransformersRollout()))
    pool.start()
    try:
        dialogues = [Dialogue(config, chat, 64)]
        episodes = Episodes(dialogues, engine, pool, tokenizer, branch_fault)  # type: ignore[arg-type]
        messages = [{"role": "user", "content": "2 + 3 ="}]
        token_ids, n = np.array(chat.encode(messages)), len(answers)
        rows = [PromptRow(token_ids, "2 + 3 =", answer, {}, "sums", messages, environment=0) for answer in answers]
        sampling = Sampling(max_response_tokens=2000, stop_token_ids=(tokenizer.eos_token_id,))
        played = dict(episodes.play(episodes.begin(rows, range(n)), range(n), sampling))
        return [played[number] for number in range(n)]
    finally:
        pool.close()


def test_calls_are_answered_and_a_turn_without_one_is_the_answer() -> None:
    engine = GivenTurns([[ADD, "It is 5."], ["5"], [f"{ADD} and {ADD}", "<tool_call>{oops</tool_call>", "5"]])
    called, answered, malformed = play(engine, ["5"] * 3)
    assert [turn.observations for turn in called.turns] == [("5",), ("",)]
    assert [trajectory.end for trajectory in (called, answered, malformed)] == ["done"] * 3
    assert len(answered.turns) == 1
    assert malformed.turns[0].observations == ("5", "5")
    assert malformed.turns[1].observations[0].startswith("The call is malformed: ")
    assert (called.metrics["tool_calls"], malformed.metrics["tool_calls"]) == (1, 3)
    assert malformed.metrics["malformed_calls"] == 1
    assert engine.prompts[0].startswith("<|pad|><|user|>2 + 3 =")  # the template has seen the tools
    assert engine.prompts[3] == f"{engine.prompts[0]}{ADD}<|end|><|tool|>5<|assistant|>"


PROGRAM = """
    add = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    while "5" != ask(tools=[add] if task["answer"] == "5" else []):
        for call in messages[-1].get("tool_calls", ()):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "5"})
    finish(1.0)
"""


def test_a_program_has_tools_of_its_own(tmp_path: Path) -> None:
    engine = GivenTurns([[f"{ADD}{ADD}", "5"], ["5"]])
    called, other = play(engine, ["5", "none"], program(tmp_path, PROGRAM, max_turns=4))
    assert called.failure is other.failure is None
    assert [turn.observations for turn in called.turns] == [("5", "5"), ("",)]
    assert (called.end, called.reward, other.end, other.reward) == ("done", 1.0, "done", 1.0)
    assert engine.prompts[0] == "<|pad|><|user|>2 + 3 =<|assistant|>"  # the template has seen the tools
    assert engine.prompts[1] == "<|user|>2 + 3 =<|assistant|>"
    assert engine.prompts[2] == f"{engine.prompts[0]}{ADD}{ADD}<|end|><|tool|>5<|tool|>5<|assistant|>"


RESPONSE_TEMPLATE = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "thinking": {"open": "<<", "close": ">>"},
        "tool_calls": {
            "open_pattern": r"\[(?P<name>\w+) ",
            "close": "]",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"(?P<key>\w+)=(?P<value>\S+)", "value_parser": {"name": "text"}},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": "<|end|>"},
    },
}
TYPED = """
    properties = {"a": {"type": "integer"}, "b": {"type": "string"}}
    function = {"name": "add", "parameters": {"type": "object", "properties": properties}}
    tools = [{"type": "function", "function": function}]
    content = ask(tools=tools)
    message = messages[-1]
    arguments = [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    if task["answer"] == "5":
        assert (content, message["reasoning_content"]) == ("I add.", "so"), message
        assert arguments == [{"a": 2, "b": "3"}, {"a": 4, "b": "5"}], arguments
    else:
        assert (content, arguments) == (task["answer"], []), message
    for call in message.get("tool_calls", ()):
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "5"})
    if not arguments:
        say("x")
    assert ask(tools=tools, stop="8") == "[add a="
    say("y")
    assert ask() == "[add a=2]", "a call without tools"
    finish(1.0)
"""


def test_a_turn_is_read_as_the_tokenizer_says(tmp_path: Path) -> None:
    text = "<<so>>I add. [add a=2 b=3][add a=4 b=5]"
    bad = "[add]"
    end = ["[add a=8 b=9]", "[add a=2]"]
    engine = GivenTurns([[text, *end], [bad, *end]])
    environment = program(tmp_path, TYPED, max_turns=4, parser="template")
    for row in play(engine, ["5", bad], environment, response_template=RESPONSE_TEMPLATE):
        assert (row.failure, row.end, row.reward) == (None, "done", 1.0)
    begin = "<|pad|><|user|>2 + 3 =<|assistant|>"
    assert engine.prompts[2] == f"{begin}{text}<|end|><|tool|>5<|tool|>5<|assistant|>"
    assert engine.prompts[3] == f"{begin}{bad}<|end|><|user|>x<|assistant|>"
    for template, message in ((None, "without a response_template"), ({"fields": {}}, "must be a non-empty dict")):
        with pytest.raises(ChatTemplateError, match=message):
            play(engine, ["5"], environment, response_template=template)


@pytest.mark.parametrize(
    ("written", "calls"),
    [
        ('{"name": "add", "arguments": {"a": 2}}', [("add", {"a": 2})]),
        ('{"name": "add", "arguments": {"a": 2}', None),
        ('{"name": "add", "arguments": [2]}', None),
        ('{"name": 2, "arguments": {}}', None),
        ('{"name": "add"}', None),
        ('{"name": "add", "arguments": {"a": NaN}}', None),
        ('{"name": "add", "arguments": {"a": "\\ud800"}}', None),
        ("[" * 10**5, None),
    ],
)
def test_only_calls_that_can_be_sent_are_read(written: str, calls: object) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ tools }}"
    call = {"open": "(", "close": ")", "repeats": True, "content": "json"}
    call["transform"] = {"type": "function", "function": "{content}"}
    tokenizer.response_template = {"start_anchor": "<|assistant|>", "fields": {"tool_calls": call}}
    with nullcontext() if calls else pytest.raises(ChatTemplateError, match=r"can't read the turn '\("):
        read = ChatTemplate(tokenizer, {}, schemas_of_tools(CONFIG)).parse(f"({written})", "<|assistant|>")
        assert read == {"content": "", "reasoning": "", "calls": calls}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"tag_pattern": "("}, "missing )"),
        ({"tag_pattern": r"(?P<key>\w+)(?:=(?P<value>\S+))?", "value_parser": {"name": "text"}}, "AttributeError: "),
        ({"tag_pattern": r"(?P<key>\w+)", "value_parser": {"name": "none"}}, "none"),
        ({"tag_pattern": r"\w+"}, "tag_pattern must have a named group 'key'"),
    ],
)
def test_a_response_template_that_fails_costs_the_turn_its_calls_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, arguments: dict[str, object], reason: str
) -> None:
    fields = {**RESPONSE_TEMPLATE["fields"]}
    fields["tool_calls"] = {**fields["tool_calls"], "content_args": arguments}
    code = """
        tools = [{"type": "function", "function": {"name": "add"}}]
        assert ask(tools=tools) == "[add a b=2]"
        say("x")
        assert ask(tools=tools) == "[add a b=2]"
        finish(1.0)
    """
    engine, environment = GivenTurns([["[add a b=2]"] * 2]), program(tmp_path, code, parser="template")
    (row,) = play(engine, [""], environment, response_template={**RESPONSE_TEMPLATE, "fields": fields})
    assert (row.failure, row.reward) == (None, 1.0)
    (said,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "can't read the turn '[add a b=2]<|end|>'" in said
    assert reason in said


def test_a_call_that_takes_too_long_is_an_observation_and_the_row_goes_on() -> None:
    slow, other = play(GivenTurns([[WAIT, ADD, "5"], [ADD, ADD, "6"]]), ["5"] * 2)
    assert slow.failure is other.failure is None
    assert slow.turns[0].observations == ("error: the call took longer than 2 s and was stopped",)
    assert [turn.observations for turn in other.turns] == [("5",), ("5",), ("",)]
    assert slow.turns[1].observations == ("5",)
    assert (slow.end, slow.metrics["tool_timeouts"], slow.metrics["tool_calls"]) == ("done", 1, 1)


def test_the_time_of_a_failed_call_counts() -> None:
    config = ClassEnvironment(kind="class", path="tests.support.faulty_environments:Counting", num_processes=1)
    step, reset = play(GivenTurns([["raise"], [""]]), ["5", "raise"], config)
    assert (step.failure or "").startswith("turn 1: RuntimeError: no such luck")
    assert (reset.failure or "").startswith("reset: RuntimeError: no such luck")
    assert min(step.environment_seconds, reset.environment_seconds) > 0


BRANCHING = """
    ask()
    say("go on")
    ask()
    trunk = list(messages)
    messages[:] = [{"role": "user", "content": "2 + 3, in short"}]  # it has compacted its history
    ask()
    messages[:] = [*trunk[:2], {"role": "user", "content": "again"}]  # after the first turn
    ask()
    messages[:] = [*trunk, {"role": "user", "content": "well?"}]  # after the second one
    ask()
    say("so")
    ask()
    messages[:] = [*trunk[:1], {"role": "assistant", "content": "five"}, *trunk[2:3]]  # other than what was sampled
    ask()
    finish(1.0)
"""


def test_a_program_leaves_its_chat_and_comes_back(tmp_path: Path) -> None:
    engine = GivenTurns([list("abcdefg")])
    (row,) = play(engine, ["5"], program(tmp_path, BRANCHING, max_turns=9))
    assert (row.failure, row.end, row.reward, row.num_branches) == (None, "done", 1.0, 4)
    assert [sum(name in each for each in row.requests) for name in ("chat_completions", "seconds")] == [7, 7]
    begin, between = "<|user|>2 + 3 =<|assistant|>", "<|end|><|user|>{}<|assistant|>"
    trunk = f"{begin}a{between.format('go on')}"
    assert engine.prompts == [
        begin,
        trunk,
        "<|user|>2 + 3, in short<|assistant|>",
        f"{begin}a{between.format('again')}",
        f"{trunk}b{between.format('well?')}",
        f"{trunk}b{between.format('well?')}e{between.format('so')}",
        f"{begin}five{between.format('go on')}",
    ]
    tokenizer, prompt_ids = make_tokenizer(), make_tokenizer()(begin)["input_ids"]
    begun = [", in short<|assistant|>", "again<|assistant|>", "<|user|>well?<|assistant|>"]
    begun.append(engine.prompts[-1].removeprefix("<|user|>2 + 3 =<|assistant|>"))
    assert row.num_branch_tokens == sum(len(tokenizer(text)["input_ids"]) for text in begun)
    sizes = [turn.num_environment_tokens for turn in row.turns]
    columns = (prompt_ids, row.token_ids, [turn.num_tokens for turn in row.turns], sizes, row.parents)
    names = ("prompt_ids", "response_ids", *BRANCH_COLUMNS)
    stored = {name: jagged([np.asarray(values)]) for name, values in zip(names, columns, strict=True)}
    paths, _ = paths_of(pa.record_batch(stored))
    turns = [f"{prompt}{letter}<|end|>" for prompt, letter in zip(engine.prompts, "abcdefg", strict=True)]
    assert [tokenizer.decode(path) for path in paths] == turns
    assert len(row.token_ids) < len(np.concatenate(paths)) / 2  # each token is there once
    sampled = tokenizer.decode(row.token_ids[row.loss_mask])
    assert sampled == "".join(f"{letter}<|end|>" for letter in "abcdefg")


CHOOSING = """
    for text in ("go on", "so"):
        choices = json.loads(post({"messages": messages, "n": 2})[1])["choices"]
        messages += [choices[1]["message"], {"role": "user", "content": text}]
    ask()
    finish(1.0)
"""


def test_choices_have_all_that_is_before_them_in_common(tmp_path: Path) -> None:
    engine = GivenTurns([list("abcde")])
    (row,) = play(engine, ["5"], program(tmp_path, CHOOSING, max_turns=5))
    assert (row.failure, row.end, row.reward, row.num_branches, row.num_branch_tokens) == (None, "done", 1.0, 2, 0)
    begin, between = "<|user|>2 + 3 =<|assistant|>", "<|end|><|user|>{}<|assistant|>"
    second = f"{begin}b{between.format('go on')}"
    assert engine.prompts == [begin, begin, second, second, f"{second}d{between.format('so')}"]
    whole, mask = make_tokenizer().decode(row.token_ids), make_tokenizer().decode(row.token_ids[row.loss_mask])
    assert whole == "a<|end|>b<|end|><|user|>go on<|assistant|>c<|end|>d<|end|><|user|>so<|assistant|>e<|end|>"
    assert mask == "a<|end|>b<|end|>c<|end|>d<|end|>e<|end|>"


def test_turns_follow_the_choice_that_was_taken_wherever_the_tokens_between_are_stored(tmp_path: Path) -> None:
    again = "messages[:] = [{'role': 'user', 'content': 'in short'}]\n    post({'messages': messages, 'n': 2})"
    code = CHOOSING.replace("choices[1]", "choices[0]").replace("    finish(", f"    {again}\n    finish(")
    (row,) = play(GivenTurns([list("abcdefg")]), ["5"], program(tmp_path, code, max_turns=7))
    assert (row.failure, row.end, row.num_branches) == (None, "done", 6)
    assert [turn["action"] for turn in row.reward_info()["turns"]] == list("abcdefg")
    after = [0, 0, 1, 1, 3, 0, 0]
    assert [turn["after"] for turn in row.reward_info()["turns"]] == after
    sizes = [[turn.num_tokens for turn in row.turns], [turn.num_environment_tokens for turn in row.turns], row.parents]
    stored = {name: jagged([np.array(each, np.int32)]) for name, each in zip(BRANCH_COLUMNS, sizes, strict=True)}
    turns = turns_of(stored, 0)
    assert [turn["after"] for turn in turns] == after
    last_of_third = f"branch after token {row.turns[1].num_environment_tokens} of those before turn 3"
    assert [turn.get("branch") for turn in turns[2:5]] == ["branch after turn 1", last_of_third, "branch after turn 3"]
    tree = tree_of(turns, list("abcdefg"), 3, is_trained=True).splitlines()
    assert [line.partition(":")[0] for line in tree[1:-1]] == [
        "├─ turn 1",
        "│  ├─ turn 3",
        "│  │  turn 5",
        "│  └─ turn 4",
        "├─ turn 2",
        "├─ turn 6",
        "└─ turn 7",
    ]


LIMITED = """
    assert ask(stop=["xyz", "STOP"]) == "ab"
    messages.pop()
    assert ask(stop="b") == "A", "it has the turn of a request with other parameters"
    messages.pop()
    assert ask(stop="b") == "A", "the same request has another turn"
    say("go on")
    choice = json.loads(post({"messages": messages, "max_tokens": 4, "logprobs": True})[1])["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "cd\\u00e9"), choice
    found = [(each["token"], each["logprob"], each["bytes"]) for each in choice["logprobs"]["content"]]
    assert found == [("c", 0, [99]), ("d", -1, [100]), ("\\ufffd", -2, None), ("\\ufffd", -3, None)], found
    messages.append(choice["message"])
    say("well?")
    ask(stop=["none"], max_tokens=999)
    finish(1.0)
"""


def test_a_request_may_end_its_turn_early(tmp_path: Path) -> None:
    engine = GivenTurns([["abSTOPxyz", "Abc", "cdéfgh", "end"]])
    (row,) = play(engine, ["5"], program(tmp_path, LIMITED, max_turns=5))
    assert (row.failure, row.end, row.reward, row.num_branches) == (None, "done", 1.0, 1)
    begin, between = "<|user|>2 + 3 =<|assistant|>", "<|end|><|user|>{}<|assistant|>"
    third = f"{begin}Ab{between.format('go on')}"
    assert engine.prompts == [begin, begin, third, f"{third}cdé{between.format('well?')}"]
    assert make_tokenizer().decode(row.token_ids[row.loss_mask]) == "abSTOPAbcdéend<|end|>"
    assert [turn.action for turn in row.turns] == ["abSTOP", "Ab", "cdé", "end"]


class CutTurns(GivenTurns):
    """An engine whose turns were cut by a limit that is half of what it is now."""

    def begin(self, requests: Sequence[GenerationRequest]) -> range:
        rows = super().begin(requests)
        self._limits = [limit // 2 for limit in self._limits]
        return rows


@pytest.mark.parametrize(("limit", "end"), [(None, "length"), (4, "length"), (2, "turn_length")])
def test_half_a_turn_that_its_request_has_not_limited_ends_the_trajectory(
    tmp_path: Path, limit: int | None, end: str
) -> None:
    engine = (GivenTurns if limit == 2 else CutTurns)([["a" * 2000]])
    (row,) = play(engine, ["5"], program(tmp_path, "ask()\nfinish(1.0)", max_turn_tokens=limit))
    assert (row.failure, row.end, row.reward, len(row.turns)) == (None, end, 0.0, 1)


def test_a_branch_that_rows_of_the_run_cannot_have_is_a_failure(tmp_path: Path) -> None:
    code = "ask()\nmessages[:] = [{'role': 'user', 'content': 'other'}]\nask()\nfinish(1.0)"
    (row,) = play(GivenTurns(["ab"]), ["5"], program(tmp_path, code, max_turns=4), branch_fault=lambda: "it is padded")
    assert row.failure == "turn 1: the trajectory branches, but it is padded"
    assert (row.end, row.num_branches) == ("failed", 0)


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "from-verl-agents.md"


def test_the_classes_of_the_page_for_users_of_verl_and_trl_play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tutor, counter = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "tutor.py").write_text(tutor)
    (tmp_path / "counter.py").write_text(counter)
    monkeypatch.syspath_prepend(tmp_path)
    (row,) = play(GivenTurns([["4", "5"]]), ["5"], ClassEnvironment(path="tutor:Tutor", num_processes=1))
    assert (row.failure, row.end, row.reward) == (None, "done", 1.0)
    assert row.turns[0].observations == ("That is not right. Try again.",)
    call = '<tool_call>{"name": "increment", "arguments": {"step": %s}}</tool_call>'
    engine = GivenTurns([[call % 2 + call % '"x"', call % 3, "done"]])
    (row,) = play(engine, ["5"], ClassEnvironment(path="counter:Counter", num_processes=1))
    assert (row.failure, row.end, row.reward, row.num_branches) == (None, "done", 1.0, 0)
    assert row.turns[0].observations[0] == "2"
    assert row.turns[0].observations[1].startswith("error: unsupported operand")
    assert row.turns[1].observations == ("5",)
    assert engine.prompts[1].startswith(engine.prompts[0])
    assert engine.prompts[0].startswith("<|pad|>")  # the template has seen the tools


RESTARTING = """
class Restarting:
    def __init__(self, task, seed):
        self._prompt = task["prompt"]

    def reset(self):
        pass

    def step(self, action):
        return {"messages": self._prompt}, 0.5, action == "b"
"""


def test_a_chat_that_is_asked_for_again_has_another_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "restarting.py").write_text(RESTARTING)
    monkeypatch.syspath_prepend(tmp_path)
    engine = GivenTurns(["ab"])
    (row,) = play(engine, ["5"], ClassEnvironment(kind="class", path="restarting:Restarting", num_processes=1))
    assert (row.failure, row.end, row.reward, row.parents) == (None, "done", 1.0, (-1, -1))
    assert engine.prompts == ["<|user|>2 + 3 =<|assistant|>"] * 2  # and nothing of the first turn
