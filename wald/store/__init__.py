"""Files: what lies in a root, and everything that writes or reads it.

    disk        the system calls that make bytes durable     directory   where each file lies, and one listing
    inplace     the head and takes files, never waited for   lock        one writer, and its epoch
    ledger      chained JSON lines, appended                 routes      routes as directories
    raw         a raw segment, scanned whatever its bytes    compression the sealed form, written and read
    indexes     the sparse index beside a raw segment        sealer      raw → sealed, in repeatable steps
    writer      the active segment, and CUT                  recovery    facts → verdict → repair, at a start
    head        how far the log may be read                  cursors     where consumers stand
    segments    one open segment, whatever its form          walk        across segments, up to a bound
    batches     stored batches as records, pieces joined     reader      from a place on; follows
    arrow       batches as Arrow, without a loop             history     what the ledgers tell of missing segments
    lookup      where is record N?                           verifier    reads everything, changes nothing
    dump        what is in a file, and what does not fit     checkpoint  what a stream has committed
    pins        who holds back which segment                 backlog     what there is, and who still needs it
    salvage     a sealed segment with a damaged index        floor       above all sequences given out
    room        how much of its disk a daemon may use        fifos       made, looked at, put back
    blanks      files that segments are made in              inodes      which file it is, asked without its times

Data moves one way: the writer fills the active segment and cuts it, the sealer finds cut segments in the directory and
replaces them by compressed ones, readers go through all three forms. Nothing here logs or counts: functions return what
happened. Time comes in as an argument.
"""
