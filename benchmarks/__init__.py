"""Speed of attention_ext against torch and against the machine: `python -m benchmarks --help`."""

import sys
from pathlib import Path

# The inputs come from the tests' table of cases.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
