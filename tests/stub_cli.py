"""The command line with the stub engine behind it, for tests that need a process of their own.

Usage: ``python stub_cli.py '{"step_s": 0.01}' run JOB.toml ...``: the stub's options as JSON, then the command.
"""

import json
import sys

from stub_engine import stub_factory

from batchgen.cli import call

if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    options["fails"] = frozenset(options.get("fails", ()))
    sys.exit(call(sys.argv[2:], engine_factory=stub_factory(**options)))
