"""Every block of the pages about past steps is run on small runs, and prints what the page says.

Blocks of `console` need workers: `tests/end_to_end/test_replay.py` runs their commands.
"""

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from flows.cli import main as cli
from schemas.step import StepReport
from tests.support.small_run import make_small_run, replace_advantages

PAGES = [Path(__file__).parents[3] / "docs" / name for name in ("inspect.md", "history.md")]
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```\n(?:\n^```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
BLOCKS = [(page.name, *match.groups()) for page in PAGES for match in BLOCK.finditer(page.read_text())]


def run_block(language: str, code: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what a block prints, without spaces at the ends of lines."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if language == "python":
            exec(compile(code, "block", "exec"), {})
        else:
            monkeypatch.setattr("sys.argv", shlex.split(code))
            with pytest.raises(SystemExit) as stopped:
                cli.main()
            assert not stopped.value.code or code.startswith("sluice diff")
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines())


def test_every_block_is_found_and_says_what_it_prints() -> None:
    fences = [fence for page in PAGES for fence in re.findall(r"^```(\w+)$", page.read_text(), re.MULTILINE)]
    assert [language for _, language, _, _ in BLOCKS] == [
        fence for fence in fences if fence not in ("text", "toml", "sql", "console")
    ]
    assert fences.count("text") == len(BLOCKS) == sum(output is not None for _, _, _, output in BLOCKS)


@pytest.mark.parametrize(
    ("page", "language", "code", "output"),
    BLOCKS,
    ids=[code.splitlines()[0] for _, _, code, _ in BLOCKS],
)
def test_the_block_prints_what_the_page_says(
    page: str, language: str, code: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_small_run()
    if page == "history.md":
        for step in range(4):
            metrics = {"reward": 0.25 + step / 8, "kl": step / 64}
            run.metrics.append_step(
                StepReport(step=step, policy_version=step + 1, metrics=metrics, seconds=2.0, seconds_by_phase={})
            )
        replace_advantages(make_small_run(run_id="other"), 3, (0.25, -0.25, 0.5, 0.0, -0.625))
    assert run_block(language, code, monkeypatch).rstrip() == output.rstrip()
