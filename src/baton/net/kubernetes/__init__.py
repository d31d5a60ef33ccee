"""Requests to a Kubernetes API server: of gateways, of operators' commands, of the autoscaler.

Enters: where the server is, and the credentials shown to it. Leaves: answers of bounded size, and
one error for each way in which a request fails.

File map:
    access.py      where the API server is; the service account of this pod
    connection.py  one request on one connection: deadlines, bounds, errors; lists in pages
    objects.py     what all objects of the API have; the API's own description of an error (pure)
"""
