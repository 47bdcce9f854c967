#!/usr/bin/env bash
# Acknowledge routes in full: their records count as processed, whatever was done with them.
#
#   scripts/drain-routes.sh [--root DIR] [--group GROUP] [ROUTE...]
#
# Without a ROUTE: all of them, but those that are retired and dead_letter. Prints each route and where its cursor is.
# A route that has only other groups than GROUP (processed) is left alone, because a new group would retain its records.
# What fails stops no other route; the exit code is that of the first failure.
set -euo pipefail

if [[ ${1-} == -h || ${1-} == --help ]]; then
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"
    exit
fi
group=processed
while [[ ${1-} == --root || ${1-} == --group ]]; do
    value=${2:?$1 takes a value}
    if [[ $1 == --root ]]; then export WALD_ROOT=$value; else group=$value; fi
    shift 2
done

routes=("$@")
if [[ $# == 0 ]]; then
    listed=$(wald route list --json)
    mapfile -t routes < <(jq -r '.routes[] | select(.retired | not) | .route | select(. != "dead_letter")' <<< "$listed")
fi
drain() {
    local groups cursor
    groups=$(wald cursor list "$1" --json | jq -r 'select(.state != "absent") | .group') || return
    if [[ -n $groups ]] && ! grep -qxF -- "$group" <<< "$groups"; then
        echo "$1: left alone: its groups are ${groups//$'\n'/, }; --group names one of them" >&2
        return 1
    fi
    wald-drain feed "$1" --group "$group" --exit-at-end --batch-records 10000 -- true || return
    cursor=$(wald cursor get "$1" --group "$group" --json 2> /dev/null | jq .sequence) || true # 3: nothing to acknowledge
    echo "$1 $cursor"
}

failure=0
for route in "${routes[@]}"; do
    drain "$route" || { code=$?; ((failure)) || failure=$code; }
done
exit "$failure"
