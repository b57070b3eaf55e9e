"""The check of a cluster's nodes: what a node lacks of what the driver has."""

import os
import time
from pathlib import Path

from infra.storage.runs import RunDirectory
from infra.workers.nodes import MAX_CLOCK_SECONDS, find_problem, paths_of, report_node
from tests.support.configs import run_config


def test_a_node_that_lacks_something_is_named(tmp_path: Path) -> None:
    directory = RunDirectory.create(run_config(tmp_path), "checked")
    here = report_node(str(directory.path), [str(tmp_path), str(tmp_path / "absent")])
    assert here.missing == (str(tmp_path / "absent"),)
    assert here.run
    assert abs(here.time - time.time()) < MAX_CLOCK_SECONDS
    assert find_problem(here, here.replace(missing=()), directory, here.time) == ""
    assert "lacks" in find_problem(here, here, directory, here.time)
    elsewhere = here.replace(run=report_node(str(tmp_path / "other"), []).run)
    assert f"doesn't see the run directory {directory.path}; set runtime.runs_dir" in find_problem(
        here, elsewhere, directory, here.time
    )
    older = here.replace(version="0.1.0", missing=())
    assert "has Sluice 0.1.0 on Python" in find_problem(here, older, directory, here.time)
    for offset, word in ((3600, "ahead of"), (-3600, "behind")):
        late = here.replace(time=here.time + offset, missing=())
        assert f"has a clock 3600 s {word} the driver's, or more; synchronize" in find_problem(
            here, late, directory, here.time
        )
    few = here.replace(max_files=1024, missing=())
    assert find_problem(here, few, directory, here.time, 1024) == ""
    assert "allows 1024 open files, but 1025 may be needed" in find_problem(here, few, directory, here.time, 1025)
    early = here.replace(time=here.time - 100, missing=())  # others needed long to answer
    assert find_problem(here, early, directory, early.time - 10) == ""
    assert os.getcwd() not in here.missing


def test_models_data_and_interpreters_are_asked_for(tmp_path: Path) -> None:
    config = run_config(
        tmp_path,
        model={"path": "policy"},
        data={"train_path": "train.jsonl", "eval_path": "eval.jsonl"},
        rollout={"kind": "program", "python": "venv/bin/python", "program": "engines/own.py"},
        environment={"kind": "class", "path": "games:Game", "python": "/opt/games/bin/python"},
        distillation={
            "teachers": {"large": {"path": "teacher"}, "hinted": {"prompt": "{prompt}", "data_sources": ["a"]}}
        },
    )
    found = {"policy", "teacher", "train.jsonl", "eval.jsonl"}
    found |= {"venv/bin/python", "engines/own.py", "/opt/games/bin/python"}
    assert set(paths_of(config)) == found
    by_name = {"kind": "program", "python": "python3", "program": "engines/own.py"}  # on the PATH of each node
    assert "python3" not in paths_of(run_config(tmp_path, rollout=by_name))
