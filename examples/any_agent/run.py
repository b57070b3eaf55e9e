"""Make a tiny model, train it to play with an agent, report, and draw the curve. `--tiny`: two small steps."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
import commands

if __name__ == "__main__":
    commands.run_agent(
        __file__, __doc__, "agent", "numbers guessed in three turns", files="../guess_the_number/make_files.py"
    )
