"""One segment, whatever its form, and how far a log may be read.

compression the sealed form, written and read
continuity  detection of another log, or an older copy, at the path of a log
contents    what the batches of a segment hold
endings     the end of a complete raw segment, as the next segment records it
frames      the frames of a sealed segment, written
head        how far the log may be read
indexes     the sparse index beside a raw segment
raw         a raw segment, scanned whatever its bytes
read_ahead  frames of a sealed segment, decompressed in time
relieving   a sealed segment written again without what is not needed
resync      the next batch behind damage
salvage     a sealed segment with a damaged index
opened      one open segment, whatever its form
seeking     the end and times, as sequences
view        a log at one moment
"""
