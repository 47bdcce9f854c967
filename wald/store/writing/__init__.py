"""The active segment, its cut and sealing, and what a start repairs.

blanks      files that segments are made in
drafts      batches on their way to disk
examination  the facts about the newest raw segment
floor       above all sequences given out
lives       how the lives of the daemon ended
lock        one writer, and its epoch
recovery    facts → decision → repair, at a start
replay      the state at the end of a segment
room        how much of its disk a daemon may use
sealer      raw → sealed, in repeatable steps
writer      the active segment, and CUT
"""
