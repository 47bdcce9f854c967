#!/usr/bin/env bash
# Cold storage: a route without consumers is packed into bundles that tar and sha256sum can check, then let go.
#
#   scripts/usecase-cold-storage.sh
#
# 1000 records go to the route archive, are archived in bundles of 250, checked with stock tools against the manifest,
# and restored. RECLAIM must free nothing before, and what was sealed afterwards: archiving is what acknowledges.
# Needs wald, wald-archive and wald-reclaim on the PATH, and jq, tar, gzip and sha256sum.
# Its paired test: tests/sidecars/test_usecases.py.
set -euo pipefail

records=1000
records_per_bundle=250
source "$(dirname "${BASH_SOURCE[0]}")/usecase.sh"
dest=$place/cold
archive_is_sound() { wald-archive verify "$dest" --root "$WALD_ROOT" > "$place/verified"; }
sums_hold() { (cd "$1" && sha256sum --quiet --check ./*.sha256); }

wald route add archive
seq -f 'record %04g of the year' "$records" > "$place/records"
wald append archive "$place/records" > "$place/appended"
wald cut > /dev/null
await "a segment is sealed" sealed_are 1

wald-reclaim --grace 0 > "$place/before"
check "no group has consumed it: RECLAIM frees nothing" sealed_are 1

wald-archive archive --records-per-bundle "$records_per_bundle" --codec gz --dest "$dest" > "$place/packed"
bags=("$dest"/archive/*/)
check "one run makes one bag" is "${#bags[@]}" 1
bag=${bags[0]%/}
manifest=$bag/manifest.json

bundles=("$bag"/data/*.tar.gz)
check "$records records are 4 bundles" is "${#bundles[@]}" 4
check "the manifest tells of 4, each of $records_per_bundle" is "$(jq -c '[.bundles[].count]' "$manifest")" "[250,250,250,250]"
ranges=$(jq -r '[.bundles[] | "\(.first)-\(.last)"] | join(" ")' "$manifest")
check "ranges meet: $ranges" is "$ranges" "1-250 251-500 501-750 751-1000"
check "sha256sum --check accepts every bundle" sums_hold "$bag/data"
while read -r name recorded; do
    computed=$(sha256sum "$bag/data/$name" | cut -d ' ' -f 1)
    check "digest of $name, computed anew, is the manifest's" is "$computed" "$recorded"
done < <(jq -r '.bundles[] | "\(.bundle) \(.sha256)"' "$manifest")
for bundle in "${bundles[@]}"; do
    tar -xzOf "$bundle" --wildcards '*.txt'
done > "$place/unpacked"
check "tar alone gives the records back" cmp -s "$place/records" "$place/unpacked"
check "wald-archive verify finds nothing wrong" archive_is_sound

wald-archive restore "$dest" archive > "$place/restored"
check "restored, byte for byte" cmp -s "$place/records" "$place/restored"

check "archived is consumed: the cursor is at $records" is "$(wald cursor get archive)" "$records"
wald-reclaim --grace 0 > "$place/after"
check "released by consumption: RECLAIM frees the segment" sealed_are 0
check "record 1 has an answer all the same" is "$(wald where 1 --json | jq -r .state)" archived
wald-archive restore "$dest" archive > "$place/restored-later"
check "and is restored when the log no longer has it" cmp -s "$place/records" "$place/restored-later"

((failures == 0))
