"""What operators see: health, readiness, metrics, and a line about each request.

counts      what the gate counts: plain numbers
exported    those as metrics
readiness   whether the log can be read and the daemon answers
pages       the verbs healthz, readyz and metrics
requests    a line about a request on stderr
"""
