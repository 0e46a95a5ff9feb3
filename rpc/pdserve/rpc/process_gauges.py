"""Gauges of the process itself, for the leak oracle."""

import asyncio

import psutil


def process_gauges() -> dict[str, float]:
    """Return threads, open descriptors, tasks, resident bytes and CPU time of this process."""
    process = psutil.Process()
    with process.oneshot():
        return {
            "process.threads": float(process.num_threads()),
            "process.descriptors": float(process.num_fds()),
            "process.tasks": float(len(asyncio.all_tasks())),
            "process.resident_bytes": float(process.memory_info().rss),
            "process.cpu_s": float(sum(process.cpu_times()[:2])),
        }
