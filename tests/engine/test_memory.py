"""How much memory the engine thinks it may take."""

from pathlib import Path

from engine.memory import available_bytes

GIB = 1024**3


def write(folder: Path, **files: str) -> Path:
    folder.mkdir()
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_a_bare_machine_gives_what_the_kernel_calls_available(tmp_path: Path) -> None:
    """
    Without a container limit, MemAvailable counts.
    """
    proc = write(tmp_path / "proc", meminfo="MemTotal: 9 kB\nMemAvailable: 4194304 kB\n")

    assert 4 * GIB == available_bytes(proc, tmp_path / "none")


def test_a_container_gives_its_limit_less_what_it_uses(tmp_path: Path) -> None:
    """
    The container's own limit counts where it is lower; file pages can be given up.
    """
    proc = write(tmp_path / "proc", meminfo="MemAvailable: 4194304 kB\n")
    cgroup = write(
        tmp_path / "cgroup",
        memory__max=f"{2 * GIB}\n",
        memory__current=f"{GIB}\n",
        memory__stat=f"anon 5\ninactive_file {GIB // 2}\n",
    )

    assert GIB + GIB // 2 == available_bytes(proc, cgroup)


def test_an_unlimited_container_counts_as_the_machine(tmp_path: Path) -> None:
    """
    memory.max of "max" is no limit.
    """
    proc = write(tmp_path / "proc", meminfo="MemAvailable: 1048576 kB\n")
    cgroup = write(tmp_path / "cgroup", memory__max="max\n", memory__current="1\n", memory__stat="inactive_file 0\n")

    assert GIB == available_bytes(proc, cgroup)


def test_an_unknown_system_gives_a_modest_guess(tmp_path: Path) -> None:
    """
    Where nothing can be read, 2 GiB are assumed.
    """
    assert 2 * GIB == available_bytes(tmp_path / "a", tmp_path / "b")
