"""Files: what lies in a root, and everything that writes or reads it. Eight rooms; each imports only those above it.

    files       the system calls, the small files, and where each file of a root lies
    segments    one segment, whatever its form, and how far the log may be read
    retention   which groups still need what, and what is known of segments that are gone
    reading     stored batches from a place on, as batches, records and Arrow
    writing     the active segment, its cut and sealing, and what a start repairs (imports files and segments)
    checking    reads every byte, and reports what does not fit
    repairing   makes a damaged log good again, and records what is lost (imports all of them)
    restoring   makes a new log of records that have their sequences already (imports files, segments and writing)

Data moves one way: the writer fills the active segment and cuts it, the sealer finds cut segments in the directory and
replaces them by compressed ones, readers go through all three forms. Nothing here logs or counts: functions return what
happened. Time comes in as an argument.
"""
