"""What the doctor reads of a host: from the files of the kernel, and from a machine without a driver."""

from pathlib import Path

from farm.commands.doctor_machine import _host_bytes, _numa_node, read_machine


def test_memory_is_read_from_meminfo(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       2097152 kB\nMemFree:  1 kB\n")
    assert _host_bytes(meminfo) == 2 * 2**30
    assert _host_bytes(tmp_path / "none") is None


def test_node_of_a_device_is_found_by_its_shortened_bus_id(tmp_path: Path) -> None:
    device = tmp_path / "0000:3b:00.0"
    device.mkdir()
    (device / "numa_node").write_text("1\n")
    assert _numa_node("00000000:3B:00.0", tmp_path) == 1
    (device / "numa_node").write_text("-1\n")
    assert _numa_node("00000000:3B:00.0", tmp_path) is None
    assert _numa_node("00000000:99:00.0", tmp_path) is None


def test_a_host_is_read_also_before_its_state_folder_exists(tmp_path: Path) -> None:
    machine = read_machine(tmp_path / "not" / "yet")
    assert machine.disk_free_bytes > 0
    assert "pytest" in machine.packages
    assert bool(machine.gpus) is not bool(machine.gpu_note)
