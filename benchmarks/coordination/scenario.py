"""What every scenario does: read its arguments, write its result."""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

from benchmarks.coordination import adapters

__all__ = ["Scenario"]


class Scenario:
    """One measurement of one library.

    Parameters
    ----------
    name : str
        Stands in the result line.
    description : str or None
        The module's docstring.
    """

    def __init__(self, name: str, description: str | None) -> None:
        self.name = name
        self.parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks.coordination.{name}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.parser.add_argument("--library", choices=adapters.LIBRARIES, default="ours")
        self.parser.add_argument("--trial", type=int, default=0, metavar="K")
        self.parser.add_argument("--trials", type=int, default=1, metavar="N", help="the event falls at phase K/N")

    def parse(self) -> argparse.Namespace:
        self.arguments = self.parser.parse_args()
        self.adapter = adapters.load(self.arguments.library)
        return self.arguments

    def settle(self, seconds: float = 2) -> None:
        """Wait ``seconds``, and then until phase K/N of the library's slowest timer."""
        time.sleep(seconds + self.adapter.PERIOD * (self.arguments.trial + 0.5) / self.arguments.trials)

    def record(self, **values: Any) -> None:
        """Print one result, and append it to the file that ``BENCH_OUT`` names."""
        line = json.dumps(
            {
                "at": round(time.time(), 1),
                "scenario": self.name,
                "step": os.environ.get("BENCH_STEP", self.name),
                "library": self.arguments.library,
                "trial": self.arguments.trial,
                **adapters.describe(self.adapter),
                **values,
            }
        )
        print(line, flush=True)
        if "BENCH_OUT" in os.environ:
            with open(os.environ["BENCH_OUT"], "a", encoding="utf-8") as out:
                out.write(line + "\n")
