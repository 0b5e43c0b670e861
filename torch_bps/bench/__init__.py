"""`byteps bench`: how long collectives take, on this backend and on others in the same run, and whether they are right.

table    rows, rates, the printed table (pure)
cases    each collective: tensors, call, check
usage    processor time and retransmitted segments of a process
measure  the ranks' loop
__main__ the command: alone it starts ranks on this host, under torchrun it is one
"""
