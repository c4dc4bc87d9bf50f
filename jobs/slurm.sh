#!/bin/bash
# A SLURM array: each task runs its shard of a job, and is queued again until the shard is finished.
#   id=$(sbatch --parsable jobs/slurm.sh job.toml runs/questions)
#   sbatch --dependency=afterok:$id --wrap 'batchgen merge runs/questions-* -o runs/questions'
#SBATCH --array=1-8
#SBATCH --time=04:00:00
# --max-runtime below must stay ten minutes under it.
#SBATCH --requeue
set -u
job=$1 output=$2
shift 2
batchgen run "$job" --shard "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT" \
    --output "$output-$SLURM_ARRAY_TASK_ID" --max-runtime 3h50m --quiet "$@"
code=$?
if [ "$code" -eq 75 ]; then # stopped early: what is finished is kept
    exec scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
fi
if [ "$code" -eq 3 ]; then # finished, some rows failed: the shards can be merged (so give no --max-error-rate here)
    exit 0
fi
exit "$code"
