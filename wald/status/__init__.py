"""What a log is asked, by the commands and by the gate; docs/json.md describes the answers.

::

    schema      objects of the JSON of both
    findings    liveness of the daemon, and what is wrong with a log
    retention   what each group pins, and the state of its records
    history     events of a log as sentences
    rates       samples, and the rates and latencies that follow from them
"""
