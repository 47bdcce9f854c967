"""Measurements behind `make bench`: one module for each section of docs/benchmarks.md, compared with peers.

daemon, starting, archives, ledgers, searching, work, gate, page, hostile, spark    the sections
stage     daemon, data, FIFOs, timing
report    rows, medians, goals, the table
brokers, queues    servers that wald is compared with, and their clients and workers
scan, plain, spent    programs that run in a separate process
"""
