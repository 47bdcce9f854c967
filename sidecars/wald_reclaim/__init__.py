"""Deletion of segments that every consumer group has read; each is recorded with the reason that allowed it.

A pass (passes) surveys the segments and cursors (survey), decides by the limits (policy), and deletes or shrinks
(apply). The ledger's line (evidence) is durable before a name changes. Every step can be repeated. No other program
deletes complete segments.
"""
