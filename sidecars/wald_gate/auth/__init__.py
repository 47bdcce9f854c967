"""Authentication and authorization.

tokens   clients and their rights, and the file that names them
clients  identity of requests, sessions, requests that another site made a browser send, and clients behind proxies
"""
