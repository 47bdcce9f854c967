"""Rights: who asks, and what they may.

clients     who asks, by a token or as the user at the other end of a unix socket
sessions    browsers, for which a cookie stands for a token
"""
