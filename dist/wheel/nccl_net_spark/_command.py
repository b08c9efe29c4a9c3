"""The command line of the package: becomes the program nccl-spark."""

import os
import sys
from pathlib import Path


def main() -> None:
    program = Path(__file__).resolve().parent / "bin" / "nccl-spark"
    try:
        os.execv(program, ["nccl-spark", *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"nccl-spark: cannot start {program}: {error.strerror}")
