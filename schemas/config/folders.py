"""The default folders of a configuration, for the command line, whose `--help` imports no pydantic."""

DEFAULT_RUNS_DIR = "runs"
