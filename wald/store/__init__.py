"""Files: what lies in a root, and everything that writes or reads it.

    disk        the system calls that make bytes durable     directory   where each file lies, and one listing
    regular     opens a regular file and nothing else        inodes      which file it is, asked without its times
    inplace     the head and takes files, never waited for   lock        one writer, and its epoch
    ledger      chained JSON lines, appended                 routes      routes as directories
    fifos       made, looked at, put back                    lives       how the lives of the daemon ended
    room        how much of its disk a daemon may use        uptime      time that nobody can set
    blanks      files that segments are made in              writer      the active segment, and CUT
    raw         a raw segment, scanned whatever its bytes    resync      the next batch behind damage
    contents    what the batches of a segment hold           compression the sealed form, written and read
    indexes     the sparse index beside a raw segment        sealer      raw → sealed, in repeatable steps
    salvage     a sealed segment with a damaged index        recovery    facts → verdict → repair, at a start
    floor       above all sequences given out                head        how far the log may be read
    segments    one open segment, whatever its form          walk        across segments, up to a bound
    batches     stored batches as records, pieces joined     arrow       batches as Arrow, without a loop
    reader      from a place on; follows                     seeking     the end and times, as sequences
    history     what the ledgers tell of missing segments    missing     records asked for that are reclaimed
    lookup      where is record N?                           cursors     where consumers stand
    taken       what a new cursor needs and is gone          checkpoint  what a stream has committed
    pins        who holds back which segment                 progress    what routes got, how far groups are
    lag         what each group has still to process         growth      how fast a log grows
    backlog     what there is, and who still needs it        checker     checks one segment
    opening     what a segment tells of those before it      verifier    reads everything, changes nothing
    finding     one thing that was found out about a file    dump        what is in a file, and what does not fit

Data moves one way: the writer fills the active segment and cuts it, the sealer finds cut segments in the directory and
replaces them by compressed ones, readers go through all three forms. Nothing here logs or counts: functions return what
happened. Time comes in as an argument.
"""
