"""Speed of attention_ext against torch and against the machine: `python -m benchmarks --help`."""
