#!/bin/bash
# Runs a job on a machine that may be taken away, such as a spot instance: every 30 s its run directory is copied to a
# bucket, and a start begins with the copy of the machine before. The same line on each machine:
#   jobs/sync_to_s3.sh s3://my-bucket/questions runs/questions job.toml --quiet
# It needs the command aws, and ends with the exit code of batchgen run. Nothing is ever deleted in the bucket, and what
# is old there harms no run. Up to 30 s of rows are computed again. Two machines at once compute rows twice; all are right.
bucket=${1:?name the folder in the bucket} folder=${2:?name the run directory} job=${3:?name the job file}
shift 3
copy() { aws s3 sync "$1" "$2" --exclude 'run.lock' --exclude '.*' --exclude '*/.*' --only-show-errors; }
mkdir -p "$folder" && copy "$bucket" "$folder" || exit 1
batchgen run "$job" --output "$folder" "$@" &
run=$!
trap 'kill -TERM $run' TERM INT # a warning before the machine goes: batchgen saves what it has
(while sleep "${SYNC_EVERY_S:-30}"; do copy "$folder" "$bucket"; done) &
sync=$!
wait $run
code=$?
[ "$code" -gt 128 ] && kill -0 $run 2>/dev/null && { wait $run; code=$?; }
kill $sync 2>/dev/null
wait $sync 2>/dev/null
copy "$folder" "$bucket" || exit 1
exit "$code"
