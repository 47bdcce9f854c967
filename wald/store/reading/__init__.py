"""Stored batches from a place on, as batches, records and Arrow.

arrow       batches as Arrow, without a loop
batches     stored batches as records, pieces joined
latest      where the last records of a route begin
lookup      where is record N?
matching    which records a pattern is found in
portions    what can be read at the same time
reader      from a place on; follows
rows        the records of a batch, made when they are wanted
search      by several processes
selection   which records are wanted: start and stop
senders     who sent a batch
walk        across segments, up to a bound
"""
