"""The facts as they are here: mounts and devices, operations tried in a scratch directory, the host, the log."""
