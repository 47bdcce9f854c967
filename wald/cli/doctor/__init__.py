"""``wald doctor``: which promises hold on this directory and this host, and what to type where one does not.

checks     how facts become a finding: a table of rules for each check; pure
judging/   the facts and the rules of every check; pure
probing/   the facts as they are here: reads, and tries things out in a scratch directory
examination  which checks there are, and running all of them within a time
canary     one record on its way through the log
command    the command line
"""
