"""Asks NVIDIA's library what one reading asks, and prints the median time in nanoseconds."""

import time

import pynvml as nvml

nvml.nvmlInit()
devices = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]


def reading():
    for device in devices:
        nvml.nvmlDeviceGetMigMode(device)
        nvml.nvmlDeviceGetPowerManagementLimit(device)
        nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2)
        nvml.nvmlDeviceGetUtilizationRates(device)
        nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU)
        nvml.nvmlDeviceGetPowerUsage(device)
        nvml.nvmlDeviceGetComputeRunningProcesses(device)
        nvml.nvmlDeviceGetGraphicsRunningProcesses(device)
        nvml.nvmlDeviceGetRemappedRows(device)


times = []
for _ in range(500):
    start = time.perf_counter_ns()
    reading()
    times.append(time.perf_counter_ns() - start)
print(sorted(times)[len(times) // 2])
