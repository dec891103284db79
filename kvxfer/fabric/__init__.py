"""The fabric: one-sided writes and reads between registered memories of two processes.

`port` says what is asked of a transport, `pump` owns one and calls it from a single service, `nixl` is the transport of
production (the only module that imports NIXL), and `loopback` is an in-process one with fault injection for tests.
"""
