"""The command line with the stub engine behind it, for tests that need a process of their own.

Usage: ``python stub_cli.py '{"step_s": 0.01}' run JOB.toml ...``: the stub's options as JSON, then the command.
Beside the stub's own, ``load_s`` makes loading slow and ``finalize_s`` the writing of the outputs; loading does not end
before the file ``load_until`` is there.
"""

import json
import sys
import time
from functools import partial

from stub_engine import load_slowly, stub_factory

from batchgen.cli.main import call
from batchgen.run import job

if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    options["fails"] = frozenset(options.get("fails", ()))
    options["on_load"] = partial(load_slowly, options.pop("load_s", 0), options.pop("load_until", None))
    if finalize_s := options.pop("finalize_s", 0):
        finalize = job.finalize
        job.finalize = lambda *args, **kwargs: (time.sleep(finalize_s), finalize(*args, **kwargs))[1]  # type: ignore
    sys.exit(call(sys.argv[2:], engine_factory=stub_factory(**options)))
