"""How blocks reach the kernel: io_uring, threads with O_DIRECT, or buffered threads; one protocol (`base.py`)."""
