#!/bin/sh
# Runs a job over a table that is edited from day to day; what the last night computed is reused. The crontab line:
#   0 1 * * *  /srv/jobs/nightly_table.sh /srv/jobs/tickets.toml /srv/runs
# Run it again to resume. The exit codes are those of batchgen run: 75 means "stopped early".
set -e
job=${1:?name the job file} runs=${2:?name the folder of the runs} today=$(date +%F)
last=
for folder in "$runs"/20??-??-??; do
    [ "${folder##*/}" = "$today" ] || [ ! -e "$folder/job.json" ] || last=$folder
done
exec batchgen run "$job" --output "$runs/$today" ${last:+--reuse "$last"} --quiet
