#!/bin/sh
# Jobs one after the other, each over the outputs of the one before it. Run it again to resume.
#   jobs/chain.sh jobs/summarize.toml jobs/judge.toml
: "${1:?name the job files, in their order}"
for job in "$@"; do
    code=0
    batchgen run "$job" --quiet || code=$?
    case $code in
    0 | 3) ;; # 3: some rows failed; the next job gets the others
    *) exit "$code" ;; # 75: stopped early; run this script again
    esac
done
