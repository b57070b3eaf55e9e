"""A folder in which real runs of `sluice train` are measured, with local services of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from infra.services.local import LocalServices

MODEL = "bench-model"
DATA = "bench.parquet"
KL_COEF = 0.01
CONFIG = f"""
name = "bench"
steps = 4

[model]
path = "{MODEL}"

[data]
train_path = "{DATA}"

[reward]
kind = "function"
path = "bench_rewards:few_vowels"

[kl]
coef = {KL_COEF}
"""

REWARDS = """
def few_vowels(prompt, completion, answer, info):
    return 1 - sum(completion.count(vowel) for vowel in "aeiou") / 12
"""

NUM_ROWS = 12


class Workspace:
    """A folder with a config, data and a reward function, in which `sluice` commands run.

    Args:
        folder: An empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.services = folder, LocalServices(folder / ".sluice")
        (folder / "bench.toml").write_text(CONFIG)
        (folder / "bench_rewards.py").write_text(REWARDS)
        self.write_prompts()

    def write_prompts(self, num_tokens: int = 0) -> None:
        """Write the prompts, of about so many tokens, or short ones; the model's tokenizer has one for a character."""
        rows = [
            {
                "data_source": "bench",
                "prompt": [{"role": "user", "content": f"{number} + 1 =".rjust(num_tokens, ".")}],
                "reward_model": {"ground_truth": str(number + 1)},
            }
            for number in range(NUM_ROWS)
        ]
        pq.write_table(pa.Table.from_pylist(rows), self.folder / DATA)

    def train(self, *arguments: str) -> None:
        """Run `sluice train bench.toml` to completion.

        Raises:
            CalledProcessError: The run failed; its standard error has been printed.
        """
        # The run starts its own services, so it must not inherit the caller's configuration of them.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "RAY_"))}
        subprocess.run(
            [sys.executable, "-P", "-m", "flows.cli.main", "train", "bench.toml", *arguments],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            check=True,
        )
