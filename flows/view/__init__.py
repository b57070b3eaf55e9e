"""The page of `sluice view`: a local, read-only web server over what runs keep of their steps."""

from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import quote

from rich.console import Console

from flows.view.api import ViewApi
from flows.view.server import ViewServer
from infra.history.kept_run import KeptRun
from infra.storage.runs import RunDirectory
from schemas.errors import RunError


def serve_view(
    console: Console, directories: Sequence[RunDirectory], step: int | None, row: int | None, *, host: str, port: int
) -> None:
    """Print the page's URL, and answer its requests until the user interrupts.

    Raises:
        RunError: The step or the row isn't kept, or two runs have the same id.
        ServiceError: The address can't be listened on.
    """
    page = find_page(directories[0], step, row)
    with ViewServer(ViewApi(directories), host, port) as server, suppress(KeyboardInterrupt):
        print(server.url(page), flush=True)  # alone on its line, for scripts
        if not server.is_loopback:
            console.print(f"{host} is reachable from other machines, without encryption: keep the URL secret")
        console.print("read-only; Ctrl-C ends it", highlight=False)
        server.serve_forever()


def find_page(directory: RunDirectory, step: int | None, row: int | None) -> str:
    """Return the path of the page of a run, a step or a row.

    Raises:
        RunError: The step or the row isn't kept.
    """
    if step is None:
        if row is not None:
            raise RunError(f"--row {row} requires --step")
        return "/"
    num_rows = KeptRun(directory, only=step).batch(step).num_rows
    page = f"/run/{quote(directory.run_id)}/step/{step}"
    if row is None:
        return page
    if row >= num_rows:
        raise RunError(f"step {step} of run {directory.run_id} has rows 0 to {num_rows - 1}, but no row {row}")
    return f"{page}/row/{row}"
