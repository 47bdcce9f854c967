"""Checks that read every byte, report problems and change nothing.

audit_report  events in a time span, with an audit of deletions
checker       check of one segment, batch by batch
dump          contents and damage of a file
kinds         kinds of files, recognised by path
verifier      check of a whole log
"""
