"""The APIs of a program's model other than chat completions: OpenAI's Responses and Anthropic's Messages."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web

from infra.environments.open import environment_class
from infra.environments.program import SETTINGS
from infra.integrations import model_apis
from infra.integrations.conversation import ChatError, Conversation
from infra.integrations.model_apis import ModelApi, complete, serve
from schemas.config.environment import ProgramEnvironment
from schemas.config.rollout import TransformersRollout
from tests.support.programs import begin, failure, program, row, started, turns

CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": %d}}</tool_call>'
TURN = f"<think>so</think>I add. {CALL % 3} and {CALL % 4}"
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}},
}

# Each asks for turns of the model until one has no call, and prints the sum of what it calls. What differs is the API.
LOOP = """
    PARAMETERS = {"type": "object", "properties": {}}

    def read(body):
        # the answer, or the one that the events of a stream add up to
        if not stream:
            return json.loads(body)
        events = []
        for part in body.decode().split("\\n\\n")[:-1]:
            kind, data = part.split("\\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert kind == "event: " + events[-1]["type"]
        return add_up(events)

    stream, total = task["answer"] == "stream", 0
    while True:
        body = request()
        status, answer = post(body, path=PATH)
        if status != 200:
            sys.exit(answer.decode())
        assert post(body, path=PATH) == (status, answer), "the same request has another answer"
        answer = read(answer)
        print(answer, file=sys.stderr)
        calls = take(answer)
        if not calls:
            finish(total)
        total += sum(sum(call.values()) for call in calls)
"""
RESPONSES = """
    PATH, items = "responses", [{"role": "user", "content": [{"type": "input_text", "text": "Begin."}]}]

    def request():
        tool = {"type": "function", "name": "add", "parameters": PARAMETERS, "description": "adds", "strict": None}
        without_effect = {
            "store": True, "include": ["reasoning.encrypted_content"], "reasoning": {"effort": None, "summary": "auto"},
            "text": {"format": {"type": "text"}}, "truncation": "disabled", "parallel_tool_calls": True,
        }
        limits = {"max_output_tokens": 256, "temperature": 1.0, "stream": stream}
        return {"instructions": "You add.", "input": items, "tools": [tool], **without_effect, **limits}

    def take(answer):
        assert (answer["object"], answer["status"], answer["model"]) == ("response", "completed", "policy")
        usage, count = answer["usage"], task["info"]["tokens"].pop(0)
        assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (10, count, 10 + count)
        items.extend(answer["output"])
        called = [item for item in answer["output"] if item["type"] == "function_call"]
        calls = [json.loads(call["arguments"]) for call in called]
        items.extend(
            {"type": "function_call_output", "call_id": item["call_id"], "output": str(sum(call.values()))}
            for item, call in zip(called, calls)
        )
        assert answer["id"] != "resp_1" or [item["type"] for item in answer["output"]] == [
            "reasoning", "message", "function_call", "function_call"
        ]
        return calls

    def add_up(events):
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
        assert events[0]["response"]["output"] == []
        added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
        for event in events:
            kind, item = event["type"].removeprefix("response."), added[event.get("output_index", 0)]
            assert event.get("item_id", item["id"]) == item["id"]
            if kind == "content_part.added":
                item["content"].append(event["part"])
            elif kind in ("output_text.delta", "reasoning_text.delta"):
                item["content"][event["content_index"]]["text"] += event["delta"]
            elif kind == "function_call_arguments.delta":
                item["arguments"] += event["delta"]
            elif kind == "output_item.done":
                assert item | {"status": "completed"} == event["item"], (item, event)
        assert events[-1]["type"] == "response.completed"
        assert events[-1]["response"]["output"] == [item | {"status": "completed"} for item in added]
        return events[-1]["response"]
"""
MESSAGES = """
    PATH, messages = "messages?beta=true", [{"role": "user", "content": "Begin."}]

    def request():
        kept = {"cache_control": {"type": "ephemeral"}}
        tool = {"name": "add", "description": "adds", "input_schema": PARAMETERS, **kept}
        asked = {"max_tokens": 256, "temperature": 1.0, "stream": stream, "stop_sequences": []}
        system = [{"type": "text", "text": "You add.", **kept}]
        settings = {"thinking": {"type": "adaptive"}, "tool_choice": {"type": "auto"}, "metadata": {"user_id": "a"}}
        return {"system": system, "messages": messages, "tools": [tool], **asked, **settings}

    def take(answer):
        assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "policy")
        assert answer["usage"] == {"input_tokens": 10, "output_tokens": task["info"]["tokens"].pop(0)}
        kinds = [block["type"] for block in answer["content"]]
        if answer["id"] == "msg_1":
            assert kinds == ["thinking", "text", "tool_use", "tool_use"]
        assert answer["stop_reason"] == ("tool_use" if "tool_use" in kinds else "end_turn")
        messages.append({"role": "assistant", "content": answer["content"]})
        called = [block for block in answer["content"] if block["type"] == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": str(sum(block["input"].values()))}
            for block in called
        ]
        if len(results) == 2:
            results[1] |= {"content": [{"type": "text", "text": results[1]["content"]}], "is_error": False}
        messages.append({"role": "user", "content": results})
        return [block["input"] for block in called]

    def add_up(events):
        assert events.pop()["type"] == "message_stop"
        message = events[0]["message"]
        assert (events[0]["type"], message["content"], message["stop_reason"]) == ("message_start", [], None)
        texts = []
        for event in events[1:]:
            if event["type"] == "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                texts.append("")
            elif event["type"] == "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                if delta["type"] == "input_json_delta":
                    block["input"] = json.loads(delta["partial_json"])
                else:
                    block[delta["type"].removesuffix("_delta")] += delta[delta["type"].removesuffix("_delta")]
            elif event["type"] == "message_delta":
                message |= {**event["delta"], "usage": event["usage"]}
        return message
"""
CHAT = """
    PATH, messages = "chat/completions", [{"role": "system", "content": "You add."}, *messages]

    def request():
        function = {"name": "add", "description": "adds", "parameters": PARAMETERS}
        return {"messages": messages, "tools": [{"type": "function", "function": function}]}

    def take(answer):
        messages.append(answer["choices"][0]["message"])
        called = messages[-1].get("tool_calls", [])
        calls = [json.loads(call["function"]["arguments"]) for call in called]
        for call, arguments in zip(called, calls):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(sum(arguments.values()))})
        return calls
"""


@pytest.mark.parametrize("code", [CHAT, RESPONSES, MESSAGES], ids=["chat", "responses", "messages"])
def test_every_api_shows_the_model_the_same(tmp_path: Path, code: str) -> None:
    with started(program(tmp_path, code + LOOP)) as pool:
        tokens = [len(TURN), len(CALL % 5), len(" 18 ")]
        replies = begin(pool, row(tokens=tokens), row("stream" if code != CHAT else "", tokens=tokens))
        for reply in replies.values():
            assert reply.failure is None
            assert (reply.roles, reply.observations) == (("system", "user"), ("You add.", "Begin."))
            assert json.loads(reply.tools) == [TOOL]
        assert replies[0].tools == replies[1].tools
        for reply in turns(pool, [TURN, TURN]).values():
            assert (reply.failure, reply.observations, reply.role) == (None, ("5", "6"), "tool")
        for reply in turns(pool, [CALL % 5] * 2).values():  # without a text
            assert (reply.failure, reply.observations, reply.role) == (None, ("7",), "tool")
        assert [(reply.failure, reply.reward) for reply in turns(pool, [" 18 "] * 2).values()] == [(None, 18.0)] * 2


def test_chats_go_on_by_texts(tmp_path: Path) -> None:
    code = """
        first = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
        asked = {"messages": [first], "max_tokens": 999, "system": "s"}
        answer = json.loads(post(asked, path="messages")[1])["content"]
        asked["messages"] += [{"role": "assistant", "content": answer}, {"role": "user", "content": "c"}]
        said = json.loads(post(asked, path="messages")[1])["content"][0]["text"]
        items = [
            {"role": "developer", "content": "s"},
            {"role": "user", "content": [{"type": "input_text", "text": "a\\nb"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": answer[0]["text"]}]},
            {"role": "user", "content": "c"},
            {"role": "assistant", "content": said, "id": "msg_2", "status": "completed", "phase": "final_answer"},
            {"role": "user", "content": "d"},
        ]
        response = json.loads(post({"input": items}, path="responses")[1])
        messages = [{"role": item["role"], "content": item["content"]} for item in items]
        messages[1]["content"], messages[2]["content"] = "a\\nb", answer[0]["text"]
        messages += [{"role": "assistant", "content": response["output"][-1]["content"][0]["text"]}]
        say("e")
        finish(float(ask()), kinds=len(answer), items=len(response["output"]))
    """
    with started(program(tmp_path, code)) as pool:
        reply = begin(pool)[0]
        assert (reply.roles, reply.observations, reply.tools) == (("system", "user"), ("s", "a\nb"), "")
        assert turns(pool, ["<think>why</think>x"])[0].observations == ("c",)  # nobody asked for the reasoning
        assert turns(pool, ["y"])[0].observations == ("d",)
        assert turns(pool, ["<think>hm</think>z"])[0].observations == ("e",)
        reply = turns(pool, ["0.5"])[0]
        assert (reply.reward, reply.metrics) == (0.5, {"kinds": 1.0, "items": 2.0})


IMAGE = {"type": "input_image", "image_url": "x"}
F = {"type": "function", "name": "f", "parameters": {}}
BASH = {"type": "bash_20250124", "name": "bash"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "a request has no input, a text or a list of items"),
        ({"input": 3}, "a request has no input, a text or a list of items"),
        ({"input": [3]}, "message 0 of a request is 3, expected an object"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "has content of type input_image"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "item 0 of a request's input is of type 'item_reference'"),
        ({"input": [{"role": "user", "name": "a"}]}, "item 0 of a request's input has name"),
        ({"input": [{"type": "function_call"}]}, "message 0 of a request has tool calls that can't be read"),
        ({"previous_response_id": "resp_1"}, "has previous_response_id = 'resp_1', but no response is stored"),
        ({"input": "x", "conversation": "c"}, "conversation = 'c', but here"),
        ({"input": "x", "max_output_tokens": -1}, "max_output_tokens = -1 instead of 256"),
        ({"input": "x", "top_p": 0.5}, "top_p = 0.5 instead of 1.0"),
        ({"input": "x", "reasoning": {"effort": "low", "summary": "auto"}}, "reasoning = {'effort': 'low'}"),
        ({"input": "x", "text": {"format": {"type": "json_object"}}}, "text = {'format'"),
        ({"input": "x", "include": ["file_search_call.results"]}, "include = ['file_search_call.results']"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice = 'required' instead of 'auto'"),
        (
            {"input": "x", "tools": [{"type": "web_search"}]},
            "has the tool {'type': 'web_search'}, which is not",
        ),
        ({"input": "x", "tools": [{**F, "defer_loading": True}]}, "tool 'f' has defer_loading"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_as_openai_refuses(body: dict[str, Any], message: str) -> None:
    status, answer = asyncio.run(ask("responses", json.dumps(body)))
    assert (status, list(answer), answer["error"]["type"]) == (400, ["error"], "invalid_request_error")
    assert message in answer["error"]["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": 3}, "without a list of messages"),
        ({"messages": [3]}, "message 0 of a request is 3, expected an object"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "has content of type image"),
        ({"messages": [{"role": "user", "content": [3]}]}, "has content of type int"),
        ({"messages": [{"role": "user", "content": [], "id": "a"}]}, "a message of a request has id"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "message 0 of a request has tool_calls"),
        ({"max_tokens": 0}, "max_tokens = 0 instead of 256"),
        ({"top_k": 5}, "top_k = 5 instead of 0"),
        ({"stop_sequences": [3]}, "stop = [3], expected texts that aren't empty"),
        ({"thinking": {"type": "enabled"}}, "thinking = {'type': 'enabled'}, but here"),
        ({"tool_choice": {"type": "any"}}, "tool_choice = {'type': 'any'} instead of 'auto'"),
        ({"tools": [BASH]}, "has the tool {'type': 'bash_20250124'"),
        ({"tools": [3]}, "has the tool 3, which is not a function"),
        ({"tools": [{"name": "f", "input_schema": {}, "input_examples": [1]}]}, "tool 'f' has input_examples"),
        ({"mcp_servers": [{}]}, "mcp_servers = [{}], but here"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_as_anthropic_refuses(body: dict[str, Any], message: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 256} | body
    status, answer = asyncio.run(ask("messages", json.dumps(body)))
    assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
    assert message in answer["error"]["message"]


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
@pytest.mark.parametrize(
    ("body", "message"),
    [("{", "is not JSON"), ("[1]", "with what is not a JSON object"), ("[" * 10**5, "is not JSON")],
)
def test_a_request_must_be_a_json_object(path: str, body: str, message: str) -> None:
    status, answer = asyncio.run(ask(path, body))
    assert status == 400
    assert message in answer["error"]["message"]


async def ask(path: str, body: str) -> tuple[int, dict[str, Any]]:
    """Return the status and the answer of a request that is not sampled for."""
    _, url = await open_model()
    async with ClientSession() as client, client.post(f"{url}/{path}", data=body) as reply:
        return reply.status, await reply.json()


LOGPROBS = [{"token": "é", "logprob": -0.5, "bytes": [195, 169], "top_logprobs": []}]


@pytest.mark.parametrize(
    ("path", "body", "sampling", "ending", "expected"),
    [
        (
            "chat/completions",
            {"stop": "x", "max_tokens": 9, "max_completion_tokens": 7, "logprobs": True, "top_logprobs": 0},
            {"stop": ["x"], "max_tokens": 7, "logprobs": True},
            {"logprobs": [("é", -0.5)]},
            {"finish_reason": "stop", "logprobs": {"content": LOGPROBS, "refusal": None}},
        ),
        ("chat/completions", {"max_tokens": 256, "stop": None}, {}, {}, {"finish_reason": "stop"}),
        ("chat/completions", {"max_tokens": 1}, {"max_tokens": 1}, {"is_cut": True}, {"finish_reason": "length"}),
        (
            "responses",
            {"max_output_tokens": 7, "include": ["message.output_text.logprobs", "reasoning.encrypted_content"]},
            {"max_tokens": 7, "logprobs": True},
            {"logprobs": [("é", -0.5)], "is_cut": True},
            {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, "logprobs": LOGPROBS},
        ),
        ("responses", {"include": []}, {}, {}, {"status": "completed", "incomplete_details": None, "logprobs": []}),
        (
            "messages",
            {"max_tokens": 7, "stop_sequences": ["x", "y"]},
            {"stop": ["x", "y"], "max_tokens": 7},
            {"stop": "y"},
            {"stop_reason": "stop_sequence", "stop_sequence": "y"},
        ),
        (
            "messages",
            {"max_tokens": 7},
            {"max_tokens": 7},
            {"is_cut": True},
            {"stop_reason": "max_tokens", "stop_sequence": None},
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_may_say_how_its_turn_ends(
    path: str, body: Any, sampling: Any, ending: Any, expected: dict[str, Any], *, stream: bool
) -> None:
    given = {"input": "hello"} if path == "responses" else {"messages": [{"role": "user", "content": "hello"}]}
    asked, answer = asyncio.run(ask_and_answer(path, {**given, **body, "stream": stream}, ending))
    assert asked == sampling
    if stream:
        events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
        last = {"chat/completions": -1, "responses": -1, "messages": -2}[path]
        found = events[last]
        found = found.get("response") or found.get("delta") or found["choices"][0]
        deltas = [event for event in events if event.get("type") == "response.output_text.delta"]
        assert all(delta["logprobs"] == expected["logprobs"] for delta in deltas)
    else:
        found = json.loads(answer)
        found = found["choices"][0] if path == "chat/completions" else found
    if path == "responses":
        found["logprobs"] = found["output"][0]["content"][0]["logprobs"]
    assert {name: found[name] for name in expected} == expected
    assert ("logprobs" in found) == ("logprobs" in expected)


async def ask_and_answer(path: str, body: dict[str, Any], ending: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return what a request says of its turn, and its answer by a turn that ends so."""
    conversation, url = await open_model()
    async with ClientSession() as client:
        request = asyncio.create_task(client.post(f"{url}/{path}", json=body))
        asked = await conversation.next_request(asyncio.get_running_loop().create_future())
        assert asked is not None
        conversation.answer("é", **ending)
        reply = await request
        return dict(asked.sampling), await reply.text()


async def open_model() -> tuple[Conversation, str]:
    """Return the conversation of a program, and the URL of its model."""
    environment = ProgramEnvironment.model_validate({"command": ["agent"]})
    sampling = environment_class(environment, TransformersRollout()).arguments["sampling"]
    conversation = Conversation("the program", None, SETTINGS, sampling)

    async def answer(request: web.Request, api: ModelApi) -> web.StreamResponse:
        return await complete(request, conversation, api)

    return conversation, await serve(answer, "")


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_client_that_waits_for_a_stream_has_signs_of_life(
    path: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_apis, "ALIVE_SECONDS", 0.05)
    status, lines = asyncio.run(wait_for_a_turn(path, fails=fails))
    assert status == 200
    assert lines.count(": the turn is not there yet") >= 2
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert all(": " not in line or line.startswith(("event: ", "data: ", ": the")) for line in lines)
    said = json.dumps(events)
    assert ("the machine is lost" in said) == fails
    assert ("a turn" in said) != fails


async def wait_for_a_turn(path: str, *, fails: bool) -> tuple[int, list[str]]:
    """Return the status and the lines of a stream whose turn comes after two signs of life."""
    (conversation, url), lines = await open_model(), list[str]()
    given = {"input": "hello"} if path == "responses" else {"messages": [{"role": "user", "content": "hello"}]}
    async with ClientSession() as client, client.post(f"{url}/{path}", json={**given, "stream": True}) as reply:
        while line := await reply.content.readline():
            lines.append(line.decode().strip())
            if lines[-1].startswith(":") and lines.count(lines[-1]) == 2:
                if fails:
                    conversation.fail(ChatError("the machine is lost"))
                else:
                    await conversation.next_request(asyncio.get_running_loop().create_future())
                    conversation.answer("a turn")
        return reply.status, lines


def test_keys_models_and_counts(tmp_path: Path) -> None:
    code = """
        def read(path, key="", **headers):
            url, key = os.environ["ANTHROPIC_BASE_URL"] + "/v1/" + path, key or os.environ["ANTHROPIC_API_KEY"]
            headers = {name.replace("_", "-"): value.format(key) for name, value in headers.items()}
            body = None if path == "models" else json.dumps({"messages": messages, "max_tokens": 256}).encode()
            request = urllib.request.Request(url, body, {"Content-Type": "application/json", **headers})
            try:
                with urllib.request.urlopen(request) as answer:
                    return answer.status, json.load(answer)
            except urllib.error.HTTPError as error:
                return error.code, json.load(error)

        (status, models), (_, same) = read("models", x_api_key="{}"), read("models", authorization="Bearer {}")
        assert (status, [model["id"] for model in models["data"]]) == (200, [os.environ["ANTHROPIC_MODEL"]]), models
        assert models == same and models["has_more"] is False and models["object"] == "list"
        for headers in ({}, {"x_api_key": "other"}, {"authorization": "Bearer other"}):
            status, answer = read("messages", **headers)
            assert (status, answer["error"]["type"]) == (401, "authentication_error"), answer
        status, answer = read("messages/count_tokens", x_api_key="{}")
        assert (status, answer["error"]["type"]) == (404, "not_found_error"), answer
        assert "tokens can't be counted here" in answer["error"]["message"]
        first, again = read("messages", x_api_key="{}"), read("messages", authorization="Bearer {}", x_api_key="old")
        finish(float(first == again and first[0] == 200))
    """
    with started(program(tmp_path, code)) as pool:
        begin(pool)
        reply = turns(pool, ["x"])[0]
        assert (reply.failure, reply.reward) == (None, 1.0)


OPENAI_RESPONSES = """
    from openai import BadRequestError, OpenAI
    client, model, items = OpenAI(), os.environ["OPENAI_MODEL"], [{"role": "user", "content": "Add."}]
    assert [each.id for each in client.models.list()] == [model]
    add = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
    asked = {"model": model, "tools": [add], "instructions": "You add.", "store": False}
    while True:
        if task["answer"] == "stream":
            with client.responses.stream(input=items, **asked) as events:
                kinds = [event.type for event in events]
                response = events.get_final_response()
            assert kinds[0] == "response.created" and kinds[-1] == "response.completed", kinds
        else:
            response = client.responses.create(input=items, **asked)
        items += [item.model_dump(exclude_none=True) for item in response.output]
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            break
        for call in calls:
            result = str(sum(json.loads(call.arguments).values()))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    print(response.usage.total_tokens, response.output_text)
    try:
        client.responses.create(input="more", previous_response_id=response.id, **asked)
    except BadRequestError as error:
        sys.exit(error.message)
"""
ANTHROPIC = """
    from anthropic import Anthropic, AuthenticationError, BadRequestError
    client, model = Anthropic(), os.environ["ANTHROPIC_MODEL"]
    assert [each.id for each in client.models.list()] == [model]
    try:
        Anthropic(api_key="another").messages.create(model=model, max_tokens=256, messages=messages)
    except AuthenticationError as error:
        assert "this is not the key" in error.message
    add = {"name": "add", "input_schema": {"type": "object"}}
    asked = {"model": model, "tools": [add], "system": "You add.", "max_tokens": 256, "thinking": {"type": "adaptive"}}
    while True:
        if task["answer"] == "stream":
            with client.messages.stream(messages=messages, **asked) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(messages=messages, **asked)
        messages.append({"role": "assistant", "content": message.content})
        calls = [block for block in message.content if block.type == "tool_use"]
        assert message.stop_reason == ("tool_use" if calls else "end_turn")
        if not calls:
            break
        results = [{"tool_use_id": call.id, "content": str(sum(call.input.values()))} for call in calls]
        messages.append({"role": "user", "content": [{"type": "tool_result", **result} for result in results]})
    assert message.usage.output_tokens == 2
    try:
        client.messages.create(messages=messages, **asked | {"thinking": {"type": "enabled", "budget_tokens": 1024}})
    except BadRequestError as error:
        sys.exit(error.message)
"""


@pytest.mark.parametrize(
    ("client", "code", "refused"),
    [("openai", OPENAI_RESPONSES, "previous_response_id = 'resp_2'"), ("anthropic", ANTHROPIC, "thinking = {")],
)
def test_clients_call_tools_stream_and_read_errors(tmp_path: Path, client: str, code: str, refused: str) -> None:
    pytest.importorskip(client)
    with started(program(tmp_path, code)) as pool:
        for reply in begin(pool, row(), row("stream")).values():
            assert (reply.failure, reply.roles) == (None, ("system", "user"))
        for reply in turns(pool, [TURN] * 2).values():
            assert (reply.failure, reply.observations, reply.role) == (None, ("5", "6"), "tool")
        for reply in turns(pool, ["11"] * 2).values():
            assert refused in failure(reply)
