"""``wald doctor``: which promises hold on this directory and host, and what to do if one does not.

command      the command line, and one record sent through the log
examination  all checks, run within a time limit
findings     outcomes, verdicts and findings
medium, files, host, log  the checks: each probes facts, and the facts give a verdict
"""
