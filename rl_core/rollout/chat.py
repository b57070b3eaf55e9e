"""A model's chat template, with a run's variables and tools; and the text of tokens, as they say it."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rl_core.rollout.control_tokens import ControlTokens, Messages
from schemas.config.kinds import CLOCK
from schemas.errors import BrokenChatTemplateError, ChatTemplateError, DataError

Tokens = list[int] | np.ndarray[Any, Any]
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # marks the model's turns in a template
REASONING = ("reasoning_content", "thinking")  # what chat templates call a turn's reasoning that is not in its content
# Of a chat: of each message, its role, if it has a content, its tool calls, and under which names it has a reasoning.
Shape = Sequence[tuple[str, bool, int, tuple[str, ...]]]
_DATE_PARTS = "sluice_date_parts"
# A template's variables can't be functions since transformers 5.22; this one takes the place of transformers' own.
_CLOCK_MACRO = f"""
{{%- macro {CLOCK}(format) -%}}
    {{%- set text = namespace(value=format) -%}}
    {{%- for directive, part in {_DATE_PARTS}.items() -%}}
        {{%- set text.value = text.value | replace(directive, part) -%}}
    {{%- endfor -%}}
    {{{{- text.value -}}}}
{{%- endmacro -%}}"""


class LeftOut(NamedTuple):
    """What a chat template leaves out of a chat."""

    message: int
    part: str  # "the content", or e.g. "tool call 1" or "thinking"


class ChatTemplate:
    """Renders and encodes chats. In a message's content, a control token's name is text.

    Args:
        tokenizer: The tokenizer, which has the template.
        variables: Variables of the template. `strftime_now` is the date, in ISO 8601, that it takes for today.
        tools: JSON schemas of the tools that the model may call.

    Attributes:
        template: The template.
        name: Which it is, for errors.

    Raises:
        DataError: There is no template for such chats; or it has no variable of a given name, or none for tools.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.tokenizer, self._control = tokenizer, ControlTokens(tokenizer)
        self._variables, self._given = dict(variables or {}), variables
        self.template = chat_template_text(tokenizer, tools)
        path = tokenizer.name_or_path
        self.name = f"the chat template of {path}" if path else "the model's chat template"
        if unused := [name for name in self._variables if name != CLOCK and not _uses(self.template, name)]:
            raise DataError(
                f"data.chat_template_kwargs: the model's chat template has no variable {', '.join(unused)}; remove it, "
                "or check its name in the tokenizer's chat_template.jinja"
            )
        if tools and not _uses(self.template, "tools"):
            raise DataError(
                "the model's chat template has no variable `tools`, so that the model would not learn which tools it "
                "may call; use a model whose chat_template.jinja has it"
            )
        if name := self._control.find([*tools]):
            raise DataError(f"the JSON schemas of the tools have {name!r}, a control token of {self.name}; remove it")
        if tools:
            self._variables["tools"] = list(tools)
        if CLOCK in self._variables:
            self._variables[_DATE_PARTS] = _date_parts(self._variables.pop(CLOCK))
            self._variables["chat_template"] = _CLOCK_MACRO + self.template

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> "ChatTemplate":
        """Return the same template with these tools.

        Raises:
            DataError: It has no variable for them.
        """
        return ChatTemplate(self.tokenizer, self._given, tools)

    def render(self, messages: Messages, *, with_prompt: bool = True) -> str:
        """Return a chat as text, ending with the beginning of the model's turn if `with_prompt`.

        Raises:
            ChatTemplateError: The template rejects the chat.
            BrokenChatTemplateError: It fails on it.
        """
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=with_prompt, **self._variables
            )
        except Exception as error:  # a template computes, and may fail in any way
            roles, reason = ", ".join(message["role"] for message in messages), " ".join(str(error).split())
            if type(error) is TemplateError:  # of `raise_exception` in the template
                raise ChatTemplateError(f"{self.name} rejects a chat of the roles {roles}: {reason}") from error
            raise BrokenChatTemplateError(
                f"{self.name} fails on a chat of the roles {roles}: {type(error).__name__}: {reason}"
            ) from error
        return str(text)

    def check_response_template(self) -> None:
        """Check that the tokenizer says how the model's turns are read, as its `response_template`.

        Raises:
            ChatTemplateError: It doesn't, or in a way that transformers doesn't know.
        """
        try:
            self.tokenizer.get_response_parser(prefix="")
        except (AttributeError, ValueError) as error:
            raise ChatTemplateError(
                f'environment.parser = "template", but {self.name} comes without a response_template that can be used '
                f'({error}); add one to its tokenizer_config.json, or set "hermes" or "json" if its calls are like that'
            ) from error

    def parse(self, turn: str, before: str) -> dict[str, Any] | None:
        """Return a turn as the tokenizer's `response_template` reads it; None if it has calls but the chat no tools.

        Args:
            turn: The model's text, with the token that ended it, if one did.
            before: All that is before it.

        Returns:
            Its `content` and `reasoning`, and its `calls`: of each the name and the arguments, in JSON's types.

        Raises:
            ChatTemplateError: It can't be read, or what is read are no such calls.
        """
        tools = self._variables.get("tools")
        try:
            found = self.tokenizer.parse_response(turn, prefix=before, tools=tools)
            functions = [call["function"] for call in found.get("tool_calls") or ()]
            calls = [(function["name"], function["arguments"]) for function in functions]
            texts = found.get("content") or "", next((found[name] for name in REASONING if found.get(name)), "")
            json.dumps([texts, calls], ensure_ascii=False, allow_nan=False).encode()
            if not all(isinstance(text, str) for text in (*texts, *(name for name, _ in calls))):
                raise TypeError("a text, or the name of a call, is no text")
            if not all(isinstance(given, dict) for _, given in calls):
                raise TypeError("the arguments of a call are not an object")
        except Exception as error:  # a template computes, and may fail in any way
            raise ChatTemplateError(
                f"the tokenizer's response_template can't read the turn {turn!r:.200}: {type(error).__name__}: "
                f"{' '.join(str(error).split()):.300}"
            ) from error
        return None if calls and not tools else {"content": texts[0], "reasoning": texts[1], "calls": calls}

    def find_left_out(self, shape: Shape, *, with_prompt: bool = True) -> LeftOut | None:
        """Return the first part of messages which the template leaves out of chats of this shape, also a part of it.

        Of turns before the last one, a reasoning is none: most templates leave it out, so that no model reads it later.

        Args:
            shape: The shape.
            with_prompt: Whether they end with the beginning of the model's turn.

        Raises:
            ChatTemplateError: The template rejects such chats.
        """
        chat, marks = _marked_chat(shape)
        text = self.render(chat, with_prompt=with_prompt)
        return next((part for part, texts in marks.items() if any(mark not in text for mark in texts)), None)

    def find_missing_prompt(self, messages: Messages) -> str:
        """Return what the template writes before a model's turn but not at the end of a prompt; empty if nothing.

        Raises:
            ChatTemplateError: The template rejects the chat.
        """
        prompt, mark = self.render(messages), "sluicemark"
        if prompt != self.render(messages, with_prompt=False):
            return ""
        chat = self.render([*messages, {"role": "assistant", "content": mark}], with_prompt=False)
        before, found, _ = chat.partition(mark)
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(before, prompt, strict=False))))
        return before[same:].strip() if found else ""

    def find_control_token(self, messages: Messages) -> str | None:
        """Return the first name of a control token in the texts of a chat."""
        return self._control.find(messages)

    def encode(self, messages: Messages, *, with_prompt: bool = True, rendered: str | None = None) -> list[int]:
        """Return a chat's token ids.

        Args:
            messages: The chat.
            with_prompt: Whether they end with the beginning of the model's turn.
            rendered: What `render` returns for the same; None: it is rendered here.

        Raises:
            ChatTemplateError: The template rejects the chat.
            ValueError: A content has a control token's name, and can't be encoded as text.
        """
        if self._control.find(messages):
            return self._control.encode(messages, lambda chat: self.render(chat, with_prompt=with_prompt))
        return self.encode_text(self.render(messages, with_prompt=with_prompt) if rendered is None else rendered)

    def encode_turns(self, messages: Messages, ends: Collection[int]) -> tuple[list[int], list[range]]:
        """Return a chat's token ids, and where the model's turns are among them, one after another.

        A template's own `{% generation %}` marks say it. Without them, a turn begins where the prompt of the messages
        before it ends, and ends with the token that ends a response, or where the template has written it.

        Args:
            messages: The chat.
            ends: The token ids that end a response.

        Raises:
            ChatTemplateError: The template rejects the chat; or a turn can't be told from what is around it.
            ValueError: A content has a control token's name, and can't be encoded as text.
        """
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if _GENERATION.search(self.template):
            return self._encode_marked(messages, len(turns))
        ids = self.encode(messages, with_prompt=False)
        spans: list[range] = []
        for number in reversed(turns):
            stop = spans[-1].start if spans else len(ids)
            spans.append(self._find_turn(messages, number, ids[:stop], ends))
        return ids, spans[::-1]

    def _find_turn(self, messages: Messages, number: int, ids: list[int], ends: Collection[int]) -> range:
        """Return where the turn `messages[number]` is in `ids`, which end where the next one begins, or with the chat.

        A template may write a turn in another way if it is not the last one, such as without its reasoning, or without
        the beginning of reasoning that a prompt ends with: the turn then begins where it departs from the prompt.
        """
        before, is_last = self.encode(messages[:number]), number + 1 == len(messages)
        through = ids if is_last else self.encode(messages[: number + 1], with_prompt=False)
        start = _num_common(ids, before)
        is_prompted, is_whole = start == len(before), ids[: len(through)] == through
        last = len(through) if is_whole else len(ids)
        # Of some templates, a turn's end is the beginning of the next message.
        end = next((at + 1 for at in range(start, min(last + 1, len(ids))) if ids[at] in ends), last * is_whole)
        text = self._turn_text(ids[start:end], ends)
        content = messages[number]["content"].strip()
        if calls := messages[number].get("tool_calls"):  # what they are written as, only the template knows
            content = self._turn_text(through[_num_common(through, before) :], ends)
        has_all = content in text if is_whole else text.endswith(content)
        has_part = is_prompted and (text in content if is_whole else content.endswith(text))
        has_calls = all(call["function"]["name"] in text for call in calls or ())
        if calls and is_whole:  # a token that ends responses may be within the turn: what follows would have no loss
            has_calls &= not decode_text(self.tokenizer, ids[end : len(through)]).strip()
        has_others = not is_prompted and start < len(self.encode(messages[:number], with_prompt=False))
        if end > start and (has_all or has_part) and has_calls and not has_others:
            return range(start, end)
        raise ChatTemplateError(
            f"{self.name} writes message {number}, of role 'assistant', so that its tokens can't be told from those "
            "around it"
        )

    def _turn_text(self, ids: list[int], ends: Collection[int]) -> str:
        """Return the text of a turn up to the token that ends it, if it has one."""
        return decode_text(self.tokenizer, list(takewhile(lambda token: token not in ends, ids))).strip()

    def _encode_marked(self, messages: Messages, num_turns: int) -> tuple[list[int], list[range]]:
        if name := self._control.find(messages):
            raise ValueError(f"{self.name} marks turns of texts without control tokens only, not with {name!r}")
        encoded: Any = self.tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True, **self._variables
        )
        edges = np.flatnonzero(np.diff([0, *encoded["assistant_masks"], 0]))
        spans = [range(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]
        if len(spans) != num_turns:
            raise ChatTemplateError(
                f"{self.name} marks {len(spans)} turns by {{% generation %}} in a chat with {num_turns} of role "
                "'assistant'"
            )
        return list(encoded["input_ids"]), spans

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of a rendered chat, or of the beginning of one."""
        token_ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return token_ids


def _num_common(ids: list[int], others: list[int]) -> int:
    """Return how many tokens two lists have in common at their beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, others, strict=False)))


def shape_of(messages: Messages) -> tuple[tuple[str, bool, int, tuple[str, ...]], ...]:
    """Return a chat's shape, by which a template may leave out some of its messages."""
    return tuple(
        (
            message["role"],
            bool(message["content"].strip()),
            len(message.get("tool_calls", ())),
            tuple(name for name in REASONING if name in message),
        )
        for message in messages
    )


def _marked_chat(shape: Shape) -> tuple[Messages, dict[LeftOut, list[str]]]:
    """Return a chat of a shape whose texts are marks, and the marks of each of its parts."""
    chat: Messages = []
    marks: dict[LeftOut, list[str]] = {}
    unanswered: list[str] = []  # ids of tool calls
    last_turn = max((number for number, (role, *_) in enumerate(shape) if role == "assistant"), default=None)
    for number, (role, has_content, num_calls, reasoning) in enumerate(shape):
        message = {"role": role, "content": f"sluice{number}mark" if has_content else ""}
        marks[LeftOut(number, "the content")] = [message["content"]]
        for name in reasoning:
            message[name] = f"sluice{number}{name}mark"
            marks[LeftOut(number, name)] = [message[name]] if number == last_turn else []
        calls = []
        for call in range(num_calls):
            texts = [f"sluice{number}{part}{call}mark" for part in ("function", "key", "value")]
            marks[LeftOut(number, f"tool call {call + 1}")] = texts
            unanswered.append(f"c{number:04}{call:04}")  # of 9 characters, as Mistral's templates want them
            function = {"name": texts[0], "arguments": {texts[1]: texts[2]}}
            calls.append({"type": "function", "id": unanswered[-1], "function": function})
        if role == "tool":
            message |= {"name": "sluice", "tool_call_id": unanswered.pop(0) if unanswered else "c00000000"}
        chat.append({**message, "tool_calls": calls} if calls else message)
    return chat, marks


def uses_clock(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a chat template of a tokenizer, of several any, asks for today's date."""
    templates = tokenizer.chat_template
    return any(_uses(text, CLOCK) for text in (templates.values() if isinstance(templates, dict) else [templates]))


def chat_template_text(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the template that a tokenizer takes for chats with these tools: of several, `tool_use` or `default`.

    Raises:
        DataError: It has several, and none of these.
    """
    templates = tokenizer.chat_template
    if isinstance(templates, dict) and not ({"default", "tool_use"} if tools else {"default"}) & templates.keys():
        raise DataError(
            f"the tokenizer {tokenizer.name_or_path} has several chat templates ({', '.join(templates)}) but none "
            f"named default{' or tool_use' if tools else ''}; write the one to use to chat_template.jinja in its folder"
        )
    return str(tokenizer.get_chat_template(tools=[dict(tool) for tool in tools] or None))


def _date_parts(date: object) -> dict[str, str]:
    """Return what each directive of `strftime` says of a date."""
    try:
        day = datetime.fromisoformat(str(date))
    except ValueError:
        raise DataError(f"data.chat_template_kwargs.{CLOCK} is {date!r}; expected a date such as 2026-01-31") from None
    directives = (f"%{flag}{letter}" for letter in "aAbBcdDeFGhHIjklmMnpPrRsStTuUVwWxXyYzZ" for flag in ("", "-"))
    return {directive: day.strftime(directive) for directive in directives}


def _uses(template: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def decode_text(tokenizer: PreTrainedTokenizerBase, token_ids: Tokens, *, skip_special_tokens: bool = False) -> str:
    """Return the text of tokens, without the clean-up of some tokenizers, which makes "x!= y" of "x != y"."""
    text = tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    return str(text)


def decode_texts(
    tokenizer: PreTrainedTokenizerBase, rows: list[list[int]], *, skip_special_tokens: bool = False
) -> list[str]:
    """Return the text of each row of tokens, see `decode_text`."""
    return list(
        tokenizer.batch_decode(rows, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    )
