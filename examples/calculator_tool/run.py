"""Make a tiny model, train it to call tools, report, and draw the curve. `--tiny` trains for two small steps."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
import commands

if __name__ == "__main__":
    commands.run_agent(
        __file__, __doc__, "calculator", "questions answered by calling a tool", "steps=40", "optim.lr=3e-3"
    )
