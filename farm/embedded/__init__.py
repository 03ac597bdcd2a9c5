"""Embedded mode: the farm on one machine without Docker, a GPU or anything installed by hand.

`servers` starts the real PostgreSQL, Valkey and SeaweedFS from prebuilt wheels, `supervisor` runs the
farm's own roles beside them. Everything listens on loopback only and dies with the process that started it.
Production does not use this package: it names its own servers.
"""
