"""Make a tiny model with random weights (0.5 million, one token per byte), unless it exists: `make_model.py FOLDER`."""

import sys
from pathlib import Path

from infra.models.tiny import make_model

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,  # the smallest that vLLM has CPU kernels for
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    "initializer_range": 0.04,
}

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if (folder / "config.json").exists():
        print(f"{folder} exists")
    else:
        print(f"wrote a tiny model with random weights to {make_model(folder, **SIZES)}")
