"""The warm-start worker: supervised training on answers, with the same packed forward that GRPO uses."""

from pathlib import Path

import numpy as np
import torch

from infra.datasets import load_train_prompts
from infra.datasets.environments import RowEnvironment
from infra.models.assets import keep_dropout
from infra.models.load import load_model, load_tokenizer
from infra.ray.device import set_threads
from rl_core.environments.tools import tool_schemas
from rl_core.scoring.attention import use_packed_attention
from rl_core.scoring.forward import pack_row
from rl_core.scoring.logprobs import packed_logprobs
from schemas.config.warmstart import WarmstartConfig
from schemas.errors import NonFiniteError

LOGITS_CHUNK_TOKENS = 1024


class WarmstartWorker:
    """The worker that holds and trains the model during a warm start."""

    def __init__(self, config: WarmstartConfig) -> None:
        self._config = config
        self._step = 0

    def start(self) -> None:
        """Load the model and the rows."""
        config = self._config
        set_threads(config.num_threads)
        self._tokenizer = load_tokenizer(config.model)
        self._model = load_model(config.model)
        use_packed_attention(self._model)
        environment = RowEnvironment(tools=tool_schemas(config.tools))
        environments = [environment] * len(config.data.train_sources)
        self._rows = load_train_prompts(config.data, self._tokenizer, environments)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=config.lr, weight_decay=config.weight_decay, betas=(0.9, 0.98)
        )

    def advance(self, num_steps: int) -> float:
        """Train for the next `num_steps` steps, and return their mean loss in nats per token."""
        losses = [self._train_step() for _ in range(num_steps)]
        return float(np.mean(losses))

    def save(self) -> str:
        """Write the model folder, and return its path."""
        self._model.save_pretrained(self._config.out_path)
        keep_dropout(Path(self._config.out_path), self._config.model.path)
        self._tokenizer.save_pretrained(self._config.out_path)
        return self._config.out_path

    def _train_step(self) -> float:
        config = self._config
        rows = self._rows.rows_for_step(self._step, config.num_rows, config.seed, config.data.shuffle)
        prompts = [self._rows[row].prompt_ids for row in rows]
        answers = [self._answer_ids(row) for row in rows]
        packed = pack_row(*_flatten(prompts), *_flatten(answers))
        logprobs = packed_logprobs(self._model, packed, temperature=1.0, chunk_tokens=LOGITS_CHUNK_TOKENS)
        loss = -logprobs.mean()
        if not torch.isfinite(loss):
            raise NonFiniteError(f"warm-start loss is {loss.item()} at step {self._step}; lower the learning rate, lr")
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate()
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), config.max_grad_norm)
        self._optimizer.step()
        self._step += 1
        return loss.item()

    def _learning_rate(self) -> float:
        config = self._config
        warmup = min(1.0, (self._step + 1) / (config.warmup_steps + 1))
        decay = 1 - (1 - config.final_lr_fraction) * self._step / config.steps
        return config.lr * warmup * decay

    def _answer_ids(self, row: int) -> np.ndarray:
        answer = self._tokenizer(self._rows[row].answer, add_special_tokens=False)["input_ids"]
        return np.array([*answer, self._tokenizer.eos_token_id], dtype=np.int64)


def _flatten(rows: list[np.ndarray]) -> tuple[torch.Tensor, np.ndarray]:
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    return torch.from_numpy(np.concatenate(rows).astype(np.int64)), lengths
