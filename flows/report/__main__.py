"""`python -m flows.report RUN`: write a run's report and print its path; for drivers, which read no columns."""

import sys

from flows.report.run import write_report
from infra.storage.runs import RunDirectory

if __name__ == "__main__":
    print(write_report(RunDirectory(sys.argv[1])))
