"""Every block of `docs/inspect.md` is run on a small run, and prints what the page says."""

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from flows.cli import main as cli
from tests.small_run import make_small_run

PAGE = Path(__file__).parents[2] / "docs" / "inspect.md"
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```\n(?:\n^```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
BLOCKS = [match.groups() for match in BLOCK.finditer(PAGE.read_text())]


def run_block(language: str, code: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what a block prints, without spaces at the ends of lines."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if language == "python":
            exec(compile(code, str(PAGE), "exec"), {})
        else:
            monkeypatch.setattr("sys.argv", shlex.split(code))
            with pytest.raises(SystemExit) as stopped:
                cli.main()
            assert not stopped.value.code
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines())


def test_every_block_is_found_and_says_what_it_prints() -> None:
    fences = re.findall(r"^```(\w+)$", PAGE.read_text(), re.MULTILINE)
    assert [language for language, _, _ in BLOCKS] == [fence for fence in fences if fence != "text"]
    assert fences.count("text") == len(BLOCKS) == sum(output is not None for _, _, output in BLOCKS)


@pytest.mark.parametrize(("language", "code", "output"), BLOCKS, ids=[code.splitlines()[0] for _, code, _ in BLOCKS])
def test_the_block_prints_what_the_page_says(
    language: str, code: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_small_run()
    assert run_block(language, code, monkeypatch).rstrip() == output.rstrip()
