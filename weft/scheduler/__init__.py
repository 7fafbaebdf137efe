"""Choose the rows of each step: admission, chunking, preemption, finish. No torch, no I/O."""

from weft.scheduler.scheduler import Scheduler

__all__ = ["Scheduler"]
