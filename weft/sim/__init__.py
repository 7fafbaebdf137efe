"""A simulator: the product's scheduler on virtual time, with a cost model in place of a device. No torch."""

from weft.sim.engine import Simulation, simulate
from weft.sim.latency_report import Report
from weft.sim.workload import Arrival

__all__ = ["Arrival", "Report", "Simulation", "simulate"]
