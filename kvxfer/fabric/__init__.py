"""The fabric: one-sided writes and reads between registered memories of two processes.

`port` says what is asked of a transport, `calls` owns one, makes the calls that may take long and knows the peers,
`nixl` is that of production (over `capi`, the only module that opens NIXL's library), and `loopback` is an in-process
one that can be made to fail, for tests.
"""
