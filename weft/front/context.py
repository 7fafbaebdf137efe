"""The front's parts, as the handlers see them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from weft.common.errors import NotFound, Overloaded
from weft.config.resolved import EngineConfig
from weft.config.sections import FrontSection
from weft.front.head_client import HeadClient, Process
from weft.front.lifecycle import Lifecycle
from weft.front.metrics import Metrics
from weft.front.protocol import printable

P = ParamSpec("P")
T = TypeVar("T")

TEXT_THREADS = 2
TEXT_QUEUE = 1024
"""Requests that may wait for a text thread; beyond it they get 429."""
