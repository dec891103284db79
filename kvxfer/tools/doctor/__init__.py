"""`kvxfer doctor`: what of this machine, and of the way to another one, kvxfer can use, and what to do about the rest.

findings      what a check says, and how it is shown                         (findings.py)
machine       what checks read, so that a test can give them another one      (machine.py)
software      versions, settings, the environment                            (software.py)
limits        limits, namespaces, clocks                                     (limits.py)
gpus          GPUs, peer access, NVLink, torch's allocator                   (gpus.py)
trial         what two processes can do with each other's memory          (trial.py)
probe         real workers, real bytes: each route in both directions        (probe.py, lanes.py)
pair          what two processes here do together                            (pair.py)
remote        two hosts: one listens, one connects                           (remote.py)
examination   all of it in order                                             (examination.py)
"""
