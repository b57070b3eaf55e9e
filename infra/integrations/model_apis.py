"""The APIs by which a model is asked: OpenAI's chat completions and Responses, and Anthropic's Messages.

A request of each becomes one of chat completions, which a `Conversation` takes, and the turn that answers it is written
as its API has it. What would be trained on wrongly stays in the request, and is refused there by its own name. Needs
what `conversation` needs, and aiohttp.
"""

import asyncio
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import Context
from functools import partial
from typing import Any, NamedTuple

from aiohttp import web

from infra.integrations.conversation import ChatError, Conversation, Turn

MODEL = "policy"
MAX_REQUEST_BYTES = 2**24
ALIVE_SECONDS = 15.0  # between two signs of life to a client that waits for a stream
UNSIGNED = "unsigned"  # the signature of Anthropic's blocks of reasoning, which clients take for a part of it

Json = dict[str, Any]


class ModelApi(NamedTuple):
    """An API.

    Attributes:
        path: Its path, after that of all APIs.
        read: Returns a request's body as one of chat completions; raises a `ChatError` if it can't be.
        write: Returns the answer that turns, the request's choices, are to its body; all APIs but one have one turn.
        stream: Returns the same as the objects of a stream.
        end: What comes after them.
        error: Returns an error with a status and a message.
    """

    path: str
    read: Callable[[Json], Json]
    write: Callable[[Sequence[Turn], Json], Json]
    stream: Callable[[Sequence[Turn], Json], Iterator[Json]]
    end: str
    error: Callable[[int, str], Json]

    @property
    def name(self) -> str:
        """Its name in metrics."""
        return self.path.replace("/", "_")

    def refusal(self, status: int, message: str) -> web.Response:
        """Return the answer that is an error."""
        return web.json_response(self.error(status, message), status=status)


async def serve(answer: Callable[..., Any], base: str, path: str | None = None) -> str:
    """Serve the APIs on the loopback interface until this process ends; return the server's URL.

    Args:
        answer: Answers a request, and takes its `ModelApi` by the name `api`.
        base: The path of all of them, of aiohttp's form.
        path: Of a Unix socket at which they are, too.
    """
    app = web.Application(client_max_size=MAX_REQUEST_BYTES)
    for api in (CHAT_COMPLETIONS, RESPONSES, MESSAGES):
        app.router.add_post(f"{base}/{api.path}", partial(answer, api=api))
    app.router.add_post(f"{base}/{MESSAGES.path}/count_tokens", _count_tokens)
    app.router.add_get(f"{base}/models", _list_models)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        if path is not None:
            await web.SockSite(runner, _unix_socket(path)).start()
    except OSError:
        await runner.cleanup()
        raise
    return url


def _unix_socket(path: str) -> socket.socket:
    """Return a socket that is bound to a path; that may be longer than a socket's address."""
    bound, folder = socket.socket(socket.AF_UNIX), os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY)
    try:
        bound.bind(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
    finally:
        os.close(folder)
    return bound


def begin_task(coroutine: Any) -> "asyncio.Task[Any]":
    """Begin a task that belongs to no environment's call, whose time it would otherwise take."""
    return Context().run(asyncio.create_task, coroutine)


async def complete(
    request: web.Request, conversation: Conversation, api: ModelApi, owner: str = ""
) -> web.StreamResponse:
    """Answer a request by the turn that it asks for, or by what is wrong with it."""
    conversation.count(api.name)
    try:
        try:
            body = json.loads(await request.read())
            chat = api.read(body) if isinstance(body, dict) else body
        except web.HTTPRequestEntityTooLarge:
            raise ChatError(f"a request has more than {MAX_REQUEST_BYTES:,} bytes") from None
        except (ValueError, RecursionError) as error:
            raise ChatError(f"a request is not JSON: {error}") from None
        asked = conversation.ask(chat, owner)
        if body.get("stream"):
            return await _stream(request, asked, api, body)
        await asyncio.wait(asked)
        return web.json_response(api.write([each.result() for each in asked], body))
    except ChatError as error:
        conversation.count("refused")
        conversation.fail(error)
        return api.refusal(400, str(error))


async def _stream(
    request: web.Request, asked: "Sequence[asyncio.Future[Turn]]", api: ModelApi, body: Json
) -> web.StreamResponse:
    """Answer a request by its turns in parts: they have ended before the first one is sent."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    while (await asyncio.wait(asked, timeout=ALIVE_SECONDS))[1]:
        if not response.prepared:
            await response.prepare(request)
        await response.write(b": the turn is not there yet\n\n")  # a comment, which clients leave out
    if not response.prepared:
        [each.result() for each in asked]
        await response.prepare(request)
    try:
        parts = [*api.stream([each.result() for each in asked], body)]
    except ChatError as error:
        parts = [api.error(400, str(error))]
    for part in parts:
        event = f"event: {part['type']}\n" if "type" in part else ""
        await response.write(f"{event}data: {json.dumps(part)}\n\n".encode())
    await response.write_eof(api.end.encode())
    return response


async def _list_models(request: web.Request) -> web.Response:
    """Answer by the one model, as both OpenAI and Anthropic write it."""
    openai = {"id": MODEL, "object": "model", "created": 0, "owned_by": "sluice"}
    anthropic = {"type": "model", "display_name": MODEL, "created_at": "1970-01-01T00:00:00Z"}
    pages = {"has_more": False, "first_id": MODEL, "last_id": MODEL}
    return web.json_response({"object": "list", "data": [openai | anthropic], **pages})


async def _count_tokens(request: web.Request) -> web.Response:
    message = "tokens can't be counted here; each answer has the number of its own and of those before it as its usage"
    return MESSAGES.refusal(404, message)


def _read_completion(body: Json) -> Json:
    messages = body.get("messages")
    return body | {"messages": [*map(_with_known_role, messages)]} if isinstance(messages, list) else body


def _with_known_role(message: Any) -> Any:
    """Return a message whose role templates know: OpenAI's newer models take a system's message as a developer's."""
    return message | {"role": "system"} if isinstance(message, dict) and message.get("role") == "developer" else message


def _write_completion(turns: Sequence[Turn], body: Json) -> Json:
    choices = [{"message": turn.message.as_openai() | _reasoning(turn), **_ending(turn)} for turn in turns]
    return _part(turns, "chat.completion", dict(enumerate(choices))) | _usage(turns)


def _stream_completion(turns: Sequence[Turn], body: Json) -> Iterator[Json]:
    kind = "chat.completion.chunk"
    for at, turn in enumerate(turns):
        message = turn.message.as_openai()
        calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls", ()))]
        deltas: list[Json] = [
            {"role": message["role"], "content": ""},
            _reasoning(turn),
            {"content": message["content"]} if message["content"] else {},
            {"tool_calls": calls} if calls else {},
        ]
        for delta in filter(None, deltas):
            yield _part(turns, kind, {at: {"delta": delta, "finish_reason": None}})
        yield _part(turns, kind, {at: {"delta": {}, **_ending(turn)}})
    options = body.get("stream_options")
    if (usage := _usage(turns)) and isinstance(options, dict) and options.get("include_usage"):
        yield _part(turns, kind, {}) | usage


def _usage(turns: Sequence[Turn]) -> Json:
    """Return what OpenAI reports of the tokens, those of the chat once; nothing if they aren't known."""
    known = [turn.usage for turn in turns if turn.usage]
    if not known:
        return {}
    before, sampled = known[0]["prompt_tokens"], sum(usage["completion_tokens"] for usage in known)
    return {"usage": {"prompt_tokens": before, "completion_tokens": sampled, "total_tokens": before + sampled}}


def _reasoning(turn: Turn) -> dict[str, str]:
    return {"reasoning_content": turn.reasoning} if turn.reasoning else {}


def _ending(turn: Turn) -> Json:
    """Return why a turn has ended, and the log-probs of its tokens, if they were asked for."""
    reason = "length" if turn.is_cut else "tool_calls" if turn.message.calls else "stop"
    logprobs = {"logprobs": {"content": _logprobs(turn), "refusal": None}} if turn.logprobs else {}
    return {"finish_reason": reason, **logprobs}


def _logprobs(turn: Turn) -> list[Json]:
    """Return the log-probs of a turn's tokens; a text that is not a whole character has no bytes."""
    return [
        {"token": text, "logprob": value, "bytes": None if "\ufffd" in text else [*text.encode()], "top_logprobs": []}
        for text, value in turn.logprobs
    ]


def _part(turns: Sequence[Turn], kind: str, choices: Mapping[int, Json]) -> Json:
    """Return turns, or a part of them, as chat completions have them, by the numbers of the choices."""
    written = [{"index": at, **choice} for at, choice in choices.items()]
    return {"id": f"turn-{turns[0].number}", "object": kind, "created": 0, "model": MODEL, "choices": written}


def _openai_error(status: int, message: str) -> Json:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}


CHAT_COMPLETIONS = ModelApi(
    "chat/completions", _read_completion, _write_completion, _stream_completion, "data: [DONE]\n\n", _openai_error
)

# What is without effect here: whatever its value is, or with this one.
_RESPONSES_IGNORED = {
    "client_metadata",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "store",
}
_RESPONSES_DEFAULTS = {
    "background": False,
    "service_tier": "auto",
    "text": {"format": {"type": "text"}},
    "truncation": "disabled",
}
_ENCRYPTED, _LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"  # what may be included
_OF_MESSAGES = {"content", "id", "phase", "role", "status", "type"}
_TEXTS = ("input_text", "output_text")


def _read_responses(body: Json) -> Json:
    """Return a request of the Responses API as one of chat completions."""
    chat = _without(body, _RESPONSES_IGNORED, _RESPONSES_DEFAULTS)
    if "previous_response_id" in chat:
        raise ChatError(
            f"a request has previous_response_id = {chat['previous_response_id']!r:.80}, but no response is stored "
            "here; give the whole chat as input"
        )
    if isinstance(reasoning := chat.get("reasoning"), dict):
        chat["reasoning"] = _without(reasoning, {"summary"}, {}) or None  # which comes whole
    if isinstance(include := chat.get("include"), list) and all(each in (_ENCRYPTED, _LOGPROBS) for each in include):
        chat["logprobs"] = _LOGPROBS in chat.pop("include")  # reasoning need not come back
    given, instructions = chat.pop("input", None), chat.pop("instructions", None)
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise ChatError("a request has no input, a text or a list of items")
    chat["messages"] = [{"role": "system", "content": instructions}] if instructions else []
    for at, item in enumerate(given):
        _add_item(chat["messages"], at, item)
    return _with_functions(chat, _read_responses_tool)


def _add_item(messages: list[Any], at: int, item: Any) -> None:
    """Add an item of the Responses API to a chat; what is not an object is refused there."""
    kind = (item.get("type") or "message") if isinstance(item, dict) else "message"
    if kind == "message":
        if isinstance(item, dict):
            unread = sorted(name for name, value in item.items() if value and name not in _OF_MESSAGES)
            if unread:
                raise ChatError(
                    f"item {at} of a request's input has {', '.join(unread)}; the model reads role and content only"
                )
            item = _with_known_role({"role": item.get("role"), "content": _texts(item.get("content"))})
        messages.append(item)
    elif kind == "function_call":
        before = messages[-1] if messages else None
        if not isinstance(before, dict) or before.get("role") != "assistant":
            messages.append({"role": "assistant", "content": ""})
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        messages[-1].setdefault("tool_calls", []).append({"id": item.get("call_id"), "function": function})
    elif kind == "function_call_output":
        messages.append(_tool_message(item.get("call_id"), item.get("output")))
    elif kind != "reasoning":
        raise ChatError(
            f"item {at} of a request's input is of type {kind!r:.80}; the model reads items of type message, "
            "function_call and function_call_output only"
        )


def _read_responses_tool(tool: Json) -> Json | None:
    return {name: value for name, value in tool.items() if name != "type"} if tool.get("type") == "function" else None


def _write_response(turns: Sequence[Turn], body: Json) -> Json:
    """Return a turn as the Responses API has it."""
    (turn,) = turns
    number, items = turn.number, list[Json]()
    if turn.reasoning:
        content = [{"type": "reasoning_text", "text": turn.reasoning}]
        items.append({"id": f"rs_{number}", "type": "reasoning", "summary": [], "content": content})
    if turn.message.content or not turn.message.calls:
        text = {"type": "output_text", "text": turn.message.content, "annotations": [], "logprobs": _logprobs(turn)}
        items.append({"id": f"msg_{number}", "type": "message", "role": "assistant", "content": [text]})
    for at, (key, name, arguments) in enumerate(turn.message.calls, start=1):
        call = {"call_id": key, "name": name, "arguments": json.dumps(arguments)}
        items.append({"id": f"fc_{number}_{at}", "type": "function_call", **call})
    status = "incomplete" if turn.is_cut else "completed"
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": 0,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if turn.is_cut else None,
        "instructions": body.get("instructions"),
        "model": MODEL,
        "output": [item | {"status": status} for item in items],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": body.get("temperature"),
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p"),
        "usage": _response_usage(turn.usage) if turn.usage else None,
    }


def _response_usage(usage: Mapping[str, int]) -> Json:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},  # which are not counted on their own
        "total_tokens": usage["total_tokens"],
    }


def _stream_response(turns: Sequence[Turn], body: Json) -> Iterator[Json]:
    for number, (kind, fields) in enumerate(_response_events(_write_response(turns, body))):
        yield {"type": f"response.{kind}", "sequence_number": number, **fields}


def _response_events(response: Json) -> Iterator[tuple[str, Json]]:
    """Return the kinds of a response's events, and what they have: a text or the arguments of a call in one part."""
    begun = response | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield "created", {"response": begun}
    yield "in_progress", {"response": begun}
    for at, item in enumerate(response["output"]):
        empty: Json = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        yield "output_item.added", {"output_index": at, "item": item | empty | {"status": "in_progress"}}
        place = {"output_index": at, "item_id": item["id"]}
        if item["type"] == "function_call":
            arguments = item["arguments"]
            yield "function_call_arguments.delta", {**place, "delta": arguments}
            yield "function_call_arguments.done", {**place, "name": item["name"], "arguments": arguments}
        else:
            (part,), place = item["content"], {**place, "content_index": 0}
            probabilities = {name: value for name, value in part.items() if name == "logprobs"}
            yield "content_part.added", {**place, "part": part | {"text": ""} | {key: [] for key in probabilities}}
            yield f"{part['type']}.delta", {**place, "delta": part["text"], **probabilities}
            yield f"{part['type']}.done", {**place, "text": part["text"], **probabilities}
            yield "content_part.done", {**place, "part": part}
        yield "output_item.done", {"output_index": at, "item": item}
    yield response["status"], {"response": response}


RESPONSES = ModelApi("responses", _read_responses, _write_response, _stream_response, "", _openai_error)

_MESSAGES_IGNORED = {"cache_control"}
_MESSAGES_DEFAULTS = {"service_tier": "auto", "thinking": {"type": "disabled"}}
_AUTO = ({"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": False})
_OF_MESSAGES_TOOLS = {"cache_control", "eager_input_streaming", "input_schema", "type"}
_ANTHROPIC_ERRORS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}


def _read_messages(body: Json) -> Json:
    """Return a request of the Messages API as one of chat completions."""
    chat = _without(body, _MESSAGES_IGNORED, _MESSAGES_DEFAULTS)
    if _wants_reasoning(body):
        del chat["thinking"]
    if chat.get("tool_choice") in _AUTO:
        del chat["tool_choice"]
    if "stop_sequences" in chat:
        chat["stop"] = chat.pop("stop_sequences")
    system, given = chat.pop("system", None), chat.get("messages")
    if isinstance(given, list):
        first = [{"role": "system", "content": system}] if system else []
        chat["messages"] = first + [part for message in given for part in _split(message)]
    return _with_functions(chat, _read_messages_tool)


def _wants_reasoning(body: Json) -> bool:
    """Return whether a request leaves it to the model how long it reasons, and asks for the reasoning."""
    return isinstance(thinking := body.get("thinking"), dict) and thinking.get("type") == "adaptive"


def _split(message: Any) -> list[Any]:
    """Return a message of the Messages API as those of a chat: results of tools are messages of their own there."""
    if not isinstance(message, dict) or not isinstance(blocks := message.get("content"), list):
        return [message]
    if unread := sorted(name for name, value in message.items() if value and name not in ("role", "content")):
        raise ChatError(f"a message of a request has {', '.join(unread)}; the model reads role and content only")
    messages: list[Json] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result":
            messages.append(_tool_message(block.get("tool_use_id"), block.get("content")))
            continue
        if not messages or messages[-1]["role"] == "tool":
            messages.append({"role": message.get("role"), "content": []})
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input"))}
            messages[-1].setdefault("tool_calls", []).append({"id": block.get("id"), "function": function})
        elif kind not in ("thinking", "redacted_thinking"):
            messages[-1]["content"].append(block)
    return messages or [{"role": message.get("role"), "content": ""}]


def _read_messages_tool(tool: Json) -> Json | None:
    if tool.get("type", "custom") != "custom" or "input_schema" not in tool:
        return None
    others = {name: value for name, value in tool.items() if name not in _OF_MESSAGES_TOOLS}
    return others | {"parameters": tool["input_schema"]}


def _write_message(turns: Sequence[Turn], body: Json) -> Json:
    """Return a turn as the Messages API has it."""
    (turn,) = turns
    content: list[Json] = []
    if turn.reasoning and _wants_reasoning(body):
        content.append({"type": "thinking", "thinking": turn.reasoning, "signature": UNSIGNED})
    if turn.message.content:
        content.append({"type": "text", "text": turn.message.content})
    for key, name, arguments in turn.message.calls:
        content.append({"type": "tool_use", "id": key, "name": name, "input": arguments})
    reason = "tool_use" if turn.message.calls else "stop_sequence" if turn.stop else "end_turn"
    return {
        "id": f"msg_{turn.number}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": content,
        "stop_reason": "max_tokens" if turn.is_cut else reason,
        "stop_sequence": turn.stop or None,
        "usage": _message_usage(turn.usage) if turn.usage else {},
    }


def _message_usage(usage: Mapping[str, int]) -> Json:
    return {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}


def _stream_message(turns: Sequence[Turn], body: Json) -> Iterator[Json]:
    message = _write_message(turns, body)
    begun = {
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": message["usage"] | {"output_tokens": 0},
    }
    yield {"type": "message_start", "message": message | begun}
    for at, block in enumerate(message["content"]):
        empty, deltas = _block_deltas(block)
        yield {"type": "content_block_start", "index": at, "content_block": block | empty}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": at, "delta": delta}
        yield {"type": "content_block_stop", "index": at}
    end = {name: message[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": end, "usage": message["usage"]}
    yield {"type": "message_stop"}


def _block_deltas(block: Json) -> tuple[Json, list[Json]]:
    """Return what a block begins with in a stream, and what is then added to it."""
    if block["type"] == "tool_use":
        return {"input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
    if block["type"] == "text":
        return {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
    signature = {"type": "signature_delta", "signature": block["signature"]}
    return {"thinking": "", "signature": ""}, [{"type": "thinking_delta", "thinking": block["thinking"]}, signature]


def _anthropic_error(status: int, message: str) -> Json:
    return {"type": "error", "error": {"type": _ANTHROPIC_ERRORS[status], "message": message}}


MESSAGES = ModelApi("messages", _read_messages, _write_message, _stream_message, "", _anthropic_error)


def _without(body: Json, ignored: set[str], defaults: Mapping[str, Any]) -> Json:
    """Return a request without what is empty, or without effect here."""
    return {
        name: value
        for name, value in body.items()
        if not (name in ignored or value in (None, [], {}) or (name in defaults and value == defaults[name]))
    }


def _with_functions(chat: Json, read: Callable[[Json], Json | None]) -> Json:
    """Return a request with its tools as chat completions have them, by what reads one that is a function.

    Raises:
        ChatError: It asks for several choices, which its API doesn't have.
    """
    if chat.get("n", 1) != 1:
        raise ChatError(f"a request has n = {chat['n']!r:.80}, but only chat completions have several choices")
    tools = chat.get("tools")
    return chat | {"tools": [_tool(tool, read) for tool in tools]} if isinstance(tools, list) else chat


def _tool(tool: Any, read: Callable[[Json], Json | None]) -> Json:
    """Return a tool as chat completions have it, the same whichever API it comes by; raises if it is no function."""
    function = read(tool) if isinstance(tool, dict) else None
    if function is None:
        raise ChatError(f"a request has the tool {tool!r:.200}, which is not a function with a schema")
    known = {name: function.pop(name, None) for name in ("name", "description", "parameters", "strict")}
    if others := sorted(name for name, value in function.items() if value):
        raise ChatError(f"tool {known['name']!r:.80} has {', '.join(others)}; the model reads name and schema only")
    return {"type": "function", "function": {name: value for name, value in known.items() if value is not None}}


def _tool_message(key: Any, content: Any) -> Json:
    return {"role": "tool", "tool_call_id": key, "content": _texts(content)}


def _texts(content: Any) -> Any:
    """Return a content whose texts are of the type that chat completions know."""
    if not isinstance(content, list):
        return content
    is_text = [isinstance(part, dict) and part.get("type") in _TEXTS for part in content]
    return [part | {"type": "text"} if known else part for part, known in zip(content, is_text, strict=True)]
