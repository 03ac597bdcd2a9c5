"""Prometheus metrics of api, ticker and worker: what is counted, where it is read, how it is served."""
