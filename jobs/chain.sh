#!/bin/sh
# Jobs one after the other, each over the outputs of the one before it. Run it again to resume, or when the first input
# has changed: each job computes what is new to it.
#   jobs/chain.sh jobs/summarize.toml jobs/judge.toml
# It exits 3 if rows of any job failed, and with the code of the first job that did not finish.
: "${1:?name the job files, in their order}"
batchgen=${BATCHGEN:-batchgen}
command -v "$batchgen" >/dev/null || {
    echo "$0: no command $batchgen in $PATH: give its whole path, as BATCHGEN=/srv/venv/bin/batchgen" >&2
    exit 127
}
failed=0
for job in "$@"; do
    code=0
    "$batchgen" run "$job" --quiet || code=$?
    case $code in
    0) ;;
    3) # the next job gets the other rows
        failed=3
        echo "$0: rows of $job failed, and no later job has them: see errors.jsonl in its output folder" >&2
        ;;
    *) # 75: stopped early; run this script again
        echo "$0: $job ended with exit code $code, and later jobs were not begun" >&2
        exit "$code"
        ;;
    esac
done
exit "$failed"
