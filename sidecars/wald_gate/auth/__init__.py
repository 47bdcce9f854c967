"""Authentication and authorization.

tokens   the token file, which names clients and their rights
clients  authenticates requests by token, certificate, user or session, and checks rights
origins  refuses requests that another site made a browser send, and finds clients behind proxies
"""
