"""Write tasks of verifiers as data rows: `verifiers_rows.py CONFIG OUT [--skip N] [--take N]`.

A program for the interpreter that has verifiers; it needs nothing else. CONFIG is a run's config, whose environment is
`infra.integrations.verifiers:VerifiersEnvironment`; OUT becomes a file of lines of JSON.
"""

import argparse
import json
import os
import sys
import tomllib
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

sys.path[0] = os.getcwd()  # where tasksets are found; this file's own folder has other modules of such names
import verifiers.v1 as vf  # noqa: E402


def main() -> None:
    """Write the file that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--skip", type=int, default=0, help="leave out this many tasks at the beginning")
    parser.add_argument("--take", type=int, help="write at most this many tasks")
    arguments = parser.parse_args()
    config = vf.resolve_env_config(tomllib.loads(arguments.config.read_text())["environment"]["arguments"]["env"])
    end = None if arguments.take is None else arguments.skip + arguments.take
    tasks = islice(vf.load_taskset(config.taskset), arguments.skip, end)
    rows = [row(config.env_id, task.data) for task in tasks]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text("".join(json.dumps(each) + "\n" for each in rows))
    print(f"wrote {len(rows)} tasks to {arguments.out}")


def row(source: str, data: vf.TaskData) -> dict[str, Any]:
    """Return a task as a data row.

    Args:
        source: The row's `data_source`.
        data: The task's fields.
    """
    prompt = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    if isinstance(data.prompt, str):
        prompt.append({"role": "user", "content": data.prompt})
    else:
        prompt.extend({"role": message.role, "content": _text(message.content)} for message in data.prompt or [])
    task = data.model_dump(mode="json", exclude_defaults=True)
    return {"data_source": source, "prompt": prompt, "reward_model": {"ground_truth": ""}, "extra_info": {"task": task}}


def _text(content: Any) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    parts: list[Mapping[str, Any]] = [part.model_dump() for part in content]
    if others := sorted({part["type"] for part in parts} - {"text"}):
        raise SystemExit(f"a task's prompt has content of type {', '.join(others)}; the model reads text only")
    return "\n".join(part["text"] for part in parts)


if __name__ == "__main__":
    main()
