"""The measurements behind `make bench`: one module per question, each comparing wald with what people use today.

stage    daemon, data, FIFOs, timing         sockets  requests per second, beside Redis
pipes    FIFO to log, beside cat, dd, …      reading  sealed segments to bytes and Arrow, first record
segments sealing and recovery                gate     HTTP, beside the socket, Redis and NATS
work     work groups, beside other queues    report   rows, medians, goals, the table
"""
