#!/usr/bin/env bash
# Store, follow and work on records over HTTP, with curl and jq; each goes on when the gate is restarted.
#
# usage: gate.sh store ROUTE | follow ROUTE FILE | work ROUTE GROUP
#
# store takes lines from stdin. follow prints records, and keeps in FILE which was the last. work prints records that it
# gets as one worker of a group, and acknowledges them; curl -X PUT --json '{"sequence": "earliest"}' with the path
# /v1/routes/ROUTE/cursors/GROUP makes the group. WALD_GATE is the address, WALD_TOKEN a token if there are any.
# Values that are no UTF-8, or have newlines, are for other programs.
set -euo pipefail

gate=${WALD_GATE:-http://127.0.0.1:7700}
curl=(curl -sS --connect-timeout 5)
if [ -n "${WALD_TOKEN-}" ]; then
  curl+=(-H "Authorization: Bearer $WALD_TOKEN")
fi

# Ask until there is an answer that jq makes something of. curl waits as Retry-After says, or 1, 2, 4… s, and asks again
# where there is no answer, or a status that passes. Two that it does not know are for us: another gate has the group, or
# the same request is still under way. Any other error ends the program with what the gate says.
ask() { # ask FILTER CURL-OPTION... <BODY
  local body answer
  body=$(cat; echo .) # so that its last newline stays
  while true; do
    answer=$(printf '%s' "${body%.}" |
      "${curl[@]}" --max-time 60 --retry 100 --retry-max-time 600 --retry-all-errors "${@:2}") || return
    jq -e '.code == "locked" or .code == "under-way"' <<<"$answer" >/dev/null || break
    sleep 2
  done
  jq -cr "if .detail then error(.detail) else $1 end" <<<"$answer"
}

store() { # a hundred lines in a request; its key makes it safe to send it again
  local lines
  while mapfile -n 100 lines && ((${#lines[@]})); do
    printf '%s' "${lines[@]}" |
      ask '"stored \(.first) to \(.last)"' -H 'Content-Type: text/plain' --data-binary @- \
        -H "Idempotency-Key: $(cat /proc/sys/kernel/random/uuid)" "$gate/v1/routes/$1/records"
  done
}

follow() { # without a byte for a minute, or at the end of the connection, it goes on behind the last record
  local line last
  while true; do
    last=$(cat "$2" 2>/dev/null || echo 0)
    { "${curl[@]}" --no-buffer --fail --speed-limit 1 --speed-time 60 -H 'Accept: text/event-stream' \
      -H "Last-Event-ID: $last" "$gate/v1/routes/$1/records" || true; } |
      sed -un 's/^data: //p' | jq --unbuffered -r '"\(.sequence) \(.value)"' |
      while IFS= read -r line; do
        printf '%s\n' "${line#* }"
        echo "${line%% *}" >"$2.new"
        mv "$2.new" "$2" # as a whole, so that it is never half written
      done
    sleep 1
  done
}

work() { # a record comes again if it was not acknowledged in time, or if the gate was restarted before
  local path=$gate/v1/routes/$1/groups/$2 worker=example-$$ records
  while true; do
    records=$(ask .records --json @- "$path/lease" <<<"{\"worker\": \"$worker\", \"lease_for\": 30, \"wait\": 20}")
    if [ "$records" != '[]' ]; then
      jq -r '.[].value' <<<"$records"
      jq "{worker: \"$worker\", sequences: [.[].sequence]}" <<<"$records" |
        ask '.refused[] | "comes again, perhaps: \(.)"' --json @- "$path/ack" >&2
    fi
  done
}

case "$#:${1-}" in
2:store | 3:follow | 3:work) "$@" ;;
*)
  echo "usage: gate.sh store ROUTE | follow ROUTE FILE | work ROUTE GROUP" >&2
  exit 2
  ;;
esac
