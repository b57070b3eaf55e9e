"""Write train.parquet and test.parquet as verl's preprocessing scripts do (they are in the repository already)."""

import string
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

HERE = Path(__file__).resolve().parent
CHARACTERS = {"digits": string.digits, "vowels": "aeiou", "capitals": string.ascii_uppercase}
TRAIN_REQUESTS = (
    "Write eight {}.",
    "Write {}.",
    "Eight {}, please.",
    "{}, please.",
    "Answer with {} only.",
    "Nothing but {}.",
    "Only {}.",
    "List {}.",
)
TEST_REQUESTS = ("Write eight {}, please.", "Only {}, please.")


def row(source: str, request: str, split: str, index: int) -> dict[str, object]:
    """Return one row with verl's columns."""
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": request.format(source)}],
        "ability": "writing",
        "reward_model": {"style": "rule", "ground_truth": CHARACTERS[source]},
        "extra_info": {"split": split, "index": index, "length": 8},
    }


if __name__ == "__main__":
    for split, requests in (("train", TRAIN_REQUESTS), ("test", TEST_REQUESTS)):
        pairs = [(source, request) for source in CHARACTERS for request in requests]
        rows = [row(source, request, split, index) for index, (source, request) in enumerate(pairs)]
        pq.write_table(pa.Table.from_pylist(rows), HERE / f"{split}.parquet", compression="zstd")
        print(f"wrote {len(rows)} rows to {split}.parquet")
