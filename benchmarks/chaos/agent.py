"""An agent of the campaign: it streams, calls itself another agent, summarizes its history and goes back to it.

It asks over OpenAI's chat completions or Anthropic's Messages, as its data row says, and needs the standard library
only.
"""

import json
import os
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

Chat = list[dict[str, Any]]


def events(path: str, body: dict[str, Any], headers: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yield what a stream has."""
    data = json.dumps({"model": os.environ["OPENAI_MODEL"], "stream": True, **body}).encode()
    request = urllib.request.Request(path, data, {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


def ask_openai(chat: Chat) -> str:
    """Return the model's turn."""
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    parts = events(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"messages": chat}, headers)
    return "".join(choice["delta"].get("content", "") for part in parts for choice in part["choices"])


def ask_anthropic(chat: Chat) -> str:
    """Return the model's turn."""
    headers = {"x-api-key": os.environ["ANTHROPIC_API_KEY"], "anthropic-version": "2023-06-01"}
    path = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
    parts = events(path, {"messages": chat, "max_tokens": 4096}, headers)
    return "".join(part["delta"].get("text", "") for part in parts if part["type"] == "content_block_delta")


def main() -> None:
    """Play one trajectory."""
    row = json.load(sys.stdin)
    ask = ask_anthropic if len(row["answer"]) % 2 else ask_openai
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
