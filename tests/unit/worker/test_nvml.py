"""Readings of devices: what the driver says, what it does not say, and what makes a group unfit."""

from types import SimpleNamespace

import pynvml
import pytest

from worker.nvml import DeviceReader


class Driver:
    """Stands for the driver's library: devices that a test can break. This machine has none."""

    NVMLError = pynvml.NVMLError
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    NVML_VOLATILE_ECC = pynvml.NVML_VOLATILE_ECC
    NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU
    nvmlEventTypeXidCriticalError = pynvml.nvmlEventTypeXidCriticalError  # noqa: N815 - the library's name

    def __init__(self, num_devices=2):
        self.num_devices = num_devices
        self.ecc = {}
        self.xids = []
        self.throttle = 0
        self.is_open = False

    def refuse(self, code=pynvml.NVML_ERROR_NOT_SUPPORTED):
        raise pynvml.NVMLError(code)

    def nvmlInit(self):  # noqa: N802 - the library's names, here and below
        self.is_open = True

    def nvmlShutdown(self):  # noqa: N802
        self.is_open = False

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return index if index < self.num_devices else self.refuse(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetIndex(self, handle):  # noqa: N802
        return handle

    def nvmlDeviceGetName(self, _):  # noqa: N802
        return "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, _):  # noqa: N802
        return SimpleNamespace(used=3 << 30, total=140 << 30)

    def nvmlDeviceGetUtilizationRates(self, _):  # noqa: N802
        return SimpleNamespace(gpu=97)

    def nvmlDeviceGetTemperature(self, *_):  # noqa: N802
        return self.refuse()

    def nvmlDeviceGetTotalEccErrors(self, handle, *_):  # noqa: N802
        return self.ecc.get(handle, 0)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, _):  # noqa: N802
        return self.throttle

    def nvmlEventSetCreate(self):  # noqa: N802
        return "events"

    def nvmlDeviceRegisterEvents(self, *_):  # noqa: N802
        return None

    def nvmlEventSetWait_v2(self, *_):  # noqa: N802
        if not self.xids:
            self.refuse(pynvml.NVML_ERROR_TIMEOUT)
        device, xid = self.xids.pop(0)
        return SimpleNamespace(device=device, eventData=xid)


def test_a_device_tells_what_it_can_and_none_for_the_rest():
    driver = Driver()
    driver.throttle = 0x40 | 0x04
    reader = DeviceReader([1], driver)
    (device,) = reader.read().devices
    assert (device.index, device.name, device.utilization_percent) == (1, "NVIDIA H200", 97)
    assert (device.memory_used_bytes, device.memory_total_bytes) == (3 << 30, 140 << 30)
    assert (device.temperature_c, device.ecc_uncorrected, device.xid, device.problem) == (None, 0, None, "")
    assert device.throttling == ["power_cap", "hw_thermal"]
    reader.close()
    assert not driver.is_open


def test_a_missing_device_is_a_problem_that_names_it():
    reading = DeviceReader([0, 7], Driver()).read()
    assert reading.problem.startswith("device 7 is missing")
    assert reading.devices[0].problem == ""


def test_a_device_that_was_lost_while_it_worked_is_missing():
    driver = Driver()
    reader = DeviceReader([0, 1], driver)
    assert reader.read().problem == ""
    driver.num_devices = 1
    assert "device 1 is missing" in reader.read().problem


def test_an_uncorrectable_memory_error_is_a_problem():
    driver = Driver()
    driver.ecc = {1: 2}
    assert "device 1 has met 2 uncorrectable memory errors" in DeviceReader([0, 1], driver).read().problem


@pytest.mark.parametrize(
    ("xids", "is_problem"), [([31], False), ([43, 13], False), ([79], True), ([13, 48, 31], True)]
)
def test_only_xids_of_the_device_itself_are_a_problem(xids, is_problem):
    driver = Driver()
    reader = DeviceReader([0, 1], driver)
    driver.xids = [(0, xid) for xid in xids]
    reading = reader.read()
    assert bool(reading.problem) == is_problem
    assert reading.devices[0].xid is not None
    assert reader.read().problem == reading.problem  # it is not forgotten


def test_a_host_without_a_driver_says_so_and_nothing_else():
    library = Driver()
    library.nvmlInit = lambda: library.refuse(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    reader = DeviceReader([0], library)
    reading = reader.read()
    assert (reading.devices, reading.problem) == ([], "")
    assert reading.note.startswith("NVML cannot be used")
    reader.close()


def test_a_group_without_devices_has_nothing_to_read():
    assert DeviceReader([]).read().to_json() == {"devices": [], "note": "no devices"}
