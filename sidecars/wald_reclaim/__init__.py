"""RECLAIM: deletes a complete segment once every consumer group has read it, and records why it was allowed to.

    sealed, or left raw             decided by the cursors (wald.retention.blockers), then by the limits (policy)
    recorded in the ledger          renamed to .released; after a crash it is decided again first
    released                        unlinked after the grace period, for readers that are about to open it

The ledger's line, with the cursors that allowed it, is durable before the name changes. Every step can be repeated.
No other program deletes complete segments.

SHRINK (shrink, floors), if it is wanted, rewrites a sealed segment that stays for a few unread records to these.
"""
