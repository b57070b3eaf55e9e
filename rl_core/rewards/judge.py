"""An LLM judge, asked by OpenAI's protocol of chat completions: its question, and the score in its answer."""

import asyncio
import json
import os
import random
import re
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from hashlib import blake2b
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import httpx

from rl_core.rewards.base import ManagedReward
from schemas.config.judge import JudgeReward
from schemas.errors import ConfigError, ServiceError

EXCERPT_CHARACTERS = 200
READY_SECONDS = 60.0  # for the answer to the first request
CONNECT_SECONDS = 10.0
BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.5, 30.0  # before the first repetition, and at most
MAX_SCORES = 16_384  # of questions that are not asked again
TOO_MANY_REQUESTS, SERVER_ERROR = 429, 500
COMPLETE = frozenset({"stop", "eos", "eos_token", "stop_sequence", "end_turn"})  # what endpoints call an answer's end
HINTS = {
    401: "; check the key in the variable that reward.api_key_variable names",
    403: "; check the key in the variable that reward.api_key_variable names",
    404: "; check reward.url and reward.model",
}


def _end_of(text: str) -> str:
    """Return the end of an answer, where its score is."""
    return repr(text.strip()[-EXCERPT_CHARACTERS:])


@dataclass(frozen=True)
class _Answer:
    """What the judge said, and the tokens that it cost, if the endpoint counts them."""

    text: str
    costs: dict[str, float]
    finish_reason: str | None


class Judge(ManagedReward):
    """Asks a judge for scores; one that answered a question before is not asked again."""

    is_concurrent = True

    def __init__(self, config: JudgeReward) -> None:
        self.max_calls = config.concurrency
        self._config = config
        self._url = f"{config.url}/chat/completions"
        self._pattern = re.compile(config.pattern, re.DOTALL)
        self._scores: OrderedDict[bytes, float] = OrderedDict()  # by question, the latest used last
        self._asking: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        self._loop: asyncio.AbstractEventLoop | None = None  # of the client: a connection belongs to its loop
        self._problem = ""  # with the last response, if that was none

    def describe_timeout(self) -> str:
        return self._problem

    async def prepare(self) -> None:
        """Ask something, to see that the judge can be reached.

        Raises:
            ConfigError: The variable of the key is not set.
            ServiceError: It doesn't answer.
        """
        try:
            async with asyncio.timeout(READY_SECONDS):
                await self._ask("Reply with the number 1.")
        except TimeoutError:
            raise ServiceError(
                f"the judge at {self._url} gave no answer within {READY_SECONDS:g} s; start it first, or check "
                "reward.url"
            ) from None

    async def __call__(self, prompt: str, completion: str, answer: str, info: dict[str, Any]) -> dict[str, float]:
        """Return the judge's score divided by `scale`, and the tokens that it cost: none if it was known.

        Raises:
            ConfigError: The variable of the key is not set.
            ServiceError: The judge doesn't answer.
            ValueError: Its answer is cut, or has no score from 0 to `scale`.
        """
        question = self._config.prompt.format(prompt=prompt, response=completion, answer=answer)
        digest = blake2b(question.encode(errors="surrogatepass")).digest()
        async with self._asking.setdefault(digest, asyncio.Lock()):  # equal questions wait for the answer to the first
            if digest in self._scores:
                self._scores.move_to_end(digest)
                costs = {"judge_prompt_tokens": 0.0, "judge_completion_tokens": 0.0}
            else:
                reply = await self._ask(question)
                self._check_complete(reply)
                self._scores[digest], costs = self._score(reply.text), reply.costs
                if len(self._scores) > MAX_SCORES:
                    self._scores.popitem(last=False)
            return {"reward": self._scores[digest], **costs}

    async def _ask(self, question: str) -> _Answer:
        body = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": self._config.max_tokens,
            "temperature": self._config.temperature,
        }
        content = json.dumps({name: value for name, value in body.items() if value is not None})
        for num_tries in count(1):
            pause = 0.0
            try:
                response = await self._client().post(self._url, content=content)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if response.is_success:
                    self._problem = ""
                    return self._answer(response)
                problem = f"HTTP status {response.status_code}: {self._excerpt(response)}"
                if response.status_code != TOO_MANY_REQUESTS and response.status_code < SERVER_ERROR:
                    raise ServiceError(
                        f"the judge at {self._url} refuses the request with {problem}"
                        f"{HINTS.get(response.status_code, '')}"
                    )
                pause = _retry_after(response)
            self._problem = f"the judge at {self._url} answered last with {problem}" + (
                f", and asks for a pause of {pause:g} s: lower reward.concurrency" if pause else ""
            )
            if num_tries > self._config.max_retries:
                raise ServiceError(
                    f"the judge at {self._url} failed {num_tries} times, at last with {problem}; see that it runs, or "
                    "change reward.url, reward.max_retries or reward.concurrency (in a sum, those of its part)"
                )
            backoff = min(BACKOFF_SECONDS * 2 ** (num_tries - 1), MAX_BACKOFF_SECONDS)
            await asyncio.sleep(max(pause, random.uniform(0, backoff)))
        raise AssertionError("unreachable")

    def _answer(self, response: httpx.Response) -> _Answer:
        try:
            reply = response.json()
            choice = reply["choices"][0]
            text, finish_reason = _text_of(choice["message"]["content"]), choice.get("finish_reason")
            usage = reply.get("usage") or {}
            costs = {
                f"judge_{name}": float(usage[name])
                for name in ("prompt_tokens", "completion_tokens")
                if usage.get(name) is not None
            }
        except (AttributeError, KeyError, IndexError, TypeError, ValueError):
            raise ServiceError(
                f"what {self._url} answers is not a chat completion: {self._excerpt(response)}; check reward.url"
            ) from None
        return _Answer(text, costs, None if finish_reason is None else str(finish_reason))

    def _check_complete(self, answer: _Answer) -> None:
        """Check that the judge ended its answer: what is cut off may be anything, such as a score."""
        reason = answer.finish_reason
        if reason in ("length", "model_length", "max_tokens"):
            limit = "its limit" if self._config.max_tokens is None else f"{self._config.max_tokens} tokens"
            raise ValueError(f"the judge's answer is cut at {limit}; raise reward.max_tokens")
        if reason and reason.lower() not in COMPLETE:
            raise ValueError(
                f"the judge's answer is incomplete: its finish_reason is {reason!r:.80}, expected 'stop'; it says "
                f"{_end_of(answer.text)}"
            )

    def _score(self, text: str) -> float:
        """Return the score in a judge's answer, from 0 to `scale`, divided by `scale`."""
        found = list(self._pattern.finditer(text))
        if not found:
            raise ValueError(f"the judge's answer has no score, as reward.pattern finds it: {_end_of(text)}")
        try:
            score = float(found[-1][1])
        except (TypeError, ValueError):
            raise ValueError(f"the judge's score is {found[-1][1]!r:.80}, not a number: {_end_of(text)}") from None
        if not 0 <= score <= self._config.scale:
            scale = self._config.scale
            raise ValueError(f"the judge's score {score:g} is not from 0 to reward.scale = {scale:g}: {_end_of(text)}")
        return score / self._config.scale

    def _client(self) -> httpx.AsyncClient:
        if self._loop is not (loop := asyncio.get_running_loop()):
            headers = {"Content-Type": "application/json"}
            if key := self._key():
                headers["Authorization"] = f"Bearer {key}"
            limits = httpx.Limits(max_connections=self.max_calls, max_keepalive_connections=self.max_calls)
            timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)  # the limit of the whole reward holds for the rest
            self._http = httpx.AsyncClient(headers=headers, limits=limits, timeout=timeout)
            self._loop = loop
        return self._http

    def _key(self) -> str:
        name = self._config.api_key_variable
        if name is None:
            return ""
        if not (key := os.environ.get(name, "").strip()):
            raise ConfigError(
                f"reward.api_key_variable = {name!r} is not set where rollout workers run; set it there, on one "
                "machine before `sluice train`, or leave the key out if the judge needs none"
            )
        if not re.fullmatch("[!-~]+", key):  # httpx's error would repeat it
            raise ConfigError(f"the variable {name}, which reward.api_key_variable names, holds more than a key")
        return key

    def _excerpt(self, response: httpx.Response) -> str:
        """Return the beginning of a response, without the key, should the endpoint repeat it."""
        text = " ".join(response.text.split())
        if key := self._key():
            text = text.replace(key, "***")
        return repr(text[:EXCERPT_CHARACTERS])


def _text_of(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """Return the text of a message's content: that itself, or its parts of text, without the reasoning next to them."""
    if not content:
        return ""
    if isinstance(content, str):
        return content
    texts = [part["text"] for part in content if part["type"] == "text"]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError
    return "".join(texts)


def _retry_after(response: httpx.Response) -> float:
    """Return the seconds that a response asks to wait before the request is repeated."""
    value = response.headers.get("Retry-After", "")
    try:
        return max(float(value), 0.0)
    except ValueError:
        pass
    try:
        return max(parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except ValueError:
        return 0.0
