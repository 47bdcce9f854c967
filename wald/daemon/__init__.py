"""The daemon: one loop that collects input, makes it durable, and then acknowledges it.

background    background thread that seals segments
backpressure  reasons why a request must wait
commands      commands of the socket (every request but PUB), and the table of routes
committer     commit rounds: collect, write, sync, publish, reply
connection    state machine of one connection, without input or output
connections   open connections of the socket, and the order in which they are served
fifos         fIFO paths that the daemon opens, replaces and restores
intake        pipes of all routes, read in order
listening     listening unix socket, and limits on connections
loop          main loop of the daemon
metrics       metrics and health endpoint of the daemon
pipes         reading of lines from pipes without losing bytes in a crash
quotas        quotas on the unread bytes of a route
startup       start of the daemon: checks, recovery, sources
transfers     record of bytes in transfer from a pipe to the log
"""
