"""The audit of logs: is every byte what was written, is nothing missing, and was what is gone allowed to go?

    segments    the checks of ``wald verify``, each segment on an executor, joined in order here
    journals    of work groups, as ``wald verify`` checks them, here
    deletions   each line of reclaim.jsonl by the cursors in it, against what the segment held (legality)
    archives    the proof of ``wald-archive verify``, each bag on an executor, joined here

Nothing is changed, and what is found never ends an audit: all of it is in the report.
"""
