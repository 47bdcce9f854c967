"""Reads every byte and reports what does not fit; changes nothing.

batches     what is wrong with a batch
checker     checks one segment
dump        what is in a file, and what does not fit
finding     one thing that was found in a file
kinds       what a file is, by its path
opening     what a segment says of those before it
story       what happened by the ledgers, and whether it was legal
verifier    reads everything, changes nothing
"""
