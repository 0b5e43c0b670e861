"""torch.distributed's side: a ProcessGroup whose collectives are Operations of core.

    create          init_process_group("byteps") -> a process group
    process_group   the methods that torch calls; each makes a Call, fills it and starts its Work
    arguments       the two styles of those methods' arguments
    collectives     each collective as a row of wire.ops: which bytes are pushed, which are pulled
    point_to_point, sparse, monitored_barrier    those that are not a single row
    kinds           torch's dtypes and ReduceOps as wire codes; what can be summed
    call            what one call needs: host memory of its tensors, the Operations
    staging         device memory <-> host memory
    work            what the caller gets: wait, future, errors
    completion      the threads that copies and callbacks run on
    gloo_inside     a real gloo backend, for the few entries that torch looks up in C++
    dynamo          keeps torch.compile out of our frames
    options         pg_options

Importing this package registers the backend.
"""

from torch_bps import register

register()
