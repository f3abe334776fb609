"""Signal handlers that raise, at any instant of any call: what Python and the native code know of a
request changes together. `python -m tests.machinery.interrupts --count 10000` tries random instants.
"""
