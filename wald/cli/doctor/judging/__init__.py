"""The facts and the rules of every check: the medium, operations on files, the host, the log, its room."""
