"""BytePS core: cuts operations into partitions, schedules them, moves them to engines and back. Knows no framework."""
