"""Write train.parquet and test.parquet as verl's preprocessing scripts do (they are in the repository already)."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

HERE = Path(__file__).resolve().parent
LETTERS = "abcdefgh"
REQUESTS = (
    "Write only the letter {}.",
    "Answer with {} alone.",
    "Nothing but {}, please.",
    "Type {}, no other letter.",
)
TEST_REQUEST = "Give me {} and nothing else."


def row(request: str, letter: str, split: str, index: int) -> dict[str, object]:
    """Return one row with verl's columns."""
    return {
        "data_source": "one_letter",
        "prompt": [{"role": "user", "content": request.format(letter)}],
        "ability": "copying",
        "reward_model": {"style": "rule", "ground_truth": letter},
        "extra_info": {"split": split, "index": index},
    }


if __name__ == "__main__":
    for split, requests in (("train", REQUESTS), ("test", (TEST_REQUEST,))):
        pairs = [(request, letter) for letter in LETTERS for request in requests]
        rows = [row(request, letter, split, index) for index, (request, letter) in enumerate(pairs)]
        pq.write_table(pa.Table.from_pylist(rows), HERE / f"{split}.parquet", compression="zstd")
