"""Programs in containers, which a stand-in for Docker's command line starts, and in sandboxes of users' own classes."""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import ValidationError

from infra.environments import sandbox as sandboxes
from infra.environments.launch import close_off
from infra.environments.open import environment_class
from infra.environments.sandbox import HOME, SOCKET, Container, check_sandbox
from rl_core.environments.base import Endpoint, Launch
from schemas.config.environment import ProgramEnvironment
from schemas.config.rollout import TransformersRollout
from schemas.errors import ConfigError, ServiceError
from tests.support import container_cli
from tests.support.programs import begin, failure, program, row, started, turns
from tests.support.progress import wait_until

IMAGE = "agents:1"
USER = [] if os.getuid() == 0 else ["--user", "--map-current-user", "--keep-caps"]
NAMESPACES = ["unshare", *USER, "--mount", "--net", "--pid", "--fork"]


def can_start_containers() -> bool:
    try:
        return subprocess.run([*NAMESPACES, "true"], capture_output=True).returncode == 0
    except OSError:
        return False


needs_namespaces = pytest.mark.skipif(
    not can_start_containers(),
    reason="the stand-in for Docker needs `unshare`, and a kernel that allows it",
)


class Docker:
    """The stand-in, with one image, whose files are this machine's."""

    def __init__(self, folder: Path) -> None:
        self.state, self.path = folder / "docker", folder / "docker.sh"
        (self.state / "bin").mkdir(parents=True)
        (self.state / "bin" / "python3").symlink_to(sys.executable)
        (self.state / "images").write_text(IMAGE)
        (self.state / "path").write_text(f"{self.state / 'bin'}:{os.environ['PATH']}")
        self.path.write_text(f'#!/bin/sh\nexec {sys.executable} {container_cli.__file__} {self.state} "$@"\n')
        self.path.chmod(0o700)

    def program(
        self, code: str, *, sandbox: Mapping[str, object] | None = None, command: str | None = None, **changes: object
    ) -> ProgramEnvironment:
        folder = self.path.parent / f"program-{secrets.token_hex(4)}"
        folder.mkdir()
        environment = program(folder, code, **changes)
        given = {"kind": "container", "image": IMAGE, "program": str(self.path), **(sandbox or {})}
        whole = ["python3", environment.command[1]] if command is None else [command]
        return ProgramEnvironment.model_validate(environment.model_dump() | {"command": whole, "sandbox": given})

    def calls(self, command: str) -> list[list[str]]:
        lines = (self.state / "log").read_text().splitlines()
        return [arguments for name, *arguments in map(json.loads, lines) if name == command]

    def containers(self) -> list[dict[str, object]]:
        return container_cli.records(self.state)


@pytest.fixture
def docker(tmp_path: Path) -> Docker:
    return Docker(tmp_path)


@needs_namespaces
def test_a_container_has_the_models_api_and_nothing_else(docker: Docker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNS_SECRET", "x")
    code = """
        import socket
        assert os.environ["HOME"] == os.environ["TMPDIR"] == os.getcwd() and not os.listdir()
        names = [name for _, name in socket.if_nameindex()]
        say(json.dumps([names, os.environ["OPENAI_BASE_URL"], "RUNS_SECRET" in os.environ, task["seed"]]))
        try:
            os.waitpid(-1, os.WNOHANG)
            sys.exit("the relay is a child")
        except ChildProcessError:
            pass
        first = ask()
        say(first, role="tool")
        _, body = post({"messages": messages, "stream": True})
        say(str(body.count(b"data: ")))
        messages[-1:-1] = [{"role": "assistant", "content": "two"}]
        ask()
        finish(0.5, asked=3)
    """
    with started(docker.program(code, memory_bytes=2**31)) as pool:
        names, url, has_secret, seed = json.loads(begin(pool)[0].observations[-1])
        assert (names, url, has_secret, seed) == (["lo"], "http://127.0.0.1:8411/1/v1", False, 0)
        assert turns(pool, ["one"])[0].observations == ("one",)
        assert int(turns(pool, ["two"])[0].observations[0]) >= 3
        (container,) = docker.containers()
        options = container["options"]
        reply = turns(pool, ["three"])[0]
        assert (reply.failure, reply.reward, reply.metrics) == (None, 0.5, {"asked": 3.0})
        pool.end_all()
        wait_until(lambda: not docker.containers())
    assert isinstance(options, dict)
    assert options["user"] == [f"{os.getuid()}:{os.getgid()}"]
    assert options["memory"] == options["memory-swap"] == [str(2**31)]
    assert (options["pull"], options["network"], options["init"]) == (["never"], ["none"], True)
    (command,) = docker.calls("run")
    assert not any("RUNS_SECRET" in part or "API_KEY" in part for part in command)


@needs_namespaces
def test_a_container_sees_nothing_of_another_trajectory(docker: Docker) -> None:
    code = """
        home = os.getcwd()
        open("mine", "w").write(task["answer"])
        ask()  # all have one by now
        folder = os.path.dirname(os.path.dirname(home))
        found = sorted(os.path.join(place, name) for place, _, names in os.walk(folder) for name in names)
        own, sockets = [[path for path in found if path.startswith(home) == is_own] for is_own in (True, False)]
        say(json.dumps([[os.path.relpath(path) for path in own], len(sockets), open(own[0]).read()]))
        ask()
        finish(1.0)
    """
    with started(docker.program(code)) as pool:
        begin(pool, row("a"), row("b"))
        seen = [json.loads(reply.observations[0]) for reply in turns(pool, ["x", "y"]).values()]
        assert seen == [[["mine"], 1, "a"], [["mine"], 1, "b"]]  # its own file, and the socket of the model's endpoint
        assert {reply.reward for reply in turns(pool, ["x", "y"]).values()} == {1.0}


GRADED = """
    said = ask()
    if said == "again":
        say("go on")
        ask()
    open("left.txt", "w").write(said)
    print("bye")
    sys.exit(int(task["answer"]))
"""
GRADER = """
def grade(program):
    return float(program.exit_code), {"left": float((program.folder / "left.txt").read_text() == "hello")}
"""


@pytest.fixture
def grader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The import path of a grader, which environment processes find as this one does."""
    (tmp_path / "container_grader.py").write_text(GRADER)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "container_grader:grade"


@needs_namespaces
def test_a_grader_sees_what_a_container_left_and_its_exit_code(docker: Docker, grader: str) -> None:
    with started(docker.program(GRADED, grader=grader)) as pool:
        begin(pool, row("0"), row("3"), row("125"))  # the last one is the program's own
        replies = turns(pool, ["hello"] * 3)
        assert [reply.reward for reply in replies.values()] == [0.0, 3.0, 125.0]
        assert {reply.metrics["left"] for reply in replies.values()} == {1.0}


@needs_namespaces
def test_what_fails_instead_of_the_program_is_not_graded(docker: Docker, grader: str) -> None:
    with started(docker.program(GRADED, grader=grader)) as pool:
        begin(pool, row("0"), row("0"))
        turns(pool, ["again"] * 2)
        clients = {process.pid: process for process in psutil.Process(pool.pids[0]).children()}
        client = next(process for process in clients.values() if "run" in process.cmdline())
        client.kill()
        wait_until(lambda: not client.is_running())
        replies = turns(pool, ["x", "x"])
        (lost,) = [reply for reply in replies.values() if reply.failure is not None]
        assert "failed with exit code -9, and not the program in the container (" in failure(lost)
        begin_again = row("0")
        pool.end_all()
        wait_until(lambda: not docker.containers())
        begin(pool, begin_again)
        (docker.state / "down").touch()
        wait_until(lambda: len(psutil.Process(pool.pids[0]).children()) == 1)  # that waits to remove what is left
        message = failure(turns(pool, ["x"])[0])
        assert "failed with exit code 125, and not the program in the container (Cannot connect" in message
        assert "its stderr ends with: error waiting for container: unexpected EOF" in message
        (docker.state / "down").unlink()


@needs_namespaces
@pytest.mark.parametrize(
    ("code", "changes", "message"),
    [
        ("sys.exit('no such luck')", {}, "ended with exit code 1 before it asked its model anything; its stderr ends"),
        ("os.kill(os.getpid(), 9)", {}, "the program ended with exit code 137 before it asked"),
        ("x = bytearray(2**28)\ntime.sleep(1000)", {"memory_bytes": 2**27}, "took more memory than 134,217,728 bytes"),
        ("", {"command": "no-such-agent"}, "no-such-agent can't be started: No such file or directory"),
        ("", {"sandbox": {"image": "other"}}, "No such image: other"),
        ("", {"sandbox": {"options": ["--mount=type=bind,source=/nowhere,target=/data"]}}, "failed with exit code 125"),
    ],
)
def test_a_container_that_ends_too_early_says_why(
    docker: Docker, code: str, changes: dict[str, Any], message: str
) -> None:
    with started(docker.program(code, **changes)) as pool:
        assert message in failure(begin(pool)[0])


@needs_namespaces
def test_an_image_without_python_needs_the_hosts_network(docker: Docker) -> None:
    (docker.state / "bin" / "python3").rename(docker.state / "bin" / "python-of-ours")
    (docker.state / "path").write_text(str(docker.state / "bin"))
    environment = docker.program("say(os.environ['OPENAI_BASE_URL'])\nask()\nfinish(1)")
    environment = environment.replace(command=("python-of-ours", environment.command[1]))
    with started(environment) as pool:
        assert "ended with exit code 127 before it asked" in (message := failure(begin(pool)[0]))
        assert "exec python3 failed" in message
    with started(environment.replace(sandbox=environment.sandbox.replace(network="host"))) as pool:
        url = begin(pool)[0].observations[-1]
        assert url.startswith("http://127.0.0.1:")
        assert ":8411" not in url
        assert turns(pool, ["x"])[0].reward == 1.0


HANGING = """
    import subprocess
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print("I wait", file=sys.stderr, flush=True)
    say(os.getcwd())
    ask()
    time.sleep(1000)
"""


def processes_of(docker: Docker) -> list[psutil.Process]:
    """Return the processes of all containers."""
    outer = [psutil.Process(int(str(container["pid"]))) for container in docker.containers()]
    return [process for each in outer for process in (each, *each.children(recursive=True))]


@needs_namespaces
def test_a_container_that_hangs_is_killed_with_all_that_it_has_started(docker: Docker) -> None:
    with started(docker.program(HANGING, step_timeout_seconds=1.0)) as pool:
        folder = begin(pool)[0].observations[-1]
        running = processes_of(docker)
        assert len(running) >= 4  # unshare, its init, the program, its child and the relay
        said = "the program has neither asked its model nor ended; its stderr ends with: I wait"
        assert f"no answer within 1 s; {said}" in failure(turns(pool, ["x"])[0])
        pool.end_all()
        wait_until(lambda: not any(process.is_running() for process in running))
        wait_until(lambda: not docker.containers() and not Path(folder).exists())


@needs_namespaces
@pytest.mark.parametrize("is_remover_killed", [False, True])
def test_no_container_outlives_its_environment_process_for_long(docker: Docker, is_remover_killed: bool) -> None:
    with (
        started(docker.program("ask()\nsay('more')\nask()\nfinish(1.0)")) as other,
        started(docker.program(HANGING)) as pool,
    ):
        begin(other)
        begin(pool)
        owners = {container["id"]: container["labels"] for container in docker.containers()}
        assert len({str(labels) for labels in owners.values()}) == 2
        (remover,) = [
            each for each in psutil.Process(pool.pids[0]).children() if "sys.stdin.read()" in str(each.cmdline())
        ]
        if is_remover_killed:
            remover.kill()
        os.kill(pool.pids[0], signal.SIGKILL)
        if is_remover_killed:
            with started(docker.program("ask()\nfinish(1.0)")) as third:  # the next one removes what is left
                begin(third)
                left = {container["id"] for container in docker.containers()} & owners.keys()
                assert len(left) == 1
                assert turns(third, ["x"])[0].reward == 1.0
        wait_until(lambda: len(docker.containers()) == 1)
        turns(other, ["x"])
        assert turns(other, ["y"])[0].reward == 1.0


@needs_namespaces
def test_a_killed_environment_process_starts_its_containers_again(docker: Docker) -> None:
    with started(docker.program("said = ask()\nsay(said + '!')\nask()\nfinish(1.0)")) as pool:
        begin(pool)
        assert turns(pool, ["a"])[0].observations == ("a!",)
        os.kill(pool.pids[0], signal.SIGKILL)
        assert turns(pool, ["b"])[0].reward == 1.0
        assert len(docker.calls("run")) == 2


def test_what_a_machine_lacks_is_said_before_a_start(docker: Docker) -> None:
    settings = docker.program("").sandbox.model_dump(mode="json")
    check_sandbox(settings, ["agent"])
    with pytest.raises(ConfigError, match=r"no image 'other' on .* \(Error.*\); Sluice pulls none: .* pull other"):
        check_sandbox(settings | {"image": "other"}, ["agent"])
    (docker.state / "down").touch()
    with pytest.raises(ServiceError, match=r"can't run containers \(Cannot connect to the Docker daemon at unix"):
        check_sandbox(settings, ["agent"])
    with pytest.raises(ConfigError, match=r"there is no program 'no-docker' on .*; install Docker or Podman"):
        check_sandbox(settings | {"program": "no-docker"}, ["agent"])
    with pytest.raises(ConfigError, match="there is no program 'no-agent' on"):
        check_sandbox({"kind": "process", "network": "host"}, ["no-agent"])


@pytest.mark.parametrize("is_podman", [False, True])
def test_without_root_containers_run_as_root_which_is_the_user(docker: Docker, is_podman: bool) -> None:
    if is_podman:
        (docker.state / "podman").touch()
    runtime = sandboxes.ContainerRuntime(str(docker.path))
    assert runtime.find_user() == f"{os.getuid()}:{os.getgid()}"
    (docker.state / "rootless").touch()
    assert runtime.find_user() == "0:0"


def test_a_daemon_without_root_has_no_host_network_and_may_limit_nothing(docker: Docker) -> None:
    runtime = sandboxes.ContainerRuntime(str(docker.path))
    runtime.check(IMAGE, "host")
    (docker.state / "rootless").touch()
    runtime.check(IMAGE, "none")
    with pytest.raises(
        ConfigError, match=r'runs without root, so that its own network is not the machine.s; set "none"'
    ):
        runtime.check(IMAGE, "host")
    (docker.state / "unlimited").touch()
    with pytest.raises(ServiceError, match=r"limits nothing that containers take \(MemoryLimit of its info\)"):
        runtime.check(IMAGE, "none")


def test_nothing_leads_a_grader_out_of_a_containers_folder(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "own").mkdir(parents=True)
    (home / "own" / "file").write_text("kept")
    (home / "inside").symlink_to("own/file")
    (home / "outside").symlink_to("/proc/self/environ")
    (home / "own" / "folder").symlink_to(tmp_path)
    (home / "broken").symlink_to("/sluice/home/own")
    os.mkfifo(home / "pipe")
    close_off(home)
    assert sorted(path.name for path in home.rglob("*")) == ["file", "inside", "own"]
    assert (home / "inside").read_text() == "kept"


def test_a_real_client_takes_the_options(docker: Docker, tmp_path: Path) -> None:
    client = shutil.which("docker")
    if client is None:
        pytest.skip("there is no docker here, whose client could read the options")
    home = tmp_path / "root" / "a" / "home"
    home.mkdir(parents=True)
    launch = Launch(
        ["agent", "-x"], {}, b"", home, home, home, Endpoint("http://127.0.0.1:1", "/tmp/s"), 2**32, 2**30, 9
    )
    container = Container(IMAGE, client, "none", ["--cpus=2", "--gpus=all", "--shm-size=1g"])
    (home / "variables").write_text("A=b\n")
    command = container._command(launch, home / "variables", "0:0")
    nowhere = {**os.environ, "DOCKER_HOST": f"unix://{tmp_path}/nowhere.sock"}
    ended = subprocess.run(command, env=nowhere, capture_output=True, text=True)
    assert (ended.returncode, "Cannot connect to the Docker daemon" in ended.stderr) == (
        125,
        True,
    )  # it has read them all
    assert command[-2:] == ["agent", "-x"]
    assert [part for part in command if SOCKET in part or HOME in part]
    options, _ = container_cli.parse(command[2:], container_cli.FLAGS, container_cli.VALUES)
    known = subprocess.run([client, "run", "--help"], capture_output=True, text=True).stdout
    assert all(f"--{name} " in known for name in (*options, *container_cli.FLAGS, *container_cli.VALUES))


def can_have_a_network() -> bool:
    try:
        check_sandbox({"kind": "process", "network": "none"}, ["true"])
    except ConfigError:
        return False
    return True


@pytest.mark.skipif(not can_have_a_network(), reason="the kernel gives this user no network namespace")
def test_a_process_may_have_the_models_api_and_no_other_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (long := tmp_path / ("long" * 20)).mkdir()  # a socket's address has at most 107 bytes
    monkeypatch.setenv("TMPDIR", str(long))
    code = """
        import signal, socket, subprocess
        names = [name for _, name in socket.if_nameindex()]
        subprocess.Popen(["sleep", "1000"])
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill(0, signal.SIGTERM)
        say(json.dumps([names, os.environ["OPENAI_BASE_URL"], os.getuid(), os.getpgid(0)]))
        try:
            socket.create_connection(("127.0.0.1", task["info"]["port"]))
        except ConnectionRefusedError:
            say(str(len([ask() for _ in range(1)])))
        subprocess.Popen(["sleep", "1000"])
        ask()
        finish(1.0)
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        environment = program(tmp_path, code, sandbox={"network": "none"}, memory_bytes=2**30)
        with started(environment) as pool:
            replies = begin(pool, *[row(port=server.getsockname()[1])] * 2)  # both have the same port
            for number, reply in replies.items():
                names, url, user, _ = json.loads(reply.observations[-1])
                assert (names, url, user) == (["lo"], f"http://127.0.0.1:8411/{number + 1}/v1", os.getuid())
            groups = [json.loads(reply.observations[-1])[-1] for reply in replies.values()]
            assert all(len(group_of(group)) == 2 for group in groups)  # it and its relay; its child took the signal
            assert {reply.observations for reply in turns(pool, ["a", "b"]).values()} == {("1",)}
            assert turns(pool, {0: "c"})[0].reward == 1.0
            wait_until(lambda: not group_of(groups[0]))
            os.kill(pool.pids[0], signal.SIGKILL)
            wait_until(lambda: not group_of(groups[1]))


def test_a_process_may_have_the_network_that_the_kernel_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def found(tried: str) -> str:
        monkeypatch.setattr(sandboxes, "LOOPBACK", tried)
        sandboxes.network_fault.cache_clear()
        caplog.clear()
        check_sandbox({"kind": "process", "network": "auto"}, ["true"])
        environment = program(tmp_path, "", sandbox={"network": "auto"})  # resolved here, and for all of its processes
        network = environment_class(environment, TransformersRollout()).arguments["sandbox"]["network"]
        return f"{network}, {caplog.messages[0].partition(': ')[2]}"

    caplog.set_level("INFO")
    assert found("pass") == "none, none"
    assert found("raise SystemExit('no namespaces')") == "host, host, as no namespaces"
    with pytest.raises(ConfigError, match="no namespaces; let users make"):
        check_sandbox({"kind": "process", "network": "none"}, ["true"])
    sandboxes.network_fault.cache_clear()


WITHOUT_A_NETWORK = """
    import socket
    from openai import OpenAI
    with OpenAI() as client:
        if [name for _, name in socket.if_nameindex()] != ["lo"]:
            sys.exit("there is a network")
        client.chat.completions.create(model="policy", messages=messages)
        chunks = list(client.chat.completions.create(model="policy", messages=messages, stream=True))
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"You said {said}."}]
        said = client.responses.create(model="policy", input=messages).output_text
        finish(float(said), models=len(client.models.list().data))
"""


@pytest.mark.skipif(not can_have_a_network(), reason="the kernel gives this user no network namespace")
def test_the_openai_client_needs_no_network(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    with started(program(tmp_path, WITHOUT_A_NETWORK, sandbox={"network": "none"})) as pool:
        begin(pool)
        assert turns(pool, ["one"])[0].observations == ("You said one.",)
        reply = turns(pool, ["0.5"])[0]
        assert (reply.failure, reply.reward, reply.metrics) == (None, 0.5, {"models": 1.0})


def group_of(leader: int) -> list[psutil.Process]:
    """Return the processes of a group that run."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.Error):
            if os.getpgid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


OWN_SANDBOX = """
import asyncio, os

class Here:
    def __init__(self, mark):
        self.mark, self.process = mark, None

    def url(self, endpoint):
        return endpoint.url.replace("127.0.0.1", "localhost")

    async def start(self, launch):
        if "fail" in self.mark:
            raise RuntimeError("no machine is free")
        with launch.stdout.open("wb") as output, launch.stderr.open("wb") as errors:
            self.process = await asyncio.create_subprocess_exec(
                *launch.command, stdin=asyncio.subprocess.PIPE, stdout=output, stderr=errors, cwd=launch.home,
                env={**os.environ, **launch.variables, "MARK": self.mark},
            )
        self.process.stdin.write(launch.task)
        self.process.stdin.close()

    async def wait(self):
        code = await self.process.wait()
        if code == 7:
            raise RuntimeError("the machine is gone")
        return code

    async def kill(self):
        open(self.mark, "a").write("killed ")
        if self.process is not None and self.process.returncode is None:
            self.process.kill()

class Half:
    async def start(self, launch):
        pass
"""


def test_a_class_of_the_users_is_a_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_sandbox.py").write_text(OWN_SANDBOX)
    monkeypatch.syspath_prepend(str(tmp_path))

    def in_own(code: str, name: str = "Here", **arguments: str) -> ProgramEnvironment:
        script = str(program(tmp_path, code).command[1])
        sandbox = {"kind": "class", "path": f"own_sandbox:{name}", "arguments": arguments}
        return program(tmp_path, code, command=[sys.executable, script], sandbox=sandbox)

    mark = tmp_path / "mark"
    code = "say(os.environ['OPENAI_BASE_URL'])\nassert 'localhost' in os.environ['NO_PROXY']\nsaid = ask()\n"
    environment = in_own(code + "sys.exit(7) if said == 'lost' else finish(1.0)", mark=str(mark))
    assert environment.import_paths == ("own_sandbox:Here",)
    with started(environment) as pool:
        replies = begin(pool, row(), row(), row())
        assert replies[0].observations[-1].startswith("http://localhost:")
        replies = turns(pool, {0: "x", 1: "lost"})
        assert replies[0].reward == 1.0
        assert "RuntimeError: the machine is gone" in failure(replies[1])
        pool.end_all()
        wait_until(lambda: mark.exists() and mark.read_text() == "killed " * 3)
    with started(in_own(code, mark=str(tmp_path / "fail"))) as pool:
        assert "RuntimeError: no machine is free" in failure(begin(pool)[0])
    with started(in_own(code, "Half")) as pool:
        assert "'Half' of" in (message := failure(begin(pool)[0]))
        assert "has no url, wait, kill; define a class there with the methods of" in message


@pytest.mark.parametrize(
    ("sandbox", "command", "message"),
    [
        (
            {"kind": "container", "image": "a"},
            ["{python}", "a.py"],
            "command has {python}, which is not in",
        ),
        ({"kind": "class", "path": "a:B"}, ["{workdir}/a"], "command has {workdir}, which is not in"),
        ({"kind": "process"}, ["{workdir}/{info.agent}"], "would be another program for each data row"),
        ({"kind": "container"}, ["a"], "image"),
        ({"kind": "container", "image": "--privileged"}, ["a"], "image"),
        ({"kind": "container", "image": "a", "options": ["-d"]}, ["a"], "'-d' is not of the form --name=value"),
        ({"kind": "container", "image": "a", "options": ["--rm"]}, ["a"], "--rm is set by Sluice"),
        ({"kind": "container", "image": "a", "options": ["--network=host"]}, ["a"], "--network is set by Sluice"),
        ({"kind": "process", "image": "a"}, ["a"], "image"),
    ],
)
def test_a_sandbox_that_cannot_work_is_refused(sandbox: object, command: list[str], message: str) -> None:
    with pytest.raises(ValidationError) as raised:
        ProgramEnvironment.model_validate({"command": command, "sandbox": sandbox})
    assert message in str(raised.value)


def test_a_process_is_the_default() -> None:
    assert ProgramEnvironment.model_validate({"command": ["a"]}).sandbox.kind == "process"
    assert ProgramEnvironment.model_validate({"command": ["a"], "sandbox": {}}).sandbox.kind == "process"
