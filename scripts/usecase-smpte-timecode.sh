#!/usr/bin/env bash
# A timecode bus: SMPTE frames on a route are kept through rotations until the sync slave has read them, and no longer.
#
#   scripts/usecase-smpte-timecode.sh
#
# 750 frames HH:MM:SS:FF at 25 a second, 10:00:00:00 to 10:00:29:24, go to the route smpte. The log is cut twice on the
# way. RECLAIM looks before any consumer has read, and must free nothing; the slave reads from the start and must miss no
# frame and see them in order; when its cursor has moved, RECLAIM must free what was sealed.
# Needs wald and wald-reclaim on the PATH, and jq. Its paired test: tests/sidecars/test_usecases.py.
set -euo pipefail

frames_a_second=25
seconds=30
source "$(dirname "${BASH_SOURCE[0]}")/usecase.sh"

wald route add smpte

awk -v a_second=$frames_a_second -v seconds=$seconds 'BEGIN {
    for (frame = 0; frame < a_second * seconds; frame++)
        printf "10:00:%02d:%02d\n", frame / a_second, frame % a_second
}' > "$place/frames"
count=$(wc -l < "$place/frames")
check "$count frames from $(head -1 "$place/frames") to $(tail -1 "$place/frames")" is "$count" 750

split -l 250 "$place/frames" "$place/part."
for part in "$place"/part.*; do
    wald append smpte "$part" > "$place/appended"
    [[ $part == *.ac ]] || wald cut > /dev/null
done
read -r _ last < "$place/appended"
await "two segments are sealed" sealed_are 2
check "two rotations: two segments are sealed, one is active" sealed_are 2

wald-reclaim --grace 0 > "$place/before"
check "no consumer has read: RECLAIM frees nothing" sealed_are 2

wald read smpte --group slave --from earliest > "$place/read"
check "coverage: the slave got every frame, each as it was sent" cmp -s "$place/frames" "$place/read"
check "coverage: $count different frames" is "$(sort -u "$place/read" | wc -l)" "$count"
awk '!seen[$0]++' "$place/read" > "$place/first"
check "order: frames appear in the order of time" sort -c "$place/first"
span="$(head -1 "$place/read") to $(tail -1 "$place/read")"
check "span: $span" is "$span" "10:00:00:00 to 10:00:29:24"

wald-reclaim --grace 0 > "$place/read-only"
check "to read is not to acknowledge: RECLAIM frees nothing yet" sealed_are 2
wald cursor set smpte "$last" --group slave > /dev/null
wald-reclaim --grace 0 > "$place/after"
check "the slave's cursor is at $last: RECLAIM frees both segments" sealed_are 0
reclaimed=$(jq -s '[.[] | select(.event == "reclaimed")] | length' "$WALD_ROOT/ledger/reclaim.jsonl")
check "the ledger tells of both" is "$reclaimed" 2
check "frame 1 has an answer all the same: reclaimed" is "$(wald where 1 --json | jq -r .state)" reclaimed

((failures == 0))
