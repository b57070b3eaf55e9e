"""A model whose turns are asked for as OpenAI's chat completions, by what plays an environment itself.

A request must extend the chat of the one before it; it waits until the turn that follows has been sampled. What is sent
and read is in `model_apis`. Needs the standard library and `rl_core.environments` only, as other interpreters import
it, too.
"""

import asyncio
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from rl_core.environments.calls import Call, parse_hermes, without_reasoning

_OF_ROLES = {"assistant": {"reasoning", "reasoning_content", "tool_calls"}, "tool": {"tool_call_id", "name"}}
_WITHOUT_EFFECT: Mapping[str, Any] = {
    "n": 1,
    "stream": False,
    "logprobs": False,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "stop": [],
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
}
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


class ChatError(Exception):
    """The model was asked for what can't be trained on, or what asks it failed; its trajectory has no reward."""


class Message(NamedTuple):
    """A message of a chat.

    Attributes:
        role: The role.
        content: The text; of the model's, without its reasoning and calls.
        calls: The calls of tools in the model's: of each, its id, the tool's name and the arguments.
        answered: The id of the call that a tool's answers.
    """

    role: str
    content: str
    calls: tuple[tuple[str, str, Any], ...] = ()
    answered: str = ""

    def as_openai(self) -> dict[str, Any]:
        """Return it as OpenAI writes it."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.calls:
            message["tool_calls"] = [
                {"id": key, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
                for key, name, arguments in self.calls
            ]
        return message | ({"tool_call_id": self.answered} if self.answered else {})


class Turn(NamedTuple):
    """A turn of the model.

    Attributes:
        number: Its number in its chat, from 1 on.
        message: What was sampled.
        reasoning: The reasoning in it.
        usage: What OpenAI reports of the tokens, if they are known.
    """

    number: int
    message: Message
    reasoning: str
    usage: Mapping[str, int] | None


class Conversation:
    """The chat of one trajectory, whose model is asked over HTTP.

    Args:
        asker: Who asks, for messages.
        chat: What the first request begins with; None: it has the whole prompt.
        settings: What a request may set besides messages and model: anything.
        values: What it may set to one value only, that of the run; or, of a limit of tokens, to a higher one.

    Attributes:
        chat: The messages so far.
        tools: Those that the model may call, as the first request has them.
        owner: Who asks, once somebody has.
    """

    def __init__(
        self,
        asker: str,
        chat: Sequence[Message] | None = None,
        settings: Collection[str] = (),
        values: Mapping[str, Any] | None = None,
    ) -> None:
        self.chat = [_stripped(*message) for message in chat or ()]
        self.tools: list[Any] = []
        self._asker, self._has_prompt = asker, chat is not None
        self._settings, self._values = {"messages", "model", *settings}, {**_WITHOUT_EFFECT, **(values or {})}
        self._turns: dict[int, asyncio.Future[Turn]] = {}  # by the number of messages that were asked with
        self._requests: asyncio.Queue[list[Message]] = asyncio.Queue()
        self._failure: ChatError | None = None
        self.owner = ""

    def ask(self, body: Any, owner: str = "") -> "asyncio.Future[Turn]":
        """Return the turn that a request asks for: the next one, or, if it was asked for before, the same again.

        Args:
            body: The request's.
            owner: Which of several agents asks; all but the first one to ask are refused.

        Raises:
            ChatError: It asks for what can't be trained on; then the trajectory has failed.
        """
        try:
            if self._failure is not None:
                raise self._failure
            if self.owner not in ("", owner):
                raise ChatError(
                    "a second agent, or a second attempt of the first one, asks the model; give each agent of the "
                    "environment but one a client and a model of its own, and set its retries to 0"
                )
            self.owner = owner
            return self._turn_after(self._messages(body))
        except ChatError as error:
            self.fail(error)
            raise

    def answer(self, action: str, usage: Mapping[str, int] | None = None) -> None:
        """Give the model's turn to who asks for it.

        Args:
            action: What was sampled.
            usage: What OpenAI reports of the tokens; None: nothing.

        Raises:
            ChatError: The trajectory has failed.
        """
        if self._failure is not None:
            raise self._failure
        turn = self._turns[len(self.chat)]
        number = len(self._turns)
        message, reasoning = _read_turn(action, number, with_calls=bool(self.tools))
        self.chat.append(message)
        turn.set_result(Turn(number, message, reasoning, usage))

    async def next_request(self, ended: "asyncio.Future[Any]") -> list[Message] | None:
        """Return the messages that the next request adds to the chat; None if what asks ended instead.

        Raises:
            ChatError: The trajectory has failed.
        """
        request = asyncio.create_task(self._requests.get())
        try:
            await asyncio.wait({request, ended}, return_when=asyncio.FIRST_COMPLETED)
            if self._failure is not None:
                raise self._failure
            return request.result() if request.done() else None
        finally:
            request.cancel()

    def fail(self, error: ChatError) -> None:
        """Refuse all requests from now on, for this reason or an earlier one."""
        if self._failure is None:
            self._failure = error
            self._requests.put_nowait([])  # for who waits for the next one
            for turn in self._turns.values():
                if not turn.done():
                    turn.set_exception(error)
                    turn.exception()  # nobody may be waiting any more

    def _turn_after(self, messages: list[Message]) -> "asyncio.Future[Turn]":
        """Return the turn after these messages."""
        known = len(self.chat)
        if (turn := self._turns.get(len(messages))) is not None and messages == self.chat[: len(messages)]:
            return turn
        if known in self._turns:
            raise ChatError(
                f"{self._asker} asks its model for a turn while another one is being sampled; a trajectory is one "
                "chat, and branches of it are not supported yet"
            )
        for at, expected in enumerate(self.chat):
            found = messages[at] if at < len(messages) else None
            if found != expected:
                raise ChatError(
                    f"{self._asker} doesn't extend the chat: message {at} of its request is {found!r:.200}, but was "
                    f"{expected!r:.200}; a trajectory keeps what the model has sampled, and begins with "
                    + ("the data row's prompt" if self._has_prompt else "its first request; branches are not supported")
                )
        added = messages[known:]
        self._check(added)
        self.chat.extend(added)
        turn = self._turns[len(messages)] = asyncio.get_running_loop().create_future()
        self._requests.put_nowait(added)
        return turn

    def _check(self, added: Sequence[Message]) -> None:
        """Check the messages that a request adds to the chat."""
        roles = [message.role for message in added]
        if not self._turns:
            if any(message.calls for message in added):
                raise ChatError(f"{self._asker} begins with a chat that has calls of tools; begin without them")
            if roles[-1:] == ["assistant"] or not (roles or self._has_prompt):
                raise ChatError(f"{self._asker} asks its model for a turn after its own, or after nothing")
            if not self._has_prompt:
                return
        elif not added:
            raise ChatError(f"{self._asker} asks its model for a turn after its own, without a message between")
        elif self.chat[-1].calls:
            asked, answered = [key for key, _, _ in self.chat[-1].calls], [message.answered for message in added]
            if asked != answered:
                raise ChatError(
                    f"a request answers the calls {', '.join(asked)} by messages of role tool with the ids "
                    f"{', '.join(answered)}; all must be answered, in their order"
                )
        if "assistant" in roles or len(set(roles)) > 1:
            raise ChatError(
                f"a request adds messages of roles {', '.join(roles)}; all must be of one, and not the model's"
            )

    def _messages(self, body: Any) -> list[Message]:
        """Return a request's chat; raises a `ChatError` if it is none, or sets what only the run's config may."""
        if not isinstance(body, dict):
            raise ChatError(f"{self._asker} asks its model with what is not a JSON object")
        others = {name: value for name, value in body.items() if not self._allows(name, value)}
        if others:
            instead = {name: f" instead of {self._values[name]!r}" for name in others if name in self._values}
            said = [f"{name} = {others[name]!r:.80}{instead.get(name, '')}" for name in sorted(others)]
            raise ChatError(
                f"{self._asker} asks its model with {', '.join(said)}, but here it is a chat whose turns "
                "are sampled as the run's config says; take it out of the requests"
            )
        messages = body.get("messages")
        if not isinstance(messages, list):
            raise ChatError(f"{self._asker} asks its model without a list of messages")
        self._take_tools(body.get("tools") or [])
        return [_read_message(at, message) for at, message in enumerate(messages)]

    def _take_tools(self, tools: Any) -> None:
        if not isinstance(tools, list) or not all(
            isinstance(tool, dict) and tool.get("type") == "function" and isinstance(tool.get("function"), dict)
            for tool in tools
        ):
            raise ChatError(f"{self._asker} asks its model with tools that are not functions: {tools!r:.200}")
        try:
            json.dumps(tools, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError) as error:
            raise ChatError(f"{self._asker} asks its model with tools that can't be encoded: {error}") from None
        if not self._turns:
            self.tools = tools
        elif tools != self.tools:
            raise ChatError(f"{self._asker} asks its model with other tools than before; they are part of the prompt")

    def _allows(self, name: str, value: Any) -> bool:
        if value is None or name in self._settings:
            return True
        if name in _LIMITS and name in self._values and isinstance(value, int):
            return value >= self._values[name]  # which ends no turn earlier
        return name in self._values and value == self._values[name]


def _read_turn(action: str, number: int, *, with_calls: bool) -> tuple[Message, str]:
    """Return a turn as a message, and its reasoning; if one of its calls can't be read, all of it is text."""
    answer, reasoning = without_reasoning(action), ""
    if len(answer) < len(action):
        before = action[: len(action) - len(answer)].removesuffix("</think>")
        reasoning = before.partition("<think>")[2] or before
    parsed = parse_hermes(action) if with_calls else ()
    calls = [call for call in parsed if isinstance(call, Call)]
    if not calls or len(calls) < len(parsed):
        return _stripped("assistant", answer), reasoning
    content = answer.partition("<tool_call>")[0].strip()
    numbered = ((f"call-{number}-{at}", call.name, call.arguments) for at, call in enumerate(calls, start=1))
    return Message("assistant", content, tuple(numbered)), reasoning


def _read_message(at: int, message: Any) -> Message:
    """Return a request's message; raises a `ChatError` if it is none, or has what the model can't read."""
    if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
        raise ChatError(f"message {at} of a request is {message!r:.80}, expected an object with a role")
    if not re.fullmatch(r"[A-Za-z_]{1,32}", role):
        raise ChatError(f"message {at} of a request has the role {role!r:.80}, expected one such as user")
    allowed = {"role", "content"} | _OF_ROLES.get(role, set())
    if others := sorted(name for name, value in message.items() if value and name not in allowed):
        raise ChatError(f"message {at} of a request has {', '.join(others)}; the model reads role and content only")
    try:
        calls = tuple(
            (str(call["id"]), str(call["function"]["name"]), json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls") or ()
        )
    except (KeyError, TypeError, ValueError, RecursionError):
        raise ChatError(f"message {at} of a request has tool calls that can't be read") from None
    return _stripped(role, _text(at, message.get("content")), calls, str(message.get("tool_call_id") or ""))


def _stripped(role: str, content: str, calls: tuple[tuple[str, str, Any], ...] = (), answered: str = "") -> Message:
    """Return a message as it is compared: clients may drop the white space around the model's own texts."""
    return Message(role, content.strip() if role == "assistant" else content, calls, answered)


def _text(at: int, content: Any) -> str:
    """Return a message's text; raises a `ChatError` if not all of it is text."""
    if isinstance(content, str) or content is None:
        return content or ""
    parts = content if isinstance(content, list) else [content]
    kinds = sorted({str(part.get("type")) if isinstance(part, dict) else type(part).__name__ for part in parts})
    if kinds not in ([], ["text"]) or not all(isinstance(part.get("text"), str) for part in parts):
        raise ChatError(f"message {at} of a request has content of type {', '.join(kinds)}; the model reads text only")
    return "\n".join(part["text"] for part in parts)
