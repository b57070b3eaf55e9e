"""The page of `sluice view` in a browser: every level, offline, on a desktop and a phone, with texts that attack it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.browser import DESKTOP, PHONE, Page, open_browser
from tests.support.view_run import ATTACK, make_view_run

IS_READY = "document.body?.classList.contains('ready') ?? false"
NOT_READY = "document.body?.classList.remove('ready')"
TOKENS = "[...document.querySelectorAll('.response .token')]"
ROWS = "[...document.querySelectorAll('tbody tr')].map(row => row.cells[0].innerText)"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL that the command prints, of two runs with four steps."""
    folder = tmp_path_factory.mktemp("view")
    make_view_run(folder)
    make_view_run(folder, "other", seed=1)
    command = [sys.executable, "-m", "flows.cli.main", "view", "demo", "other", "--step", "2", "--row", "1"]
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        preexec_fn=_takes_ctrl_c,
    )
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.send_signal(signal.SIGINT)
    assert process.wait() == 0


def _takes_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell that starts the tests in the background has it ignored


@pytest.fixture(scope="module")
def page(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with open_browser(tmp_path_factory.mktemp("browser")) as page:
        show(page, url)
        yield page


def open_page(page: Page, url: str, width: int = DESKTOP) -> None:
    """Open a page, and wait until it has its data."""
    page.evaluate(NOT_READY)  # the one before may still be there for a moment
    page.open(url, width)
    page.wait_for(IS_READY)


def show(page: Page, url: str) -> None:
    """Open a page, and assert that it fits on a phone and on a desktop, asks nobody else, and runs no text."""
    for width in (PHONE, DESKTOP):
        open_page(page, url, width)
        assert page.overflow() <= 0
    assert page.errors == []
    assert page.evaluate("[...document.querySelectorAll('.error')].map(error => error.innerText)") == []
    assert page.evaluate("window.attacked") is None
    assert page.evaluate("document.querySelectorAll('main script, main img').length") == 0
    assert {urlsplit(asked).netloc for asked in page.requests if not asked.startswith("data:")} == {
        urlsplit(url).netloc
    }


def follow(page: Page, link: str) -> None:
    """Click on what an expression returns, and wait for the page that it leads to."""
    page.evaluate(NOT_READY)
    page.evaluate(f"({link}).click()")
    page.wait_for(IS_READY)


def link_to(text: str) -> str:
    return f"[...document.querySelectorAll('main a')].find(link => link.innerText.trim().startsWith('{text}'))"


def test_from_the_curves_to_a_token(url: str, page: Page) -> None:
    base, _ = url.split("/run/")
    assert page.evaluate("location.pathname + location.search") == "/run/demo/step/2/row/1"  # without the token
    assert page.evaluate("document.cookie") == ""  # it is HttpOnly
    show(page, f"{base}/")
    assert page.evaluate("[...document.querySelectorAll('h3')].map(title => title.innerText.split(' ')[0])") == [
        "reward",
        "response/tokens",
        "kl",
    ]
    follow(page, "document.querySelector('.chart .remove')")
    assert "reward" not in page.evaluate("document.querySelector('.charts').innerText")
    follow(page, link_to("3"))
    assert page.evaluate("location.pathname") == "/run/demo/step/3"
    show(page, f"{base}/run/demo/step/3")
    assert page.evaluate(ROWS) == ["0", "1", "2", "3"]
    follow(page, link_to("reward"))
    assert page.evaluate(ROWS) == ["0", "2", "3", "1"]
    page.evaluate("document.querySelector('[name=where]').value = 'reward < 0.9 and num_turns = 1'")
    follow(page, "document.querySelector('.filter button')")
    assert page.evaluate(ROWS) == ["2", "3"]  # still sorted
    follow(page, link_to("3"))
    assert page.evaluate("location.pathname") == "/run/demo/step/3/row/3"
    assert ATTACK in page.evaluate(f"{TOKENS}.map(token => token.innerText).join('')")


def test_the_tokens_of_a_row(url: str, page: Page) -> None:
    base, _ = url.split("/run/")
    show(page, f"{base}/run/demo/step/3/row/1?at=2")
    assert page.evaluate("[...document.querySelectorAll('h4')].map(turn => turn.innerText.split(':')[0])") == [
        "turn 1",
        "environment",
        "turn 2",
    ]
    tree = page.evaluate("document.querySelector('.tree[open] pre').innerText").splitlines()
    assert [line[:9] for line in tree[1:3]] == ["├─ turn 1", "└─ turn 2"]
    assert tree[2].endswith("branch at the prompt's end")
    detail = page.evaluate("document.getElementById('detail').innerText")
    for name in ("token 2", "id ", "text ", "advantages ", "gap ", "kl ", "sampler_logprobs ", "loss_mask true"):
        assert name in detail
    page.evaluate("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true}))")
    assert "at=3" in page.evaluate("location.search")
    page.evaluate("document.querySelector('.prompt .token').click()")
    assert "prompt token 0" in page.evaluate("document.getElementById('detail').innerText")
    text = page.evaluate(f"{TOKENS}.map(token => token.innerText).join('')")
    assert "⏎" in text
    assert "\\u202eParis\\u200b" in text  # what turns the direction of a text, or can't be seen
    assert "\u202e" not in page.text()
    choices = page.evaluate("[...document.getElementById('color').options].map(option => option.value)")
    assert choices[:6] == ["advantages", "gap", "kl", "sampler_logprobs", "loss_mask", "sampler_versions"]
    colors = {}
    for name in choices:
        page.evaluate(f"color.value = '{name}', color.dispatchEvent(new Event('change'))")
        colors[name] = tuple(page.evaluate(f"{TOKENS}.map(token => token.style.backgroundColor)"))
        assert page.evaluate("document.querySelectorAll('.legend .token').length") > 0
        assert f"color={name}" in page.evaluate("location.search")
    assert len(set(colors.values())) == len(choices)
    environment = page.evaluate(f"{TOKENS}.map(token => token.classList.contains('masked'))")
    assert not any(color for color, masked in zip(colors["gap"], environment, strict=True) if masked)
    show(page, f"{base}/run/demo/step/3/row/0?color=gap")
    assert page.evaluate("document.querySelectorAll('.token.bad').length") == 1  # minus infinity


def test_a_group_and_two_runs_side_by_side(url: str, page: Page) -> None:
    base, _ = url.split("/run/")
    show(page, f"{base}/run/demo/step/3/group/0")
    assert page.evaluate("[...document.querySelectorAll('.card h2')].map(card => card.innerText)") == ["row 0", "row 1"]
    show(page, f"{base}/run/demo/step/3/row/3")
    page.wait_for("document.querySelector('.beside input').value === 'other'")
    follow(page, "document.querySelector('.beside button')")
    show(page, f"{base}/run/demo/step/3/row/3?beside=other/3/3")
    assert "3 of" in page.evaluate("document.querySelector('.verdict').innerText")
    differing = "[...document.querySelectorAll('.token.differs')].map(token => token.innerText)"
    assert page.evaluate(differing) == ["!", "!", "!"]
    show(page, f"{base}/run/demo/step/3/row/2?beside=demo/2/2")
    assert page.evaluate("document.querySelector('.verdict').innerText") == "all tokens are the same"


def test_what_is_wrong_is_one_line(url: str, page: Page) -> None:
    base, _ = url.split("/run/")
    for path, message in {
        "/run/demo/step/9": "step 9 of run demo has no columns",
        "/run/demo/step/3?where=nope": 'column "nope" not found',
        "/run/demo/step/3/row/3?beside=other/9/3": "step 9 of run other has no columns",
    }.items():
        open_page(page, base + path, PHONE)
        assert message in page.evaluate("document.querySelector('.error').innerText")
        assert page.overflow() <= 0
        page.errors.clear()  # the browser logs the status of a refused request
