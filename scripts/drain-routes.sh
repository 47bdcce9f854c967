#!/usr/bin/env bash
# Acknowledge routes in full: their records count as processed, whatever was done with them.
#
#   scripts/drain-routes.sh [--root DIR] [ROUTE...]
#
# Without a ROUTE: all of them, but those that are retired and dead_letter. Prints each route and where its cursor is.
set -euo pipefail

if [[ ${1-} == -h || ${1-} == --help ]]; then
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"
    exit
fi
if [[ ${1-} == --root ]]; then
    export WALD_ROOT=${2:?--root takes a directory}
    shift 2
fi

routes=("$@")
if [[ $# == 0 ]]; then
    listed=$(wald routes --json)
    mapfile -t routes < <(jq -r '.routes[] | select(.retired | not) | .route | select(. != "dead_letter")' <<< "$listed")
fi
for route in "${routes[@]}"; do
    wald-drain feed "$route" --exit-at-end --batch-records 10000 -- true
    cursor=$(wald cursor get "$route" --json 2> /dev/null | jq .sequence) || true # 3: nothing there to acknowledge
    echo "$route $cursor"
done
