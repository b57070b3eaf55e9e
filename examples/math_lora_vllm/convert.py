"""Convert GSM8K's own files to rows with verl's columns: `convert.py train.jsonl OUT.jsonl`."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

INSTRUCTION = 'Think step by step, and write the answer after "####" on the last line. /no_think'


def convert(rows: Iterable[dict[str, str]], instruction: str = INSTRUCTION) -> list[dict[str, Any]]:
    """Return the rows of `question` and `answer` as prompts; GSM8K's answers end with "#### " and the number."""
    converted = []
    for row in rows:
        solution, _, number = row["answer"].rpartition("####")
        converted.append(
            {
                "data_source": "gsm8k",
                "prompt": [{"role": "user", "content": f"{row['question']} {instruction}".strip()}],
                "reward_model": {"ground_truth": number.strip().replace(",", "")},
                "extra_info": {"solution": solution.strip()},
            }
        )
    return converted


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    rows = convert(json.loads(line) for line in source.read_text().splitlines())
    write_rows(target, rows)
    print(f"wrote {len(rows)} rows to {target}")
