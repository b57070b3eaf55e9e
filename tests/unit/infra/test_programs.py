"""Programs as environments: what they may ask, what ends them, and that nothing of them is left."""

import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from infra.environments.pool import Reply
from infra.environments.program import write_turn
from infra.environments.sandbox import check_sandbox
from infra.integrations.conversation import Conversation, Request
from schemas.errors import ConfigError
from tests.support.programs import PRELUDE, begin, failure, program, program_at, row, started, turns
from tests.support.progress import wait_until
from tests.support.reward_pools import wait_for_exit

GUESSES = """
    say("You guess a number.", role="system")
    messages.reverse()
    for at in range(3):
        guess = ask()
        if guess == task["answer"]:
            finish(1.0, guesses=at + 1)
        say("no, " + guess + " is wrong")
    finish(0)
"""


def test_a_programs_first_request_is_the_prompt_and_what_it_prints_the_reward(tmp_path: Path) -> None:
    with started(program(tmp_path, GUESSES)) as pool:
        replies = begin(pool, row("5"), row("7"))
        assert replies[0].roles == ("system", "user")
        assert replies[0].observations == ("You guess a number.", "Begin.")
        replies = turns(pool, ["3", "<think>hm</think> 7 "])
        assert (replies[0].observations, replies[0].role, replies[0].done) == (("no, 3 is wrong",), "user", False)
        assert (replies[1].reward, replies[1].done, replies[1].metrics) == (1.0, True, {"guesses": 1.0})
        assert turns(pool, {0: "4"})[0].observations == ("no, 4 is wrong",)
        reply = turns(pool, {0: "6"})[0]
        assert (reply.reward, reply.done, reply.failure) == (0.0, True, None)


def test_a_programs_interpreter_may_be_one_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "agent-venv"], check=True)
    (packages,) = tmp_path.glob("agent-venv/lib/python*/site-packages")
    code = 'def main(level):\n    say(f"{sys.prefix}, level {level}")\n    ask()\n    finish(1.0)\n'
    (packages / "my_agent.py").write_text(PRELUDE + code + 'if __name__ == "__main__":\n    main(sys.argv[1])\n')
    python = "agent-venv/bin/python"
    for arguments in (["-m", "my_agent", "{info.level}"], ["-c", "import my_agent; my_agent.main(3)"]):
        check_sandbox({"kind": "process", "network": "host"}, [python, *arguments])
        with started(program_at(Path("none"), command=[python, *arguments])) as pool:
            assert begin(pool, row(level=3))[0].observations[-1] == f"{tmp_path}/agent-venv, level 3"
            assert turns(pool, ["x"])[0].reward == 1.0
    for path in tmp_path.glob("agent-venv/bin/python*"):
        path.unlink()
    with pytest.raises(ConfigError, match=f"there is no program '{tmp_path}/{python}' on "):
        check_sandbox({"kind": "process", "network": "host"}, [python, "-m", "my_agent"])


def test_values_of_the_data_row_are_one_argument_each_and_no_shell_reads_them(tmp_path: Path) -> None:
    script = str(program(tmp_path, "say(json.dumps(sys.argv[1:]))\nask()\nfinish(1.0)").command[1])
    command = ["{python}", script, "--task={info.task}", "{info.levels}", "{info.task}{info.on}", "{workdir}", "{info}"]
    info = {"task": "a b; echo $HOME {python} {info.on}\n", "levels": [1, "x"], "on": True, "none": None}
    environment = program_at(Path(script), command=command)
    lacking = program_at(Path(script), command=["{python}", script, "{info.none}"])
    with started(environment) as pool:
        said = json.loads(begin(pool, row(**info))[0].observations[-1])
        text = info["task"]
        assert said == [f"--task={text}", '[1, "x"]', f"{text}true", os.getcwd(), "{info}"]
    with started(lacking) as pool:
        message = failure(begin(pool, row(**info))[0])
        assert "command has {info.none}, but the info of the data row" in message
        assert "has levels, on, task; name one of these, or add 'none' to" in message
    long = program_at(Path(script), command=["{python}", script, "-{info.task}{info.task}"])
    with started(long) as pool:
        replies = begin(pool, row(task="é" * (2**15 - 1)), row(task="a" * 2**16), row(task="\0"))
        assert len(json.loads(replies[0].observations[-1])[0]) == 2**16 - 1
        said = "with the values of the data row, the argument '-{info.task}{info.task}' has"
        assert f"{said} 131,073 bytes, more than 131,071; let the program" in failure(replies[1])
        assert f"{said} 3 bytes, one of them 0; let the program" in failure(replies[2])


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("ask(temperature=0.5)", "temperature = 0.5 instead of 1.0"),
        ("ask(tool_choice='none', seed=3)", "seed = 3, tool_choice = 'none' instead of 'auto'"),
        ("ask(tools=[{'type': 'custom'}])", "with tools that are not functions"),
        ("ask(tools=[{'type': 'function', 'function': {'name': '\\ud800'}}])", "with tools that can't be encoded"),
        ("say('x', role='\\ud800')\n    ask()", "message 1 of a request has the role '\\ud800'"),
        ("ask(n=0)", "n = 0, expected 1 to 128"),
        ("ask(n=129)", "n = 129, expected 1 to 128"),
        ("ask(n=1.5)", "n = 1.5, expected 1 to 128"),
        ("post({'input': 'x', 'n': 2}, path='responses')", "n = 2, but only chat completions have several choices"),
        ("post({'messages': messages, 'n': 2}, path='messages')", "n = 2, but only chat completions have several"),
        ("ask(max_tokens=0)", "max_tokens = 0 instead of 256"),
        ("ask(stop=['a', ''])", "stop = ['a', ''], expected texts that aren't empty"),
        ("ask(stop='\\ud800')", "a text with the lone surrogate '\\ud800'"),
        ("ask(logprobs=2)", "logprobs = 2, expected true or false"),
        ("ask(logprobs=True, top_logprobs=2)", "top_logprobs = 2 instead of 0"),
        ("post(b'{')", "a request is not JSON"),
        ("post(b'[1]')", "with what is not a JSON object"),
        ("post(b'[' * 10**6)", "a request is not JSON"),
        ("post({'messages': 3})", "without a list of messages"),
        ("post({'messages': []})", "a turn after its own, or after nothing"),
        ("post({'messages': [{'role': 'user', 'content': [{'type': 'image_url'}]}]})", "content of type image_url"),
        ("post({'messages': [{'role': 'user', 'content': 'a', 'name': 'b'}]})", "message 0 of a request has name"),
        ("post({'messages': messages, 'metadata': 'x' * 2**24})", "a request has more than 16,777,216 bytes"),
        ("sys.exit('no such luck')", "exit code 1 before it asked its model anything; its stderr ends with: no such"),
        ("os.kill(0, 9)", "the program ended with signal 9 (Killed) before it asked"),
    ],
)
def test_what_cannot_be_trained_on_fails_its_trajectory_by_name(tmp_path: Path, code: str, message: str) -> None:
    refused = f"\n    {code}\n    finish(1.0)  # whatever it was told"
    with started(program(tmp_path, f"if task['answer'] == 'bad':{refused}\nask()\nfinish(0.5)")) as pool:
        replies = begin(pool, row(), row("bad"))
        assert message in failure(replies[1])
        assert turns(pool, {0: "x"})[0].reward == 0.5


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("ask()", "a turn after its own, or after nothing"),
        ("sys.exit(3)", "the program ended with exit code 3; it wrote nothing to stderr"),
        ("print('done')", "the last line that the program printed is 'done', not its reward"),
        ("print(json.dumps({'reward': float('nan')}))", "step() returned the reward nan"),
        ("finish(1.0, **{'\\ud800': 1})", "step() returned a text with the lone surrogate"),
        ("os.remove('../stdout')\nos.mkfifo('../stdout')\nfinish(1.0)", "the last line that the program printed is ''"),
    ],
)
def test_what_a_program_does_after_a_turn_may_cost_its_trajectory(tmp_path: Path, code: str, message: str) -> None:
    with started(program(tmp_path, f"ask()\n{code}")) as pool:
        begin(pool)
        assert message in failure(turns(pool, ["hello"])[0])


def test_errors_are_openais_and_another_trajectorys_key_costs_nothing(tmp_path: Path) -> None:
    code = """
        PATHS = ("chat/completions", "responses", "messages")
        if task["answer"] == "asker":
            status, body = post({"messages": messages}, key="wrong")
            other, _ = post({"messages": messages}, number=99)
            say(json.dumps([status, other, json.loads(body)["error"]["type"]]))
            ask()
            number = 3 - int(os.environ["OPENAI_BASE_URL"].split("/")[-2])  # the other one's, which asks, too
            say(str([post({"messages": messages}, number=number, path=path)[0] for path in PATHS]))
            ask()
            status, body = post({"messages": messages[:1], "top_p": 0.1})
            sys.exit(f"{status} {body.decode()}")
        ask()
        say("again")
        ask()
        finish(1)
    """
    with started(program(tmp_path, code)) as pool:
        replies = begin(pool, row("asker"), row())
        assert replies[0].observations[-1] == '[401, 401, "invalid_request_error"]'
        assert turns(pool, {0: "x"})[0].observations == ("[401, 401, 401]",)
        assert "top_p = 0.1 instead of 1.0" in failure(turns(pool, {0: "x", 1: "y"})[0])
        assert turns(pool, {1: "z"})[1].reward == 1.0


def test_the_same_request_gets_the_same_answer_and_samples_nothing(tmp_path: Path) -> None:
    code = """
        body = {"model": "any", "messages": messages, "temperature": 1.0, "max_tokens": 999, "n": 1, "user": "me"}
        answers = [post(body), post(body)]
        message = json.loads(answers[0][1])["choices"][0]["message"]
        body["messages"] = messages + [message, {"role": "user", "content": str(answers[0] == answers[1])}]
        second = post(body)
        body["messages"] = messages
        finish(1.0, same=int(post(body) == answers[0] != second))
    """
    with started(program(tmp_path, code)) as pool:
        begin(pool)
        assert turns(pool, ["one"])[0].observations == ("True",)
        assert turns(pool, ["two"])[0].metrics == {"same": 1.0}


def test_requests_are_counted_where_they_come_and_timed_until_they_have_a_turn(tmp_path: Path) -> None:
    code = """
        ask()
        del messages[-1]
        ask()
        post(None, path="models")
        say("go on")
        ask(seed=3)
    """
    with started(program(tmp_path, code)) as pool:
        assert begin(pool)[0].requests == {"chat_completions": 1}
        time.sleep(0.1)
        reply = turns(pool, ["one"])[0]
    assert "seed = 3" in failure(reply)
    seconds = reply.requests["seconds"]
    assert reply.requests == {"chat_completions": 2, "repeated": 1, "refused": 1, "seconds": seconds}
    assert seconds > 0.1


def test_a_turn_may_come_in_chunks(tmp_path: Path) -> None:
    code = """
        body = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        streams = [post(body)[1] for _ in range(2)]
        *lines, last, _ = streams[0].decode().split("\\n\\n")
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        del body["stream_options"]
        without = post(body)[1].decode()
        whole = json.loads(post({"messages": messages})[1])
        say("x")
        messages[1:1] = [{"role": "assistant", "content": "".join(delta.get("content", "") for delta in deltas)}]
        say(json.dumps([
            deltas, [c["choices"] and c["choices"][0]["finish_reason"] for c in chunks], chunks[-1]["usage"], last,
            streams[0] == streams[1], "usage" in without, whole["usage"], whole["choices"][0],
        ]))
        ask(stream=None)
    """
    with started(program(tmp_path, code)) as pool:
        begin(pool)
        said = turns(pool, ["<think>so</think>\n\nyes"])[0].observations
    deltas, ends, usage, last, is_same, has_usage, whole_usage, choice = json.loads(said[1])
    assert deltas == [{"role": "assistant", "content": ""}, {"reasoning_content": "so"}, {"content": "yes"}, {}]
    assert ends == [None, None, None, "stop", []]
    assert usage == whole_usage == {"prompt_tokens": 10, "completion_tokens": 22, "total_tokens": 32}
    assert (last, is_same, has_usage) == ("data: [DONE]", True, False)
    message = {"role": "assistant", "content": "yes", "reasoning_content": "so"}
    assert choice == {"index": 0, "message": message, "finish_reason": "stop"}


def test_requests_while_a_turn_is_sampled_wait_and_the_same_one_gets_the_same_turn(tmp_path: Path) -> None:
    code = """
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(3) as threads:
            first, again = [threads.submit(post, {"messages": messages}) for _ in range(2)]
            time.sleep(0.5)
            other = threads.submit(post, {"messages": [{"role": "user", "content": "another"}]})
            same = first.result() == again.result()
            said = [json.loads(each.result()[1])["choices"][0]["message"]["content"] for each in (first, other)]
            finish(1.0, same=same, first=said[0] == "one", other=said[1] == "two")
    """
    with started(program(tmp_path, code)) as pool:
        begin(pool)
        reply = turns(pool, ["one"])[0]
        assert (reply.observations, reply.roles) == (("another",), ("user",))
        assert turns(pool, ["two"])[0].metrics == {"same": 1.0, "first": 1.0, "other": 1.0}


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


@pytest.mark.parametrize(
    ("code", "roles", "texts", "extras"),
    [
        ("messages[0]['content'] = 'Other.'\nsay('x')", "user assistant user", ["Other.", "hello", "x"], None),
        ("messages[-1]['content'] = 'y'\nsay('x')", "user assistant user", ["Begin.", "y", "x"], None),
        ("messages.pop()\nsay('y')", "user user", ["Begin.", "y"], None),
        ("say('x')\nsay('y', role='system')", "user assistant user system", ["Begin.", "hello", "x", "y"], None),
        (
            "messages[-1]['tool_calls'] = [{'id': 'a', 'function': {'name': 'f', 'arguments': '{\"x\": 1}'}}]\n"
            "messages.append({'role': 'tool', 'tool_call_id': 'a', 'content': '1'})",
            "user assistant tool",
            ["Begin.", "hello", "1"],
            [{}, {"tool_calls": [CALL]}, {"tool_call_id": "a"}],
        ),
    ],
)
def test_a_request_that_leaves_the_chat_is_a_branch(
    tmp_path: Path, code: str, roles: str, texts: list[str], extras: object
) -> None:
    with started(program(tmp_path, f"ask()\n{code}\nask()\nfinish(0.5)")) as pool:
        begin(pool)
        reply = turns(pool, ["hello"])[0]
        assert (" ".join(reply.roles), list(reply.observations), reply.after) == (roles, texts, 0)
        assert (json.loads(reply.extras) if reply.extras else None) == extras
        os.kill(pool.pids[0], 9)
        reply = turns(pool, ["bye"])[0]  # it has been started again, and has asked the same
        assert (reply.reward, reply.done) == (0.5, True)


PARALLEL = """
    from concurrent.futures import ThreadPoolExecutor
    is_again = os.path.exists(task["info"]["mark"])
    open(task["info"]["mark"], "w").close()
    def agent(name, delay):
        time.sleep(delay)
        chat = [{"role": "user", "content": name}]
        for _ in range(2):
            said = json.loads(post({"messages": chat})[1])["choices"][0]["message"]
            chat += [said, {"role": "user", "content": f"{name}, more"}]
    ask()
    with ThreadPoolExecutor(2) as threads:  # the other one is the first to ask when it is started again
        list(threads.map(agent, "AB", (0.5, 0.0) if is_again else (0.0, 0.5)))
    finish(1.0)
"""


def test_parallel_requests_are_answered_in_the_same_order_when_a_program_is_started_again(tmp_path: Path) -> None:
    with started(program(tmp_path, PARALLEL)) as pool:
        begin(pool, row(mark=str(tmp_path / "mark")))
        asked = [turns(pool, [str(number)])[0].observations for number in range(3)]
        os.kill(pool.pids[0], 9)
        reply = turns(pool, ["3"])[0]
        assert reply.failure is None
        assert {*asked, reply.observations} == {("A",), ("A, more",), ("B",), ("B, more",)}
        assert turns(pool, ["4"])[0].reward == 1.0


AT_ONCE = """
    from concurrent.futures import ThreadPoolExecutor
    def agent(name):
        answer = json.loads(post({"messages": [{"role": "user", "content": name}]})[1])
        return answer["choices"][0]["message"]["content"]
    def work(seconds):
        began = time.thread_time()
        while time.thread_time() < began + seconds:
            pass
    with ThreadPoolExecutor(4) as threads:
        asked = []
        for name in "DBCA":  # the first ones have come when the others are asked for
            asked.append(threads.submit(agent, name))
            work(0.05)
        say(" ".join(each.result() for each in asked))
    ask()
    finish(1.0)
"""


def test_parallel_requests_are_answered_in_an_order_of_their_own(tmp_path: Path) -> None:
    with started(program(tmp_path, AT_ONCE)) as pool:
        asked = [begin(pool)[0].observations]
        asked += [turns(pool, [str(number)])[0].observations for number in range(3)]
        assert asked == [("A",), ("B",), ("C",), ("D",)]
        assert turns(pool, ["3"])[0].observations == ("Begin.", "3 1 2 0")
    with started(program(tmp_path, AT_ONCE, resume_rows="as_ready")) as pool:
        assert begin(pool)[0].observations == ("D",)


def test_a_program_that_never_rests_is_answered_all_the_same(tmp_path: Path) -> None:
    code = """
        import subprocess
        runs = [sys.executable, "-c", "print(flush=True)\\nwhile True: pass"]
        subprocess.Popen(runs, stdout=subprocess.PIPE).stdout.readline()
        ask()
        say("x")
        ask()
        finish(1.0)
    """
    with started(program(tmp_path, code, step_timeout_seconds=30)) as pool:
        assert begin(pool)[0].requests["unrested"] == 1
        reply = turns(pool, ["one"])[0]
        assert (reply.observations, "unrested" in reply.requests) == (("x",), False)  # it is not waited for again
        assert turns(pool, ["two"])[0].reward == 1.0


def test_a_program_that_has_asked_in_time_is_not_waited_for_until_its_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.environments.open.REST_FRACTION", 2.0)  # as if most of the time were over when it asks
    code = """
        import subprocess
        ask()
        runs = [sys.executable, "-c", "print(flush=True)\\nwhile True: pass"]
        subprocess.Popen(runs, stdout=subprocess.PIPE).stdout.readline()
        say("x")
        ask()
        say("y")
        ask()
        finish(1.0)
    """
    with started(program(tmp_path, code, step_timeout_seconds=8)) as pool:
        begin(pool)
        for action, observation in (("one", "x"), ("two", "y")):  # a wait that was cut short is not the last one
            reply = turns(pool, [action])[0]
            assert (reply.failure, reply.observations, reply.requests["unrested"]) == (None, (observation,), 1)
        assert turns(pool, ["three"])[0].reward == 1.0


def test_what_was_asked_for_before_the_end_is_not_sampled() -> None:
    async def ask() -> tuple[object, object]:
        conversation, ended = Conversation("it"), asyncio.get_running_loop().create_future()
        for text in "ab":
            conversation.ask({"messages": [{"role": "user", "content": text}]})
        first = await conversation.next_request(ended)
        assert conversation.is_asked
        conversation.answer("one")
        ended.set_result(None)
        return first, await conversation.next_request(ended)

    first, second = asyncio.run(ask())
    assert isinstance(first, Request)
    assert (first.messages[0].content, second) == ("a", None)


CHOICES = """
    ask()
    say("x")
    body = {"messages": messages, "n": 3}
    whole = json.loads(post(body)[1])
    same = post(body)[1] == post(body)[1]
    said = [choice["message"]["content"] for choice in whole["choices"]]
    stream = post(body | {"stream": True, "stream_options": {"include_usage": True}})[1].decode()
    chunks = [json.loads(part.removeprefix("data: ")) for part in stream.split("\\n\\n")[:-2]]
    streamed = ["", "", ""]
    for choice in [choice for chunk in chunks for choice in chunk["choices"]]:
        streamed[choice["index"]] += choice["delta"].get("content", "")
    fewer = json.loads(post(body | {"n": 2})[1])["choices"]
    messages.append(whole["choices"][1]["message"])
    say(json.dumps([said, streamed == said, same, fewer == whole["choices"][:2], whole["usage"], chunks[-1]["usage"]]))
    ask()
    finish(1.0)
"""


def test_each_choice_is_a_turn_after_the_same_chat(tmp_path: Path) -> None:
    with started(program(tmp_path, CHOICES)) as pool:
        begin(pool)
        assert (turns(pool, ["one"])[0].observations, turns(pool, ["a"])[0].after) == (("x",), 1)
        os.kill(pool.pids[0], 9)  # when two choices are left
        reply = turns(pool, ["bc"])[0]
        assert (reply.failure, reply.observations, reply.after) == (None, ("x",), 1)
        reply = turns(pool, ["def"])[0]
        assert reply.after == 3  # after the second choice, of three
        said, *are_same, usage, streamed = json.loads(reply.observations[0])
        assert (said, are_same) == (["a", "bc", "def"], [True, True, True])
        assert usage == streamed == {"prompt_tokens": 10, "completion_tokens": 6, "total_tokens": 16}
        assert turns(pool, ["end"])[0].reward == 1.0


def test_a_request_may_follow_an_earlier_turn(tmp_path: Path) -> None:
    code = """
        ask()
        first = list(messages)
        say("x")
        ask()
        messages[:] = first
        say("y")
        ask()
        finish(1.0)
    """
    with started(program(tmp_path, code)) as pool:
        begin(pool)
        assert turns(pool, ["one"])[0].observations == ("x",)
        reply = turns(pool, ["two"])[0]
        assert (reply.observations, reply.roles, reply.after) == (("y",), (), 1)
        assert turns(pool, ["three"])[0].reward == 1.0


CALLING = """
    add = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    while True:
        stream = task["answer"] == "stream"
        status, body = post({"messages": messages, "tools": [add] if len(messages) < 6 else [], "stream": stream})
        if stream and status == 200:
            chunks = [json.loads(part[6:]) for part in body.decode().split("\\n\\n")[:-2]]
            message = {"role": "assistant", "content": ""}
            for chunk in chunks:
                message |= {name: value for name, value in chunk["choices"][0]["delta"].items() if value}
            choice = {"message": message, "finish_reason": chunks[-1]["choices"][0]["finish_reason"]}
        else:
            choice = json.loads(body)["choices"][0]
        message = choice["message"]
        assert choice["finish_reason"] == ("tool_calls" if "tool_calls" in message else "stop")
        messages.append(message)
        if "tool_calls" not in message:
            say(message["content"])
            continue
        called = message["tool_calls"]
        for call in called[::-1] if task["answer"] == "reversed" else called:
            result = str(sum(json.loads(call["function"]["arguments"]).values()))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
"""
ADD = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": %d}}</tool_call>'


def test_a_model_calls_the_tools_of_a_program(tmp_path: Path) -> None:
    with started(program(tmp_path, CALLING)) as pool:
        replies = begin(pool, row(), row("stream"), row("reversed"))
        assert json.loads(replies[0].tools)[0]["function"]["name"] == "add"
        replies = turns(pool, [f"<think>{ADD % 9}</think>I add. {ADD % 3} and {ADD % 4}"] * 3)
        for number in (0, 1):
            assert (replies[number].observations, replies[number].role) == (("5", "6"), "tool")
        assert replies[2].roles == ("user", "assistant", "tool", "tool")  # in another order, they are a branch
        os.kill(pool.pids[0], 9)
        text = '<tool_call>{"name": "add"</tool_call>'
        replies = turns(pool, {0: ADD % 7, 1: text})  # the latter can't be read
        assert (replies[0].roles[-1], replies[0].tools) == ("tool", "")  # and so are other tools
        assert (replies[1].observations[-1], replies[1].tools) == (text, "")


def test_a_model_may_write_a_call_as_its_whole_turn(tmp_path: Path) -> None:
    with started(program(tmp_path, CALLING, parser="json")) as pool:
        begin(pool)
        call = (ADD % 3).removeprefix("<tool_call>").removesuffix("</tool_call>")
        reply = turns(pool, [f"<think>so</think>```json\n{call}\n```"])[0]
        assert (reply.failure, reply.observations, reply.role) == (None, ("5",), "tool")
        assert turns(pool, [ADD % 4])[0].observations[-1] == ADD % 4  # a text


def test_a_call_that_cannot_be_read_is_a_text(tmp_path: Path) -> None:
    with started(program(tmp_path, CALLING)) as pool:
        begin(pool)
        text = '<tool_call>{"name": "add"</tool_call>'
        assert turns(pool, [text])[0].observations == (text,)


def test_a_client_may_hang_up_and_ask_again(tmp_path: Path) -> None:
    code = """
        import socket
        from urllib.parse import urlsplit
        url, body = urlsplit(os.environ["OPENAI_BASE_URL"]), json.dumps({"messages": messages, "stream": True}).encode()
        for length in (len(body), 10**6):
            with socket.create_connection((url.hostname, url.port)) as connection:
                head = f"POST {url.path}/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: {length}\\r\\n"
                key = os.environ["OPENAI_API_KEY"]
                connection.sendall(f"{head}Authorization: Bearer {key}\\r\\n\\r\\n".encode() + body)
        ask()
        finish(0.25)
    """
    with started(program(tmp_path, code)) as pool:
        begin(pool)
        assert turns(pool, ["x"])[0].reward == 0.25


HOSTILE = """
    import socket
    from urllib.parse import urlsplit
    if task["answer"] == "deaf":  # it never reads what it has asked for
        url, body = urlsplit(os.environ["OPENAI_BASE_URL"]), json.dumps({"messages": messages, "stream": True}).encode()
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((url.hostname, url.port))
        head = f"POST {url.path}/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: {len(body)}\\r\\n"
        connection.sendall(f"{head}Authorization: Bearer {os.environ['OPENAI_API_KEY']}\\r\\n\\r\\n".encode() + body)
        time.sleep(1000)
    if task["answer"] == "loud":
        try:
            post({"messages": messages, "metadata": "x" * 10**8})
        except OSError:
            pass  # it was cut off
        finish(1.0)
    ask()
    say("again")
    ask()
    finish(0.5)
"""


def test_clients_that_do_not_read_or_send_too_much_cost_their_own_trajectories(tmp_path: Path) -> None:
    def peak() -> int:
        status = Path(f"/proc/{pool.pids[0]}/status").read_text()
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])

    def answered(text: str) -> Reply:
        pool.step(2, write_turn(text, 10, 1))
        return pool.wait([2])[2]

    with started(program(tmp_path, HOSTILE)) as pool:
        before, pid = peak(), pool.pids[0]
        replies = begin(pool, row("deaf"), row("loud"), row())
        assert "a request has more than 16,777,216 bytes" in failure(replies[1])
        assert peak() - before < 80 * 2**20
        pool.step(0, write_turn("x" * 10**7, 10, 10))  # more than a connection holds
        assert answered("x").observations == ("again",)
        assert answered("y").reward == 0.5
        pool.end(0)
        pool.open(0, row(), seed=0)
        assert pool.wait([0])[0].failure is None
        assert pool.pids == [pid]


def test_a_grader_sees_the_folder_the_chat_and_the_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "grading.py").write_text(
        """
async def grade(program):
    left = {path.name: path.read_text() for path in program.folder.iterdir()}
    assert program.messages[-1] == {"role": "assistant", "content": "hello"}, program.messages
    assert program.chats == [program.messages]
    assert left == {"answer": "hello"}, left
    return program.exit_code, {"printed": float(program.output), "asked": program.task["info"]["asked"]}

def fails(program):
    raise LookupError("no grade")

grade_of = 3
"""
    )
    monkeypatch.syspath_prepend(tmp_path)
    code = 'open("answer", "w").write(ask())\nprint(5)\nsys.exit(4)'
    with started(program(tmp_path, code, grader="grading:grade")) as pool:
        begin(pool, row(asked=2))
        reply = turns(pool, ["hello"])[0]
        assert (reply.reward, reply.done, reply.metrics) == (4.0, True, {"printed": 5.0, "asked": 2.0})
    with started(program(tmp_path, code, grader="grading:fails")) as pool:
        begin(pool)
        assert "LookupError: no grade" in failure(turns(pool, ["hello"])[0])
    for grader, message in {
        "grading:grade_of": "there is no function 'grade_of'",
        "none:f": "importing 'none'",
    }.items():
        with started(program(tmp_path, code, grader=grader)) as pool:
            assert message in failure(begin(pool)[0])


def test_a_program_that_ends_before_its_turn_is_not_rewarded_for_it(tmp_path: Path) -> None:
    code = """
        import threading
        threading.Thread(target=ask, daemon=True).start()
        time.sleep(2)  # its client has given up
        print(json.dumps({"reward": 0.0}), flush=True)
        open(task["info"]["log"], "w").write(str(os.getpid()))
        os._exit(0)
    """
    with started(program(tmp_path, code)) as pool:
        begin(pool, row(log=str(tmp_path / "log")))
        wait_until(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text())
        pid = int((tmp_path / "log").read_text())
        wait_until(lambda: not psutil.pid_exists(pid))
        assert "the program ended while it waited for its model's turn" in failure(turns(pool, ["good"])[0])


def test_what_a_program_starts_in_a_session_of_its_own_ends_with_it(tmp_path: Path) -> None:
    code = """
        import subprocess
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        os.mkdir("cache")
        os.chmod("cache", 0o500)
        say(f"{os.getcwd()} {child.pid}")
        ask()
    """
    with started(program(tmp_path, code)) as pool:
        folder, child = begin(pool)[0].observations[-1].split()
        pool.end_all()
        wait_until(lambda: not psutil.pid_exists(int(child)) and not Path(folder).exists())


def test_what_a_killed_environment_process_has_left_in_other_sessions_is_ended(tmp_path: Path) -> None:
    code = """
        import subprocess
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        say(f"{os.getcwd()} {child.pid}")
        ask()
        say("again")
    """
    with started(program(tmp_path, code)) as pool:
        folder, child = begin(pool)[0].observations[-1].split()
        os.kill(pool.pids[0], 9)
        pool.open(1, row(), seed=1)  # starts a program in the process that takes its place
        pool.wait([1])
        wait_until(lambda: not psutil.pid_exists(int(child)) and not Path(folder).exists())


def test_a_program_that_ignores_signals_ends_with_its_environment_process(tmp_path: Path) -> None:
    code = """
        import signal
        for number in (signal.SIGIO, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        say(str(os.getpid()))
        ask()
    """
    with started(program(tmp_path, code)) as pool:
        pid = int(begin(pool)[0].observations[-1])
        os.kill(pool.pids[0], 9)
        wait_for_exit(pid)


def test_a_program_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    code = """
        import subprocess
        child = subprocess.Popen(["sleep", "1000"])
        print("I wait", file=sys.stderr, flush=True)
        if task["answer"] == "silent":
            open(task["info"]["log"], "w").write(f"{os.getpid()} {child.pid} {os.getcwd()}")
            time.sleep(1000)
        say(f"{os.getcwd()} {os.getpid()} {child.pid}")
        ask()
        time.sleep(1000)
    """
    limits = {"reset_timeout_seconds": 4.0, "step_timeout_seconds": 1.0}
    with started(program(tmp_path, code, **limits)) as pool:
        replies = begin(pool, row(), row("silent", log=str(tmp_path / "log")))
        said = "the program has neither asked its model nor ended; its stderr ends with: I wait"
        assert f"no answer within 4 s; {said}" in failure(replies[1])
        folder, parent, child = replies[0].observations[-1].split()
        assert Path(folder).is_dir()
        assert "no answer within 1 s" in failure(turns(pool, {0: "x"})[0])
        pool.end_all()
        silent, its_child, its_folder = (tmp_path / "log").read_text().split()
        for pid in (parent, child, silent, its_child):
            wait_until(lambda pid=pid: not psutil.pid_exists(int(pid)))
        wait_until(lambda: not Path(folder).exists() and not Path(its_folder).exists())


def test_a_program_has_limits_a_home_and_no_more_memory(tmp_path: Path) -> None:
    code = """
        import resource
        assert os.environ["HOME"] == os.environ["TMPDIR"] == os.getcwd() and not os.listdir()
        assert resource.getrlimit(resource.RLIMIT_AS)[1] == 2**28 and os.getsid(0) == os.getpid()
        assert "127.0.0.1" in os.environ["NO_PROXY"] and task["seed"] == 0
        try:
            bytearray(2**29)
        except MemoryError:
            say("too much")
        ask()
    """
    with started(program(tmp_path, code, memory_bytes=2**28)) as pool:
        assert begin(pool)[0].observations[-1] == "too much"


def test_more_programs_than_a_process_usually_may_have_files_for(tmp_path: Path) -> None:
    code = """
        import resource
        say(str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
        ask()
        finish(1.0)
    """
    most, hard = 96, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with started(program(tmp_path, code, reset_timeout_seconds=300.0)) as pool:
        resource.prlimit(pool.pids[0], resource.RLIMIT_NOFILE, (most, hard))  # instead of the usual 1,024
        replies = begin(pool, *[row()] * most)
        assert {reply.observations[-1] for reply in replies.values()} == {str(most)}
        assert psutil.Process(pool.pids[0]).num_fds() > most
        assert {reply.reward for reply in turns(pool, ["x"] * most).values()} == {1.0}


COUNTED = """
    log = open(task["info"]["log"], "a")
    print(os.getpid(), file=log, flush=True)
    for at in range(4):
        if at == 1 and task["answer"] == "odd":
            say(str(os.getpid()))
        said = ask()
        print("asked", file=log, flush=True)
        say(f"{at} {said}")
    finish(1.0)
"""


def test_a_killed_process_takes_its_programs_along_and_they_are_started_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with started(program(tmp_path, COUNTED)) as pool:
        begin(pool, row(log=str(log)))
        turns(pool, ["a"])
        turns(pool, ["b"])
        first = int(log.read_text().split()[0])
        root = Path(os.readlink(f"/proc/{first}/cwd")).parents[1]
        os.kill(pool.pids[0], 9)
        wait_for_exit(first)
        third = turns(pool, ["c"])[0]
        assert third.observations == ("2 c",)
        assert {**third.requests, "seconds": 0} == {"chat_completions": 1, "seconds": 0}  # none is counted twice
        asked, again, asked_again = (
            log.read_text().split()[1:3],
            log.read_text().split()[3],
            log.read_text().split()[4:],
        )
        assert (asked, again != str(first), asked_again) == (["asked"] * 2, True, ["asked"] * 3)
        assert not root.exists()  # the next process has removed it
        assert turns(pool, ["d"])[0].reward == 1.0


def test_a_program_that_asks_otherwise_when_it_is_started_again_differs(tmp_path: Path) -> None:
    with started(program(tmp_path, COUNTED)) as pool:
        begin(pool, row("odd", log=str(tmp_path / "log")), row(log=str(tmp_path / "other")))
        turns(pool, ["a", "b"])
        os.kill(pool.pids[0], 9)
        time.sleep(0.2)
        replies = turns(pool, ["c", "d"])
        assert replies[0].failure is not None
        assert replies[0].failure.kind == "differs"
        assert "when it was made again: its answer 1 is" in replies[0].failure.message
        assert replies[1].observations == ("1 d",)


EXAMPLE = Path(__file__).parents[3] / "examples" / "any_agent"
OPENAI = """
    from openai import AuthenticationError, BadRequestError, OpenAI
    client, model = OpenAI(), os.environ["OPENAI_MODEL"]
    try:
        OpenAI(api_key="another").chat.completions.create(model=model, messages=messages)
    except AuthenticationError as error:
        say(error.message)
    whole = client.chat.completions.create(model=model, messages=messages, temperature=1, n=1)
    messages += [whole.choices[0].message, {"role": "user", "content": f"{whole.usage.total_tokens} tokens"}]
    stream = client.chat.completions.create(
        model=model, messages=messages, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    messages += [
        {"role": "assistant", "content": said},
        {"role": "user", "content": f"{chunks[-1].choices[0].finish_reason} {last.usage.completion_tokens}"},
    ]
    client.chat.completions.create(model=model, messages=messages)
    try:
        client.chat.completions.create(model=model, messages=messages, top_p=0.1)
    except BadRequestError as error:
        sys.exit(error.message)
"""


OPENAI_TOOLS = """
    from openai import OpenAI
    client, add = OpenAI(), {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    stream = task["answer"] == "stream"
    while True:
        asked = {"model": "any", "messages": messages, "tools": [add]}
        if stream:
            with client.chat.completions.stream(**asked) as events:
                message = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**asked).choices[0].message
        if not message.tool_calls:
            finish(float(message.content))
        messages.append(message.model_dump())
        for call in message.tool_calls:
            result = str(sum(json.loads(call.function.arguments).values()))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
"""


def test_the_openai_client_calls_tools(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    with started(program(tmp_path, OPENAI_TOOLS)) as pool:
        begin(pool, row(), row("stream"))
        for reply in turns(pool, [f"{ADD % 3}{ADD % 4}"] * 2).values():
            assert (reply.observations, reply.role) == (("5", "6"), "tool")
        assert [reply.reward for reply in turns(pool, ["11", "12"]).values()] == [11.0, 12.0]


def test_the_openai_client_asks_streams_and_reads_errors(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    with started(program(tmp_path, OPENAI)) as pool:
        assert "this is not the key of this trajectory" in begin(pool)[0].observations[1]
        assert turns(pool, ["yes"])[0].observations == ("13 tokens",)
        assert turns(pool, ["<think>why</think>no"])[0].observations == ("stop 20",)
        assert "top_p = 0.1 instead of 1.0" in failure(turns(pool, ["end"])[0])


@pytest.mark.parametrize("agent", ["agent.py", "agent_openai.py"])
def test_the_agents_of_the_example_play(agent: str) -> None:
    if agent == "agent_openai.py":
        pytest.importorskip("openai")
    with started(program_at(EXAMPLE / agent)) as pool:
        begin(pool)
        said = [turns(pool, [str(guess)])[0] for guess in (1, "x")]
        assert [reply.observations for reply in said] == [("higher",), ("say a number",)]
        reply = turns(pool, ["7"])[0]
        assert (reply.reward, reply.done, reply.metrics) == (1.0, True, {"guesses": 3.0})
