"""The daemon: one loop that collects input, makes it durable, and then acknowledges it.

background    thread that seals cut segments and allocates the next file
backpressure  reasons why a request must wait
commands      socket commands, and the table of routes
committer     commit rounds, cuts and disk failures
connection    sans-IO state machine of one connection
connections   sockets: reading, fairness, replies and timeouts
intake        pipes of all routes, and the paths of the FIFOs
listening     listening socket, and limits on connections
loop          main loop
metrics       metrics and health
pipes         reading of pipes without loss or duplication
quotas        quotas on a route's unread bytes
startup       checks, lock, recovery, sources
"""
