#!/bin/sh
# Runs a job over a table that is edited from day to day, into a folder for each day, so that the outputs of every day
# stay; rows that the last night computed are reused. If they need not stay, use nightly.toml, which needs one folder.
# The crontab line:
#   0 1 * * *  /srv/jobs/nightly_table.sh /srv/jobs/tickets.toml /srv/runs
# Cron's PATH is short: if it lacks batchgen, put the whole path before it, as BATCHGEN=/srv/venv/bin/batchgen.
# Run it again to resume. The exit codes are the same as from batchgen run: 75 means "stopped early".
set -e
batchgen=${BATCHGEN:-batchgen}
command -v "$batchgen" >/dev/null || {
    echo "$0: no command $batchgen in $PATH: give its whole path, as BATCHGEN=/srv/venv/bin/batchgen" >&2
    exit 127
}
job=${1:?name the job file} runs=${2:?name the folder of the runs} today=$(date +%F)
last=
for folder in "$runs"/20??-??-??; do
    [ "${folder##*/}" = "$today" ] || [ ! -e "$folder/job.json" ] || last=$folder
done
exec "$batchgen" run "$job" --output "$runs/$today" ${last:+--reuse "$last"} --quiet
