"""From a job to its finished run directory: ``run_job`` is the whole of it for a caller from Python."""

from batchgen.run.job import run_job
from batchgen.run.options import RunOptions
from batchgen.run.outcome import Outcome
from batchgen.run.stop import Limits

__all__ = ["Limits", "Outcome", "RunOptions", "run_job"]
