"""Audit of logs: every byte is as written, nothing is missing, and every deletion was allowed.

    segments    the checks of ``wald verify``, each segment on an executor, joined in order here
    journals    of work groups, as ``wald verify`` checks them, here
    deletions   each line of reclaim.jsonl by the cursors in it, compared with the contents of the segment
    archives    the proof of ``wald-archive verify``, each bag on an executor, joined here

An audit changes nothing, and no finding ends it: the report has them all.
"""
