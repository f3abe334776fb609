"""Every public call with an allocation that fails: does it change nothing, or is its object broken?

`python -m tests.machinery.out_of_memory [name]` tries all cases, or those whose names begin so.
"""
