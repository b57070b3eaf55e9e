"""`python -m flows.report FOLDER`: write a run's report and print its path; for drivers, which read no columns."""

import sys
from pathlib import Path

from flows.report.run import write_report
from infra.storage.runs import RunDirectory

if __name__ == "__main__":
    print(write_report(RunDirectory(Path(sys.argv[1]))))
