"""``wald repair``: makes a damaged log good again, and records what is lost.

apply      carries a plan out, in repeatable steps
facts      what is wrong, and what is whole
identity   which log it is, where log.json does not say
ledgers    a ledger whose chain is broken, begun again
loss       whose the lost records were
plan       facts → acts
proposal   the plan for a log, whatever its ledgers
rescue     the whole batches of a damaged segment
rewrite    new segments made of them
"""
