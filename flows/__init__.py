"""The flows, and the command line that starts them."""

import infra  # noqa: F401  it sets what torch and Ray read when they are imported
