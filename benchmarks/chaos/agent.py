"""An agent of the campaign: it streams, calls itself another agent, summarizes its history and goes back to it.

It asks over one of the clients that its arguments name after a folder, as its data row says. The first two need the
standard library only; the others are libraries that people write agents with (`make agents` installs them). In the
folder it notes what it has received, and the campaign asks it to stop reading.
"""

import json
import os
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

Chat = list[dict[str, Any]]
MODEL = os.environ["OPENAI_MODEL"]
STOPS = Path(sys.argv[1])


class Reading(socket.socket):
    """A connection that stops reading at a byte, until a fault has struck; then it goes on, or, if odd, hangs up."""

    left, hangs_up = 0, False  # bytes of this process's connections until then; 0: none is asked for

    def recv(self, size: int, flags: int = 0) -> bytes:
        self.stop(len(data := super().recv(min(size, Reading.left or size), flags)))
        return data

    def recv_into(self, buffer: Any, size: int = 0, flags: int = 0) -> int:
        self.stop(count := super().recv_into(buffer, min(size or len(buffer), Reading.left or len(buffer)), flags))
        return count

    def stop(self, count: int) -> None:
        """Note so many bytes, and wait after the last one."""
        before = Reading.left
        Reading.left -= min(count, before) if self.family == socket.AF_INET else 0
        if before and not Reading.left:
            wait()
            if Reading.hangs_up:
                raise ConnectionResetError


def take() -> None:
    """See whether the campaign asks for a stop that no other agent has taken."""
    with suppress(FileNotFoundError):
        (STOPS / "wanted").rename(taken := STOPS / f"taken-{os.getpid()}")
        Reading.left = int(taken.read_text())
        Reading.hangs_up = Reading.left % 2 == 1


def wait() -> None:
    """Tell the campaign that the stop is reached, and wait until it has removed the file."""
    with suppress(FileNotFoundError):  # it no longer asks for it
        (STOPS / f"taken-{os.getpid()}").rename(reached := STOPS / f"reached-{os.getpid()}")
        while reached.exists():
            time.sleep(0.01)


socket.socket = Reading  # type: ignore[misc]


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
    ask = globals()[sys.argv[2:][int(row["answer"]) % len(sys.argv[2:])]]
    prompt: Chat = row["prompt"]
    received: list[str] = []

    def answer(chat: Chat) -> Chat:
        take()
        try:
            text = ask(chat)
        except Exception:
            if not Reading.hangs_up:
                raise
            text = ask(chat)
        received.append(text)
        with (STOPS / "received").open("a") as file:
            file.write(json.dumps([row["seed"], received]) + "\n")
        return [*chat, {"role": "assistant", "content": text or "nothing"}]

    def said(chat: Chat, text: str) -> Chat:
        return answer([*chat, {"role": "user", "content": text}])

    trunk = said(answer(prompt), "go on")
    said(prompt, f"so far: {trunk[-1]['content'][:4]}")
    answer([{"role": "user", "content": "who are you?"}])
    last = said(trunk, "well?")
    wait()  # if its answers had fewer bytes
    print(json.dumps({"reward": len(set(last[-1]["content"])) / 12}))


if __name__ == "__main__":
    main()
