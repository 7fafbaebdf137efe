"""Which sequences run in which step: admission, chunking, preemption, finish. No torch, no I/O."""

from weft.scheduler.scheduler import Scheduler

__all__ = ["Scheduler"]
