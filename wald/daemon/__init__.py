"""The daemon: one loop that collects input, makes it durable, and then acknowledges it.

background    background thread that seals cut segments and allocates the file for the next cut
backpressure  reasons why a request must wait, and the snapshot of them for one round
commands      commands of the socket (every request but PUB), and the table of routes
committer     commit rounds: collect, write, sync, publish the head, release the sources, reply
connection    sans-IO state machine of one connection
connections   sockets of the open connections: reading, fairness, replies and timeouts
fifos         FIFO paths that the daemon opens, restores and reports
intake        pipes of all routes, read in rotation
listening     listening unix socket, and limits on connections
loop          main loop of the daemon
metrics       metrics and health of the daemon
pipes         reading of lines from pipes without losing or doubling bytes in a crash
quotas        quotas on the unread bytes of a route
startup       start of the daemon: checks, lock, recovery, sources
"""
