# Sourced by the use cases: a log of its own with a daemon on it, and lines that say whether something holds.
#
# Gives $place, a directory that is removed in the end, and $WALD_ROOT in it; counts what failed in $failures.

place=$(mktemp -d)
export WALD_ROOT=$place/log
unset WALD_SOCKET ARCHIVE_DEST
failures=0

wald run 2> "$place/daemon.log" &
daemon=$!
stop() {
    kill "$daemon" 2> /dev/null && wait "$daemon" || true
    rm -rf "$place"
}
trap stop EXIT

# check WORDS COMMAND...: one line that says whether COMMAND succeeds
check() {
    local words=$1
    shift
    if "$@"; then
        echo "ok      $words"
    else
        echo "FAILED  $words"
        failures=$((failures + 1))
    fi
}
await() {
    local words=$1 left=300
    shift
    until "$@"; do
        ((left--)) || { echo "FAILED  $words"; tail -5 "$place/daemon.log"; exit 1; }
        sleep 0.1
    done
}
daemon_answers() { [[ -S $WALD_ROOT/wald.sock ]]; }
sealed_are() { [[ $(find "$WALD_ROOT/segments" -name '*.wal.zst' | wc -l) == "$1" ]]; }
is() { [[ $1 == "$2" ]]; }

await "the daemon is up" daemon_answers
