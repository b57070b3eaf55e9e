"""The command with which a process worker runs a flow: Prefect's own, with the working directory last on the path.

Prefect puts the working directory first when it imports a flow; a user's `tasks.py` would shadow Sluice's package.
"""

import os
import runpy

from prefect.settings import PREFECT_API_URL

from flows.lifecycle.exit import deliver_events, exit_process
from infra.ray.module_path import keep_last


def main() -> None:
    """Run the flow run that the worker's environment names; end even if the server is gone."""
    keep_last(os.getcwd())
    code = 0
    try:
        runpy.run_module("prefect.engine", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = int(ended.code or 0)
    deliver_events(str(PREFECT_API_URL.value()))
    exit_process(code)


if __name__ == "__main__":
    main()
