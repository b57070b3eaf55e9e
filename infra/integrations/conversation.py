"""A model whose turns are asked for as OpenAI's chat completions, by what plays an environment itself.

A request extends the chat of an earlier one, or begins a branch; it waits until the turn that follows has been sampled.
What is sent and read is in `model_apis`. Needs the standard library and `rl_core.environments` only, as other
interpreters import it, too.
"""

import asyncio
import json
import math
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from rl_core.environments.calls import PARSERS, Call, without_reasoning

EXPECTED_SECONDS = 5.0  # for which another request waits, when what asks has been started again
_OF_ROLES = {"assistant": {"reasoning", "reasoning_content", "tool_calls"}, "tool": {"tool_call_id", "name"}}
_WITHOUT_EFFECT: Mapping[str, Any] = {
    "n": 1,
    "stream": False,
    "logprobs": False,
    "top_logprobs": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "stop": [],
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
}
MAX_CHOICES = 128  # of a request, as many as OpenAI's API gives
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

    def for_template(self) -> dict[str, Any]:
        """Return it as chat templates take it: with the arguments of calls as objects."""
        message = self.as_openai()
        for call, (_, _, arguments) in zip(message.get("tool_calls", ()), self.calls, strict=True):
            call["function"]["arguments"] = arguments
        return message


class Turn(NamedTuple):
    """A turn of the model.

    Attributes:
        number: Its number in its chat, from 1 on.
        message: What was sampled.
        reasoning: The reasoning in it.
        usage: What OpenAI reports of the tokens, if they are known.
        stop: The request's stop string that ended it, which it doesn't have; or none.
        is_cut: Whether the request's limit of tokens has ended it.
        logprobs: The text and the log-prob of each token, if the request asks for them.
    """

    number: int
    message: Message
    reasoning: str
    usage: Mapping[str, int] | None
    stop: str
    is_cut: bool
    logprobs: Sequence[tuple[str, float]]


class Request(NamedTuple):
    """What the model is asked next.

    Attributes:
        messages: What follows the turn `after`, of one role; or all messages of its chat.
        after: The number of a turn, from 1 on; 0: the data row's prompt; None: they are a whole chat.
        tools: Those that the model may call, as the request has them.
        sampling: What it says of the turn: `stop`, `max_tokens` and `logprobs`, if it does.
    """

    messages: Sequence[Message]
    after: int | None
    tools: Sequence[Any]
    sampling: Mapping[str, Any]

    def as_chat(self) -> dict[str, Any]:
        """Return a whole chat as an environment's reset or step names it."""
        messages = [message.for_template() for message in self.messages]
        return {"messages": messages, "tools": self.tools, "sampling": self.sampling}


class _Asked:
    """A request, or one of those that a request for several choices stands for, and the turn that answers it.

    Attributes:
        messages: Its chat.
        tools: Its tools.
        sampling: What it says of its turn.
        choice: Which of its choices the turn is, from 0 on.
        turn: The turn.
        came_at: When it came, in the event loop's time.
    """

    def __init__(self, messages: list[Message], tools: list[Any], sampling: dict[str, Any], choice: int) -> None:
        self.messages, self.tools, self.sampling, self.choice = messages, tools, sampling, choice
        loop = asyncio.get_running_loop()
        self.turn: asyncio.Future[Turn] = loop.create_future()
        self.came_at = loop.time()

    @property
    def identity(self) -> tuple[Any, ...]:
        """What tells it from others."""
        return self.messages, self.tools, self.sampling, self.choice

    @property
    def place(self) -> tuple[list[str], int]:
        """Its place in the order of requests that wait: that of their texts, and of their choices."""
        return [*map(repr, (self.messages, self.tools, self.sampling))], self.choice

    @property
    def chat(self) -> list[Message]:
        """Its chat with the turn."""
        return [*self.messages, self.turn.result().message]


class Conversation:
    """The chats of one trajectory, whose model is asked over HTTP.

    Args:
        asker: Who asks, for messages.
        prompt: What the first request begins with; None: it has the whole prompt.
        settings: What a request may set besides messages and model: anything.
        values: What it may set to one value only, that of the run; or, of a limit of tokens, to any.
        parser: How the model writes calls; None: it has none but those that `answer` is given.

    Attributes:
        owner: Who asks, once somebody has.
    """

    def __init__(
        self,
        asker: str,
        prompt: Sequence[Message] | None = None,
        settings: Collection[str] = (),
        values: Mapping[str, Any] | None = None,
        parser: str | None = "hermes",
    ) -> None:
        self._parser = parser
        self._prompt = None if prompt is None else [_stripped(*message) for message in prompt]
        self._asker = asker
        self._settings, self._values = {"messages", "model", *settings}, {**_WITHOUT_EFFECT, **(values or {})}
        self._asked: list[_Asked] = []
        self._answered: list[_Asked] = []
        self._texts: dict[str, str] = {}  # of all messages, each once: every request has the whole chat again
        self._pending: list[_Asked] = []  # in the order in which they came
        self._news = asyncio.Event()  # a request has come, or the trajectory has failed
        self._current: _Asked | None = None
        self._failure: ChatError | None = None
        self._counts: dict[str, float] = defaultdict(float)
        self.owner = ""

    @property
    def is_asked(self) -> bool:
        """Whether a request waits that `next_request` has not returned."""
        return bool(self._pending)

    @property
    def chats(self) -> list[list[Message]]:
        """The chats that no later one extends, with the turns that answered them, the newest one last."""
        chats = [asked.chat for asked in self._answered]
        return [
            chat
            for at, chat in enumerate(chats, start=1)
            if not any(later[: len(chat)] == chat for later in chats[at:])
        ]

    def ask(self, body: Any, owner: str = "") -> "list[asyncio.Future[Turn]]":
        """Return the turns that a request asks for: new ones, or, where they were asked for before, the same again.

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
            turns = list[asyncio.Future[Turn]]()
            for asked in self._read(body):
                known = next((before for before in reversed(self._asked) if before.identity == asked.identity), None)
                if known is None:
                    self._check(asked.messages)
                    self._asked.append(asked)
                    self._pending.append(asked)
                    self._news.set()
                elif asked.choice == 0:
                    self.count("repeated")
                turns.append((known or asked).turn)
            return turns
        except ChatError as error:
            self.fail(error)
            raise

    def answer(
        self,
        text: str,
        usage: Mapping[str, int] | None = None,
        *,
        stop: str = "",
        is_cut: bool = False,
        logprobs: Sequence[tuple[str, float]] = (),
        parsed: Mapping[str, Any] | None = None,
    ) -> None:
        """Give the model's turn to who asked for it: the request that `next_request` has returned.

        Args:
            text: What was sampled, up to the request's stop string.
            usage: What OpenAI reports of the tokens; None: nothing.
            stop: The stop string that has ended it; or none.
            is_cut: Whether the request's limit of tokens has.
            logprobs: The text and the log-prob of each token, if the request asks for them.
            parsed: What `rl_core.rollout.chat.ChatTemplate.parse` reads in the text; None: it is read here.

        Raises:
            ChatError: The trajectory has failed.
        """
        if self._failure is not None:
            raise self._failure
        asked, self._current = self._current, None
        assert asked is not None, "a turn that nobody asked for"
        self._answered.append(asked)
        number = len(self._answered)
        if parsed is None:
            message, reasoning = _read_turn(text, number, self._parser if asked.tools else None)
        else:
            message, reasoning = _with_calls(parsed["content"], parsed["calls"], number), parsed["reasoning"]
        asked.turn.set_result(Turn(number, message, reasoning, usage, stop, is_cut, logprobs))
        self._counts["seconds"] += asyncio.get_running_loop().time() - asked.came_at

    async def next_request(
        self,
        ended: "asyncio.Future[Any]",
        is_expected: Callable[[Request], bool] | None = None,
        settle: Callable[[], Awaitable[None]] | None = None,
    ) -> Request | None:
        """Return what the model is asked next; None if what asks has ended, whatever it has asked for before.

        Of several requests that wait, it is the one whose chat comes first in an order of texts: it doesn't matter
        which of them was faster.

        Args:
            ended: Done when what asks has ended.
            is_expected: Tells whether a request is the one that came next when the same was asked before. It is waited
                for, `EXPECTED_SECONDS` at most from another one on. None: any is.
            settle: Waits, once there is a request, until those that are on their way have come; None: it isn't known.

        Raises:
            ChatError: The trajectory has failed.
        """
        await self._wait_for_news(ended, lambda: self._pending)
        if settle is not None and not ended.done():
            await settle()
        if is_expected is not None and not ended.done():
            news = self._wait_for_news(ended, lambda: any(map(is_expected, map(self._request_of, self._pending))))
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(news, EXPECTED_SECONDS)
        if self._failure is not None:
            raise self._failure
        if ended.done():
            return None
        chosen = [asked for asked in self._pending if is_expected is None or is_expected(self._request_of(asked))]
        self._current = min(chosen or self._pending, key=lambda asked: asked.place)
        self._pending.remove(self._current)
        return self._request_of(self._current)

    async def _wait_for_news(self, ended: "asyncio.Future[Any]", is_there: Callable[[], object]) -> None:
        """Wait until something is there, or what asks has ended; raises a `ChatError` if the trajectory has failed."""
        while self._failure is None and not is_there() and not ended.done():
            self._news.clear()
            news = asyncio.create_task(self._news.wait())
            try:
                await asyncio.wait({news, ended}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                news.cancel()
        if self._failure is not None:
            raise self._failure

    def observe(self, request: Request) -> tuple[list[str] | dict[str, Any], str]:
        """Return a request after the first turn as an environment's observation, and the role of its texts."""
        if request.after is None:
            return request.as_chat(), "user"
        texts, role = [message.content for message in request.messages], request.messages[0].role
        if request.after == len(self._answered) and not request.sampling:
            return texts, role
        return {"observation": texts, "after": request.after, "sampling": request.sampling}, role

    def count(self, kind: str) -> None:
        """Count a request of a kind: an API's name, `repeated`, `refused` or `unrested`."""
        self._counts[kind] += 1

    def take_counts(self) -> dict[str, float]:
        """Return what was counted since the last call, and `seconds` from a request to its turn, if one was given."""
        counts, self._counts = dict(self._counts), defaultdict(float)
        return counts

    def fail(self, error: ChatError) -> None:
        """Refuse all requests from now on, for this reason or an earlier one."""
        if self._failure is None:
            self._failure = error
            self._news.set()
            for asked in self._asked:
                if not asked.turn.done():
                    asked.turn.set_exception(error)
                    asked.turn.exception()  # nobody may be waiting any more

    def _request_of(self, asked: _Asked) -> Request:
        """Return what a request asks: what it adds to the longest chat that it extends, or its whole chat."""
        if not self._answered and self._prompt is not None and not asked.tools:
            return Request(asked.messages[len(self._prompt) :], 0, asked.tools, asked.sampling)
        extended = [
            (len(before.chat), number)
            for number, before in enumerate(self._answered, start=1)
            if before.tools == asked.tools and _extends(asked.messages, before.chat)
        ]
        if not extended:
            return Request(asked.messages, None, asked.tools, asked.sampling)
        length, number = max(extended)
        return Request(asked.messages[length:], number, asked.tools, asked.sampling)

    def _check(self, messages: list[Message]) -> None:
        """Check a request that wasn't asked before."""
        if (not messages and self._prompt is None) or (messages[-1:] and messages[-1].role == "assistant"):
            raise ChatError(f"{self._asker} asks its model for a turn after its own, or after nothing")
        if self._asked or self._prompt is None:
            return
        for at, expected in enumerate(self._prompt):
            found = messages[at] if at < len(messages) else None
            if found != expected:
                raise ChatError(
                    f"{self._asker} doesn't extend the chat: message {at} of its request is {found!r:.200}, but was "
                    f"{expected!r:.200}; its first request begins with the data row's prompt"
                )
        roles = [message.role for message in messages[len(self._prompt) :]]
        if "assistant" in roles or len(set(roles)) > 1:
            raise ChatError(
                f"the first request adds messages of roles {', '.join(roles)}; all must be of one, and not the model's"
            )

    def _read(self, body: Any) -> list[_Asked]:
        """Return a request, once for each choice that it asks for."""
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
        read = (_read_message(at, message) for at, message in enumerate(messages))
        chat = [message._replace(content=self._texts.setdefault(message.content, message.content)) for message in read]
        tools, sampling = self._read_tools(body.get("tools") or []), self._read_sampling(body)
        count = 1 if body.get("n") is None else body["n"]
        if count not in range(1, MAX_CHOICES + 1):
            raise ChatError(f"{self._asker} asks its model with n = {count!r:.80}, expected 1 to {MAX_CHOICES}")
        return [_Asked(chat, tools, sampling, choice) for choice in range(int(count))]

    def _read_sampling(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a request says of its turn, without what the run's settings say, too."""
        stop, logprobs = body.get("stop") or [], body.get("logprobs") or False
        stop = [stop] if isinstance(stop, str) else stop
        if not isinstance(stop, list) or not all(isinstance(each, str) and each for each in stop):
            raise ChatError(f"{self._asker} asks its model with stop = {stop!r:.80}, expected texts that aren't empty")
        if not isinstance(logprobs, bool):
            raise ChatError(f"{self._asker} asks its model with logprobs = {logprobs!r:.80}, expected true or false")
        limits = [body[name] for name in _LIMITS if (body.get(name) or math.inf) < self._values.get(name, 0)]
        sampling = {"stop": stop, "max_tokens": min(limits, default=0), "logprobs": logprobs}
        return {name: value for name, value in sampling.items() if value}

    def _read_tools(self, tools: Any) -> list[Any]:
        if not isinstance(tools, list) or not all(
            isinstance(tool, dict) and tool.get("type") == "function" and isinstance(tool.get("function"), dict)
            for tool in tools
        ):
            raise ChatError(f"{self._asker} asks its model with tools that are not functions: {tools!r:.200}")
        try:
            json.dumps(tools, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError) as error:
            raise ChatError(f"{self._asker} asks its model with tools that can't be encoded: {error}") from None
        return tools

    def _allows(self, name: str, value: Any) -> bool:
        if value is None or name in self._settings:
            return True
        if name in _LIMITS and name in self._values and type(value) is int:
            return value > 0
        return name in self._values and value == self._values[name]


def _extends(messages: Sequence[Message], chat: Sequence[Message]) -> bool:
    """Return whether a request's messages go on from a chat token by token, by messages of one role."""
    added = messages[len(chat) :]
    roles = {message.role for message in added}
    if list(messages[: len(chat)]) != chat or len(roles) != 1 or "assistant" in roles:
        return False
    asked = [key for key, _, _ in chat[-1].calls]
    return not asked or asked == [message.answered for message in added]


def _read_turn(action: str, number: int, parser: str | None) -> tuple[Message, str]:
    """Return a turn as a message, and its reasoning; if one of its calls can't be read, all of it is text."""
    answer, reasoning = without_reasoning(action), ""
    if len(answer) < len(action):
        before = action[: len(action) - len(answer)].removesuffix("</think>")
        reasoning = before.partition("<think>")[2] or before
    parsed = PARSERS[parser](action) if parser else ()
    calls = [call for call in parsed if isinstance(call, Call)]
    if not calls or len(calls) < len(parsed):
        return _stripped("assistant", answer), reasoning
    content = "" if parser == "json" else answer.partition("<tool_call>")[0].strip()
    return _with_calls(content, calls, number), reasoning


def _with_calls(content: str, calls: Sequence[Call], number: int) -> Message:
    """Return a turn as a message with calls of tools, whose ids are made of its number."""
    numbered = ((f"call-{number}-{at}", name, arguments) for at, (name, arguments) in enumerate(calls, start=1))
    return _stripped("assistant", content, tuple(numbered))


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
