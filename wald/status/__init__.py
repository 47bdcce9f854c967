"""Information about a log for the commands and the gate; docs/json.md describes it.

::

    schema      objects of the JSON of both
    findings    liveness of the daemon, and problems of a log
    retention   pins of each group, and the states of its records
    history     events of a log as sentences
    rates       samples, and the rates and latencies that follow from them
"""
