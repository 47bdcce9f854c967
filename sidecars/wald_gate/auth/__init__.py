"""Authentication and authorization.

tokens   clients and their rights, and the file that names them
clients  authenticates requests by token, certificate, user or session, and checks rights
origins  refuses requests that another site made a browser send, and finds clients behind proxies
"""
