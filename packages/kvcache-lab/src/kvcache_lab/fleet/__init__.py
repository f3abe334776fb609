# SPDX-License-Identifier: Apache-2.0
"""Replays a trace through many replicas behind a router, and finds the smallest fleet that
meets a latency target.
"""

from kvcache_lab.fleet.hardware import Hardware, HardwareError, read_hardware
from kvcache_lab.fleet.planning import FleetPlan, fleet_plan_table, plan_fleet
from kvcache_lab.fleet.routers import ROUTERS
from kvcache_lab.fleet.simulation import FleetReport, simulate_fleet
from kvcache_lab.fleet.sizes import Fleet

__all__ = [
    "ROUTERS",
    "Fleet",
    "FleetPlan",
    "FleetReport",
    "Hardware",
    "HardwareError",
    "fleet_plan_table",
    "plan_fleet",
    "read_hardware",
    "simulate_fleet",
]
