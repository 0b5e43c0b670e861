"""The local plane: collectives of the ranks of one host, from rank to rank through shared memory, no thread between.

board      a rank's shared memory: counters, what it says about its operation, a ring of bytes
streams    the ring as a stream: reserve, publish, await, take
statement  what a rank says about an operation; whether ranks say the same
exchange   how each collective moves: chunk by chunk, each rank adding its own part
lane       the operations of one group in order: who runs them, how they fail
"""
