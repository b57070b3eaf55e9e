"""What goes between an environment pool and its processes: the class, actions, and what environments return."""

import re
from pathlib import Path

import pytest

from infra.processes.calls import describe
from schemas.errors import ConfigError, EnvironmentImportError
from tests.support.environment_pools import contents, counted, kinds, open_rows, opened, step_rows, task
from tests.support.faulty_environments import BAD_RESULTS, BIG_CHARACTERS


def test_a_result_of_another_shape_is_a_failure_that_says_what_to_return() -> None:
    with opened("Counting") as pool:
        open_rows(pool, *[""] * len(BAD_RESULTS))
        for action, reply in zip(BAD_RESULTS, step_rows(pool, list(BAD_RESULTS)).values(), strict=True):
            assert reply.failure is not None, action
            assert reply.failure.kind == "invalid", action
            said = r"step\(\) returned .*; (return|decode) |step\(\) returned .*which no"
            assert re.match(said, reply.failure.message), action
        for row, reply in step_rows(pool, ["1"] * len(BAD_RESULTS)).items():
            assert contents(reply) == counted(row, "1")


def test_a_long_observation_is_cut_and_says_so() -> None:
    with opened("Counting", max_observation_characters=10) as pool:
        open_rows(pool, "")
        (cut,) = step_rows(pool, ["big"])[0].observations
        assert cut == f"xxxxxxxxxx\n[{BIG_CHARACTERS - 10} more characters were cut]"
        assert step_rows(pool, ["say 0123456789"])[0].observations == ("0123456789",)
        assert step_rows(pool, ["list 01234 56789"])[0].observations == ("01234", "56789")
        observations = step_rows(pool, ["list 01234 567 8901 2345"])[0].observations
        assert observations == ("01234", "567", "89\n[6 more characters were cut]")


def test_texts_arrive_as_they_were_sent() -> None:
    text = "".join(map(chr, range(256))) + "\u2028\u2029\ufeff\U0001f600"
    with opened("AsyncCounting") as pool:
        assert open_rows(pool, text)[0].observations == (f"{text} from 0",)
        assert step_rows(pool, [f"say {text}"])[0].observations == (text,)


def test_long_actions_fit_in_while_the_process_is_busy() -> None:
    with opened("Counting") as pool:
        open_rows(pool, *"abcdefgh")
        actions = [f"{row}" * 10**6 for row in range(8)]
        replies = step_rows(pool, actions)
        assert [contents(replies[row]) for row in range(8)] == [counted(row, actions[row]) for row in range(8)]


def test_what_environments_print_is_no_answer(capfd: pytest.CaptureFixture[str]) -> None:
    with opened("Counting") as pool:
        open_rows(pool, *"ab")
        assert contents(step_rows(pool, ["print", "1"])[0]) == counted(0, "print")
        assert contents(step_rows(pool, ["2", "2"])[1]) == counted(1, "1", "2")
    out, err = capfd.readouterr()
    assert out == ""
    assert '{"number": 1}\n{"ready": false}\n' in err


def test_a_class_that_cannot_be_imported_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "leaving_environments.py").write_text("import os; os._exit(5)\n")
    (tmp_path / "broken_environments.py").write_text("import sys; sys.exit('no')\n")
    for path, message in {
        "no_such_module:Game": r"importing 'no_such_module' raised ModuleNotFoundError: .*; is the module's folder",
        "broken_environments:Game": "importing 'broken_environments' raised SystemExit: no",
        "leaving_environments:Game": "a process ended with exit code 5 while it imported the class",
        "None": r"'None' is not there in .*faulty_environments.py; define `class None` there",
        "NO_CLASS": "'NO_CLASS' is not a class in",
        "Resetting": r"class Resetting of .* has no `step\(self, action\)`; define it",
    }.items():
        with opened(path) as pool, pytest.raises(EnvironmentImportError, match=message):
            pool.wait_until_ready()
    with (
        opened("Counting", {"top": 1}) as pool,
        pytest.raises(EnvironmentImportError, match=r"arguments \['top'\]: got an unexpected keyword argument 'top'"),
    ):
        pool.wait_until_ready()
    with (
        pytest.raises(ConfigError, match=r"environment\.arguments: .* write them in JSON's types"),
        opened("x:X", {"a": {1}}),
    ):
        pass


def test_a_process_that_is_killed_while_it_imports_the_class_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "killed_environments.py").write_text(
        "import os, pathlib, signal\n"
        "from tests.support.faulty_environments import Counting\n"
        "mark = pathlib.Path(__file__).with_name('mark')\n"
        "if not mark.exists():\n"
        "    mark.touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with opened("killed_environments:Counting") as pool:
        pool.wait_until_ready()
        open_rows(pool, "a")
        assert contents(step_rows(pool, ["1"])[0]) == counted(0, "1")


def test_a_data_row_that_is_not_json_is_its_rows_failure() -> None:
    with opened("Counting") as pool:
        pool.open(0, {"prompt": [], "answer": "", "info": {"set": {1}}}, seed=0)
        pool.open(1, task("b"), seed=1)
        assert kinds(pool.wait()) == {0: "invalid"}


def test_an_error_of_many_lines_is_told_in_one() -> None:
    assert (
        describe(LookupError(f"\n{'*' * 5}\n  Resource\tnot found\ud800\n")) == "LookupError: ***** Resource not found?"
    )
