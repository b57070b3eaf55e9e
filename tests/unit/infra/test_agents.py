"""Agents that exist already, as programs: each is driven through a task by turns that a model might have written.

`make agents` installs them into an interpreter of their own.
"""

import json
from pathlib import Path

import pytest

from infra.environments.pool import Reply
from tests.support.programs import begin, program, row, started, turns

PYTHON = Path(__file__).parents[3] / ".venv-agents" / "bin" / "python"
SECONDS = {"reset_timeout_seconds": 120.0, "step_timeout_seconds": 60.0}  # some take seconds to be imported
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="run `make agents`, which installs the agents")

OPENAI_AGENTS = """
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
    from agents import set_tracing_disabled
    from openai import AsyncOpenAI

    @function_tool
    def add(a: int, b: int) -> int:
        "adds"
        return a + b

    set_tracing_disabled(True)
    kind = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}[task["info"]["api"]]
    agent = Agent(name="adder", instructions="You add.", tools=[add], model=kind("policy", AsyncOpenAI()))
    if task["info"]["stream"]:
        import asyncio

        async def run():
            result = Runner.run_streamed(agent, "Begin.")
            async for _ in result.stream_events():
                pass
            return result

        result = asyncio.run(run())
    else:
        result = Runner.run_sync(agent, "Begin.")
    finish(float(result.final_output))
"""
PYDANTIC_AI = """
    from pydantic_ai import Agent

    agent = Agent(task["info"]["api"], instructions="You add.")

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        "adds"
        return a + b

    async def watch(context, events):
        async for _ in events:
            pass

    handler = watch if task["info"]["stream"] else None
    finish(float(agent.run_sync("Begin.", event_stream_handler=handler).output))
"""
LANGGRAPH = """
    from langchain_core.tools import tool
    from langgraph.prebuilt import create_react_agent

    @tool
    def add(a: int, b: int) -> int:
        "adds"
        return a + b

    if task["info"]["api"] == "messages":
        from langchain_anthropic import ChatAnthropic
        model = ChatAnthropic(model="policy", max_tokens=1024)
    else:
        from langchain_openai import ChatOpenAI
        model = ChatOpenAI(model="policy", use_responses_api=task["info"]["api"] == "responses")
    agent = create_react_agent(model, [add], prompt="You add.")
    asked = {"messages": [("user", "Begin.")]}
    if task["info"]["stream"]:
        for mode, last in agent.stream(asked, stream_mode=["messages", "values"]):
            if mode == "values":
                result = last
    else:
        result = agent.invoke(asked)
    text = result["messages"][-1].content
    finish(float(text if isinstance(text, str) else text[-1]["text"]))
"""
SMOLAGENTS = """
    from smolagents import CodeAgent, OpenAIModel, tool

    @tool
    def add(a: int, b: int) -> int:
        "Adds.\\n\\n    Args:\\n        a: A number.\\n        b: Another one.\\n    "
        return a + b

    model = OpenAIModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    agent = CodeAgent([add], model, stream_outputs=task["info"]["stream"], verbosity_level=0)
    answer = agent.run("Begin.")
    print()  # ends what it has printed of a stream
    finish(float(answer))
"""
MINI_SWE = """
    os.environ |= {"MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_SILENT_STARTUP": "1"}
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    model = LitellmModel(model_name=task["info"]["api"])
    agent = DefaultAgent(model, LocalEnvironment(), system_template="You solve.", instance_template="{{task}}")
    finish(float(agent.run("Begin.")["submission"]))
"""

CALL = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'
ADDS = [CALL % ("add", json.dumps({"a": 2, "b": number})) for number in (3, 4)]
BASH = [CALL % ("bash", json.dumps({"command": command})) for command in ("echo 5 > out; cat out", "echo 6")]
SUBMIT = CALL % ("bash", json.dumps({"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 11"}))


@pytest.mark.parametrize(
    ("code", "api"),
    [
        (OPENAI_AGENTS, "chat"),
        (OPENAI_AGENTS, "responses"),
        (PYDANTIC_AI, "openai-chat:policy"),
        (PYDANTIC_AI, "openai-responses:policy"),
        (PYDANTIC_AI, "anthropic:policy"),
        (LANGGRAPH, "chat"),
        (LANGGRAPH, "responses"),
        (LANGGRAPH, "messages"),
    ],
)
def test_an_agent_calls_tools_two_at_once(tmp_path: Path, code: str, api: str) -> None:
    texts = [f"<think>so</think>I add. {ADDS[0]} and {ADDS[1]}", "<think>so</think>11"]
    prompts, answers, ends = play(tmp_path, code, api, texts)
    for prompt in prompts:
        assert (prompt.roles, prompt.observations) == (("system", "user"), ("You add.", "Begin."))
        (tool,) = json.loads(prompt.tools)
        assert (tool["type"], tool["function"]["name"], tool["function"]["description"]) == ("function", "add", "adds")
        assert set(tool["function"]["parameters"]["properties"]) == {"a", "b"}
    assert [(answer.role, answer.observations) for answer in answers] == [("tool", ("5", "6"))] * 2
    assert [end.reward for end in ends] == [11.0] * 2


def test_an_agent_writes_code(tmp_path: Path) -> None:
    texts = ["Thought: I add.\n<code>\nprint(add(2, 3))\n</code>", "<code>\nfinal_answer(5 + 6)\n</code>"]
    prompts, answers, ends = play(tmp_path, SMOLAGENTS, "", texts)
    assert [prompt.observations[1] for prompt in prompts] == ["New task:\nBegin."] * 2
    assert ["Execution logs:\n5\n" in answer.observations[-1] for answer in answers] == [True] * 2
    assert [end.reward for end in ends] == [11.0] * 2


@pytest.mark.parametrize("api", ["openai/policy", "anthropic/policy"])
def test_an_agent_runs_commands(tmp_path: Path, api: str) -> None:
    prompts, answers, ends = play(tmp_path, MINI_SWE, api, ["I look." + "".join(BASH), SUBMIT])
    assert [json.loads(prompt.tools)[0]["function"]["name"] for prompt in prompts] == ["bash"] * 2
    said = tuple(f"<returncode>0</returncode>\n<output>\n{number}\n</output>" for number in (5, 6))
    assert [(answer.role, answer.observations) for answer in answers] == [("tool", said)] * 2
    assert [end.reward for end in ends] == [11.0] * 2


def play(folder: Path, code: str, api: str, texts: list[str]) -> list[list[Reply]]:
    """Return what an agent answers to its start and to these turns, without and with streaming."""
    environment = program(folder, code, command=(str(PYTHON), str(folder / "agent.py")), **SECONDS)
    with started(environment) as pool:
        replies = [begin(pool, row(api=api, stream=False), row(api=api, stream=True))]
        for text in texts:
            assert [reply.failure for reply in replies[-1].values()] == [None] * 2
            replies.append(turns(pool, [text] * 2))
        assert [reply.failure for reply in replies[-1].values()] == [None] * 2
        return [list(each.values()) for each in replies]
