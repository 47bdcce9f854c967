"""Stored batches from a place on, as batches, records and Arrow.

arrow       batches as Arrow, without a loop
batches     stored batches as records, pieces joined
lookup      where is record N?
reader      from a place on; follows
walk        across segments, up to a bound
"""
