"""Stages of `make demo`: each shows one thing, and fails loudly if it does not hold.

text      input lines                        showing    running a command and showing its output
feeding   producers, cuts and kills          reading    reading everything back, and sizes
leaving   consumers, deletion and archives   pipeline   the same on Spark
"""
