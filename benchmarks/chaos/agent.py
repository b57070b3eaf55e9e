"""An agent of the campaign: it streams, calls itself another agent, summarizes its history and goes back to it.

It asks over one of the clients that its arguments name, as its data row says. The first two need the standard library
only; the others are libraries that people write agents with (`make agents` installs them).
"""

import json
import os
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

Chat = list[dict[str, Any]]
MODEL = os.environ["OPENAI_MODEL"]


def events(path: str, body: dict[str, Any], headers: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yield what a stream has."""
    data = json.dumps({"model": MODEL, "stream": True, **body}).encode()
    request = urllib.request.Request(path, data, {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


def completions(chat: Chat) -> str:
    """Return the model's turn over OpenAI's chat completions."""
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    parts = events(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"messages": chat}, headers)
    return "".join(choice["delta"].get("content", "") for part in parts for choice in part["choices"])


def messages(chat: Chat) -> str:
    """Return the model's turn over Anthropic's Messages."""
    headers = {"x-api-key": os.environ["ANTHROPIC_API_KEY"], "anthropic-version": "2023-06-01"}
    path = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
    parts = events(path, {"messages": chat, "max_tokens": 4096}, headers)
    return "".join(part["delta"].get("text", "") for part in parts if part["type"] == "content_block_delta")


def openai(chat: Chat) -> str:
    """Return the model's turn by the client of OpenAI, over its Responses."""
    from openai import OpenAI

    stream = OpenAI().responses.create(model=MODEL, input=chat, stream=True)
    return "".join(event.delta for event in stream if event.type == "response.output_text.delta")


def anthropic(chat: Chat) -> str:
    """Return the model's turn by the client of Anthropic."""
    from anthropic import Anthropic

    with Anthropic().messages.stream(model=MODEL, max_tokens=4096, messages=chat) as stream:
        return "".join(stream.text_stream)


def langchain(chat: Chat) -> str:
    """Return the model's turn by LangChain, on which LangGraph stands."""
    from langchain_openai import ChatOpenAI

    return "".join(str(chunk.content) for chunk in ChatOpenAI(model=MODEL).stream(chat))


def pydantic_ai(chat: Chat) -> str:
    """Return the model's turn by Pydantic AI."""
    from pydantic_ai import Agent
    from pydantic_ai.messages import ModelRequest, ModelResponse, TextPart, UserPromptPart

    history = [
        ModelResponse([TextPart(each["content"])])
        if each["role"] == "assistant"
        else ModelRequest([UserPromptPart(each["content"])])
        for each in chat
    ]
    return str(Agent(f"openai-chat:{MODEL}").run_stream_sync(message_history=history).get_output())


def openai_agents(chat: Chat) -> str:
    """Return the model's turn by OpenAI's agents SDK."""
    import asyncio

    from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
    from openai import AsyncOpenAI

    async def run() -> str:
        result = Runner.run_streamed(Agent("agent", model=OpenAIChatCompletionsModel(MODEL, AsyncOpenAI())), chat)
        async for _ in result.stream_events():
            pass
        return str(result.final_output)

    set_tracing_disabled(True)
    return asyncio.run(run())


def main() -> None:
    """Play one trajectory."""
    row = json.load(sys.stdin)
    ask = globals()[sys.argv[1:][int(row["answer"]) % len(sys.argv[1:])]]
    prompt: Chat = row["prompt"]

    def answer(chat: Chat) -> Chat:
        return [*chat, {"role": "assistant", "content": ask(chat) or "nothing"}]

    def said(chat: Chat, text: str) -> Chat:
        return answer([*chat, {"role": "user", "content": text}])

    trunk = said(answer(prompt), "go on")
    said(prompt, f"so far: {trunk[-1]['content'][:4]}")
    answer([{"role": "user", "content": "who are you?"}])
    last = said(trunk, "well?")
    print(json.dumps({"reward": len(set(last[-1]["content"])) / 12}))


if __name__ == "__main__":
    main()
