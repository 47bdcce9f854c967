"""Rights: who asks, and what they may.

tokens      the file that says who may what
origins     from which site a browser was made to ask
allowances  what one client may ask over time
clients     who asks, by a token or as the user at the other end of a unix socket
sessions    browsers, for which a cookie stands for a token
admission   whether a request is admitted
"""
