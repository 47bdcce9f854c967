"""RECLAIM: deletes a complete segment once everybody has read it, and can prove that it was allowed to.

    sealed, or left raw             judged: the cursors (wald.store.retention.pins), then the limits (policy)
    told in the ledger              renamed to .released; after a crash it is judged again first
    released                        unlinked after the grace period, for readers that are about to open it

The ledger's line, with the cursors that made it legal, is durable before the name changes. Every step can be repeated,
and this is the only program that deletes what is published.
"""
