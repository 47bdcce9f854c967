"""The stages of `make demo`: each shows one thing, and fails loudly if it does not hold.

text      what is fed                    showing    running a command and showing what it says
feeding   producers, cuts and kills      reading    everything back, and what it came to
leaving   consumers, and what they free  pipeline   the same on Spark
"""
