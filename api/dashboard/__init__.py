"""The dashboard of operators under `/admin`: server-rendered pages on the farm's own functions.

A page works without JavaScript; with it, its regions are kept fresh over one event stream. Nothing here
changes a row by itself: every button ends in the function that the API or the command line would call, and in
an audit entry of the same transaction.
"""
