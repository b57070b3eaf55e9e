"""Programs that ask their model over an API, with the standard library, and pools of them."""

import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from infra.environments.open import environment_class
from infra.environments.pool import EnvironmentPool, Reply
from infra.environments.program import write_turn
from rl_core.environments.base import Task
from schemas.config.environment import ProgramEnvironment
from schemas.config.rollout import TransformersRollout

LIMIT_SECONDS = 120.0  # of a program's start and of its steps, on a busy machine
PRELUDE = '''
import json, os, sys, time, urllib.error, urllib.request

task = json.load(sys.stdin)
messages = list(task["prompt"])

def post(body, key=None, number=None, path="chat/completions"):
    """Return the status and the body of the answer to a request; without a body of its own, it gets the path."""
    url = os.environ["OPENAI_BASE_URL"]
    url = url if number is None else url.rsplit("/", 2)[0] + f"/{number}/v1"
    headers = {"Authorization": "Bearer " + (key or os.environ["OPENAI_API_KEY"]), "Content-Type": "application/json"}
    body = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/{path}", body, headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()

def ask(**settings):
    """Return the model's turn, and add it to the messages."""
    status, body = post({"model": os.environ["OPENAI_MODEL"], "messages": messages, **settings})
    if status != 200:
        sys.exit(f"{status}: {body.decode()}")
    message = json.loads(body)["choices"][0]["message"]
    messages.append(message)
    return message["content"]

def say(text, role="user"):
    messages.append({"role": role, "content": text})

def finish(reward, **metrics):
    print(json.dumps({"reward": reward, "metrics": metrics}))
    sys.exit()
'''


def program(folder: Path, code: str, **changes: object) -> ProgramEnvironment:
    """Return an environment whose program is this code, after `PRELUDE`."""
    script = folder / "agent.py"
    script.write_text(PRELUDE + textwrap.dedent(code))
    return program_at(script, **changes)


def program_at(script: Path, **changes: object) -> ProgramEnvironment:
    """Return an environment whose program is a script."""
    fields = {"num_processes": 1, "reset_timeout_seconds": LIMIT_SECONDS, "step_timeout_seconds": LIMIT_SECONDS}
    return ProgramEnvironment.model_validate({"command": ("{python}", str(script)), **fields, **changes})


@contextmanager
def started(environment: ProgramEnvironment, **rollout: object) -> Iterator[EnvironmentPool]:
    """Hold a started pool of an environment."""
    pool = EnvironmentPool(environment_class(environment, TransformersRollout.model_validate(rollout)))
    try:
        pool.start()
        yield pool
    finally:
        pool.close()


def row(answer: str = "", **info: object) -> Task:
    return {"prompt": [{"role": "user", "content": "Begin."}], "answer": answer, "info": dict(info)}


def begin(pool: EnvironmentPool, *tasks: Task) -> dict[int, Reply]:
    """Open rows 0, 1, ..."""
    for number, task in enumerate(tasks or (row(),)):
        pool.open(number, task, seed=number)
    return pool.wait()


def turns(pool: EnvironmentPool, actions: Mapping[int, str] | list[str]) -> dict[int, Reply]:
    for number, action in actions.items() if isinstance(actions, Mapping) else enumerate(actions):
        pool.step(number, write_turn(action, num_before=10, num_tokens=len(action)))
    return pool.wait()


def failure(reply: Reply) -> str:
    assert reply.failure is not None, reply
    return reply.failure.message
