"""Audit of logs: every byte is as written, nothing is missing, and every deletion was allowed.

    segments    the checks of ``wald verify``: executors check segments, the driver joins the results in order
    journals    of work groups, checked on the driver as ``wald verify`` does
    deletions   each line of reclaim.jsonl by the cursors in it, compared with the contents of the segment
    archives    the proof of ``wald-archive verify``: executors check bags, the driver joins the results

An audit changes nothing and continues after each finding: the report has them all.
"""
