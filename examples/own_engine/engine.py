"""The smallest engine of one's own: plain transformers, one forward per token and row, without a KV cache.

It is a program that answers the calls of docs/how-to/engine.md. It needs torch and transformers, and nothing of Sluice:
`frames.py`, which reads and writes the messages, is found by its path here, and can be copied next to a program.
"""

import mmap
import os
import resource
import socket
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.append(str(Path(__file__).resolve().parents[2] / "infra" / "engines" / "program"))
import frames

Arguments = dict[str, Any]
Buffers = list[bytearray]
Reply = tuple[dict[str, Any], list[Any]]


class Row:
    """The tokens of a sample so far, and of its turn the seed, the beginning and the log-probs."""

    def __init__(self, tokens: list[int], seed: int, max_tokens: int) -> None:
        self.tokens = tokens
        self.begin(seed, max_tokens)

    def begin(self, seed: int, max_tokens: int) -> None:
        """Begin a turn. All that is random in it comes from its seed, so that a resumed run samples the same."""
        self.random = torch.Generator().manual_seed(seed % 2**63)
        self.start, self.end, self.logprobs = len(self.tokens), len(self.tokens) + max_tokens, list[torch.Tensor]()


class PlainEngine:
    """The calls of the protocol; each gets arguments and buffers, and returns a result and buffers."""

    def hello(self, arguments: Arguments, buffers: Buffers) -> Reply:
        version = metadata.version("transformers")
        return {"protocol": frames.PROTOCOL, "engine": "plain", "version": version, "device": "cpu"}, []

    def start(self, arguments: Arguments, buffers: Buffers) -> Reply:
        settings = arguments["engine"]
        torch.set_num_threads(settings["settings"].get("threads", 1))
        dtype = getattr(torch, settings["dtype"])
        self.model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(settings["model"])
        self.rows: dict[int, Row] = {}  # that are not forgotten
        self.pending: list[int] = []  # whose turn has not ended
        return {
            "max_model_len": settings["max_model_len"],
            "dtype": settings["dtype"],
            "itemsize": dtype.itemsize,
            "cache_bytes": 0,
            "processes": [os.getpid()],
            "adapted_layers": [],
        }, []

    def open(self, arguments: Arguments, buffers: Buffers) -> Reply:
        self.sampling = arguments["sampling"]
        return {}, []

    def begin(self, arguments: Arguments, buffers: Buffers) -> Reply:
        prompts = [memoryview(buffer).cast("i").tolist() for buffer in buffers]
        for number, prompt, seed, max_tokens in arguments["rows"]:
            self.rows[number] = Row(list(prompts[prompt]), seed, max_tokens)
            self.pending.append(number)
        return {}, []

    def extend(self, arguments: Arguments, buffers: Buffers) -> Reply:
        row = self.rows[arguments["row"]]
        row.tokens += memoryview(buffers[0]).cast("i").tolist()
        row.begin(arguments["seed"], arguments["max_tokens"])
        self.pending.append(arguments["row"])
        return {}, []

    def step(self, arguments: Arguments, buffers: Buffers) -> Reply:
        """Sample a token of each row; return the rows whose turn it ends."""
        ended, found, running = [], list[Any](), len(self.pending)
        for number in self.pending:
            row = self.rows[number]
            logprobs = self._logprobs(row.tokens, self.sampling["temperature"])[-1]
            token = self._sample(logprobs, row.random)
            row.tokens.append(token)
            row.logprobs.append(logprobs[token])
            sampled = row.tokens[row.start :]
            if (reason := self._reason_to_end(row, sampled)) is not None:
                ended.append((number, reason, row.start))
                found += [torch.tensor(sampled, dtype=torch.int32).numpy(), torch.stack(row.logprobs).numpy()]
        self.pending = [number for number in self.pending if number not in {number for number, *_ in ended}]
        return {"rows": ended, "running": running, "waiting": 0, "cache": 0.0}, found

    def end(self, arguments: Arguments, buffers: Buffers) -> Reply:
        del self.rows[arguments["row"]]
        return {}, []

    def abort(self, arguments: Arguments, buffers: Buffers) -> Reply:
        self.rows.clear()
        self.pending.clear()
        return {}, []

    def score(self, arguments: Arguments, buffers: Buffers) -> Reply:
        tokens = memoryview(buffers[0]).cast("i").tolist()
        logprobs = self._logprobs(tokens, arguments["temperature"])[:-1]
        return {}, [logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()]

    def start_load(self, arguments: Arguments, buffers: Buffers) -> Reply:
        return {}, []

    def load(self, arguments: Arguments, buffers: Buffers) -> Reply:
        """Copy tensors out of a file into the weights."""
        weights = self.model.state_dict()
        with open(arguments["path"], "rb") as file:
            content = mmap.mmap(file.fileno(), arguments["num_bytes"], access=mmap.ACCESS_COPY)
        frames.compare(frames.checksum(torch.frombuffer(content, dtype=torch.int64)), arguments["checksum"])
        for name, dtype, shape, offset in arguments["tensors"]:
            count = torch.Size(shape).numel()
            tensor = torch.frombuffer(content, dtype=getattr(torch, dtype), count=count, offset=offset)
            weights[name].copy_(tensor.view(shape))
        return {}, []

    def finish_load(self, arguments: Arguments, buffers: Buffers) -> Reply:
        return {}, []

    def peak_memory(self, arguments: Arguments, buffers: Buffers) -> Reply:
        return {"rss": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}, []

    def _logprobs(self, tokens: list[int], temperature: float) -> torch.Tensor:
        """Return the log-probs of all tokens at each position, before truncation: float32 [T, V]."""
        with torch.no_grad():
            logits = self.model(torch.tensor([tokens]), use_cache=False).logits[0].float()
        return (logits / (temperature or 1.0)).log_softmax(-1)

    def _sample(self, logprobs: torch.Tensor, random: torch.Generator) -> int:
        """Sample one of the tokens that min-p, top-k and top-p leave, or take the most likely at temperature 0."""
        sampling, (probs, order) = self.sampling, logprobs.exp().sort(descending=True)
        if sampling["temperature"] == 0:
            return int(order[0])
        probs = probs * (probs >= sampling["min_p"] * probs[0])
        probs[sampling["top_k"] or len(probs) :] = 0
        probs = probs * (probs.cumsum(0) - probs < sampling["top_p"] * probs.sum())
        return int(order[torch.multinomial(probs, 1, generator=random)])

    def _reason_to_end(self, row: Row, sampled: list[int]) -> str | None:
        text = self.tokenizer.decode(sampled, skip_special_tokens=True) if self.sampling["stop"] else ""
        if sampled[-1] in self.sampling["stop_token_ids"] or any(stop in text for stop in self.sampling["stop"]):
            return "stop"
        return "length" if len(row.tokens) == row.end else None


if __name__ == "__main__":
    connection = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)
    frames.serve(connection, PlainEngine())
