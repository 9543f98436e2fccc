"""Sizes mean one thing or are refused; detection finds the tightest limit; budgets say where they came from."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.io.errors import ConfigError
from hetero.memory.budget import (
    Baseline,
    TierInfo,
    detect_cpu,
    format_size,
    margin_nbytes,
    parse_max_memory,
    parse_size,
    process_baseline,
    resolve_budgets,
)
from hetero.memory.sizes import format_need

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("1KiB", KIB),
        ("512MiB", 512 * MIB),
        ("6GiB", 6 * GIB),
        ("2TiB", 2 << 40),
        ("3KB", 3000),
        ("3MB", 3_000_000),
        ("6GB", 6_000_000_000),
        ("1TB", 10**12),
        ("1.5GiB", 3 * GIB // 2),
        ("0.3KB", 300),
        ("6.0 GiB", 6 * GIB),  # as hetero prints it
        (" 6GiB\n", 6 * GIB),
        ("50%", 500),
        ("12.5%", 125),
        ("100%", 1000),
        ("auto", 1000),
    ],
    ids=repr,
)
def test_size_means(text: int | str, nbytes: int) -> None:
    assert parse_size(text, available_nbytes=1000, name="cpu_memory") == nbytes


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("6G", 'write "6GiB" .* or "6GB"'),
        ("512M", 'write "512MiB" .* or "512MB"'),
        ("1T", '"1TiB"'),
        ("9K", '"9KiB"'),
        ("6Gb", "bits elsewhere.*6GiB"),
        ("6Gib", "bits elsewhere.*6GiB"),
        ("6gib", '"6GiB"'),
        ("6gb", '"6GiB"'),
        ("6g", '"6GiB"'),
        ("100B", 'plain number is bytes; write "100"'),
        ("6 parsecs", "6GiB"),
        ("-1GiB", "not a size"),
        (-5, "at least 1"),
        (0, "at least 1"),
        ("0", "at least 1"),
        ("0GiB", "at least 1"),
        ("0%", "at least 1"),
        ("nan", "not a size"),
        ("nanGiB", "not a size"),
        ("inf", "not a size"),
        ("1e9", "6GiB"),
        ("1.5", "fraction without a unit"),
        ("101%", "more than 100%"),
        ("-3%", "not a size"),
        ("", "not a size"),
        ("   ", "not a size"),
        ("6  GiB", "not a size"),
        ("6G iB", "not a size"),
        ("GiB", "not a size"),
        (".5GiB", "not a size"),
        ("1_000MiB", "not a size"),
        ("1,5GiB", "not a size"),
        ("٣GiB", "not a size"),
        ("9" * 5000, "not a size"),
        ("9999999999TiB", "more than"),
        ("AUTO", "6GiB|not a size"),
        (1.5, "float"),
        (True, "bool"),
        (None, "NoneType"),
    ],
    ids=repr,
)
def test_size_is_refused_with_the_name_the_value_and_a_hint(text: int | str, hint: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)cpu_memory=.*{hint}") as caught:
        parse_size(text, available_nbytes=1000, name="cpu_memory")
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["50%", "auto"])
def test_a_share_of_an_unknown_total_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="disk="):
        parse_size(text, name="disk")


def test_zero_is_a_size_where_it_makes_sense() -> None:
    assert parse_size("0GiB", name="gpu_memory", allow_zero=True) == 0
    with pytest.raises(ConfigError):
        parse_size(-1, name="gpu_memory", allow_zero=True)


UNITS = {"KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1 << 40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@given(whole=st.integers(0, 99999), thousandths=st.integers(0, 999), unit=st.sampled_from(sorted(UNITS)))
def test_any_decimal_is_exact(whole: int, thousandths: int, unit: str) -> None:
    want = (whole * 1000 + thousandths) * UNITS[unit] // 1000
    assert parse_size(f"{whole}.{thousandths:03d}{unit}", name="x", allow_zero=True) == want


@given(text=st.text(max_size=12) | st.from_regex(r"\A[0-9. +-]{0,6}[KMGTkmgt]?i?[Bb%]?\Z"))
def test_any_text_is_a_size_or_a_config_error(text: str) -> None:
    try:
        nbytes = parse_size(text, available_nbytes=1000, name="x")
    except ConfigError:
        return
    assert nbytes > 0
    assert text.strip() == "auto" or text.strip()[0].isdigit()


@given(nbytes=st.integers(0, 1 << 50))
def test_printed_sizes_can_be_typed_in_again(nbytes: int) -> None:
    printed = format_size(nbytes).removesuffix(" bytes")
    again = parse_size(printed, name="x", allow_zero=True)
    assert abs(again - nbytes) <= max(nbytes // 18, 0)


@given(nbytes=st.integers(0, 1 << 50))
def test_a_need_typed_in_again_is_enough(nbytes: int) -> None:
    again = parse_size(format_need(nbytes), name="x", allow_zero=True)
    assert nbytes <= again <= nbytes + max(nbytes // 9, 1023)


def test_accelerate_max_memory() -> None:
    assert parse_max_memory({0: "6GiB", "cpu": "16GiB"}) == ("6GiB", "16GiB")
    assert parse_max_memory({"cpu": 5}) == (0, 5)
    assert parse_max_memory({1: 7}) == (7, "auto")
    with pytest.raises(ConfigError, match="2 GPUs"):
        parse_max_memory({0: 1, 1: 1})
    with pytest.raises(ConfigError, match="'gpu'"):
        parse_max_memory({"gpu": "6GiB"})


# cgroups: fake trees of files, as the kernel shows them

UNLIMITED_V1 = 9223372036854771712


class FakeRoot:
    """A file system root with /proc/self and cgroup folders."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mounts: list[str] = ["21 20 0:4 / /proc rw,nosuid - proc proc rw"]
        self.memberships: list[str] = []
        (path / "proc/self").mkdir(parents=True)
        self._write()

    def _write(self) -> None:
        (self.path / "proc/self/mountinfo").write_text("\n".join(self.mounts) + "\n")
        (self.path / "proc/self/cgroup").write_text("\n".join(self.memberships) + "\n")

    def mount(self, kind: str, point: str, membership: str, *, mount_root: str = "/") -> None:
        options = "rw,memory" if kind == "cgroup" else "rw"
        self.mounts.append(f"35 31 0:{len(self.mounts)} {mount_root} {point} rw shared:9 - {kind} {kind} {options}")
        self.memberships.append(f"4:memory:{membership}" if kind == "cgroup" else f"0::{membership}")
        self._write()

    def folder(self, path: str, **files: object) -> None:
        folder = self.path / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name.replace("memory_", "memory.", 1)).write_text(f"{content}\n")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRoot:
    machine = SimpleNamespace(total=32 * GIB, available=20 * GIB)
    monkeypatch.setattr("psutil.virtual_memory", lambda: machine)
    return FakeRoot(tmp_path)


def test_no_cgroup_means_the_machine(fake: FakeRoot) -> None:
    assert detect_cpu(root=fake.path) == TierInfo(32 * GIB, 20 * GIB, "the machine's available memory")


def test_a_system_without_proc_means_the_machine(fake: FakeRoot, tmp_path: Path) -> None:
    assert detect_cpu(root=tmp_path / "nowhere").available_nbytes == 20 * GIB


def test_cgroup_v2_tightest_of_the_hierarchy(fake: FakeRoot) -> None:
    fake.mount("cgroup2", "/sys/fs/cgroup", "/app/job")
    fake.folder("/sys/fs/cgroup", memory_current=9 * GIB)
    fake.folder("/sys/fs/cgroup/app", memory_max=8 * GIB, memory_current=7 * GIB, memory_stat="inactive_file 0")
    fake.folder("/sys/fs/cgroup/app/job", memory_max=4 * GIB, memory_current=1 * GIB, memory_stat="inactive_file 0")
    found = detect_cpu(root=fake.path)
    assert found.total_nbytes == 4 * GIB
    assert found.available_nbytes == 1 * GIB
    assert found.limit_source == "the cgroup v2 limit of /app"


def test_cgroup_v2_max_means_no_limit_and_high_is_one(fake: FakeRoot) -> None:
    fake.mount("cgroup2", "/sys/fs/cgroup", "/app")
    fake.folder("/sys/fs/cgroup/app", memory_max="max", memory_high="max", memory_current=5)
    assert detect_cpu(root=fake.path).available_nbytes == 20 * GIB
    fake.folder("/sys/fs/cgroup/app", memory_high=6 * GIB, memory_current=1 * GIB)
    assert detect_cpu(root=fake.path).available_nbytes == 5 * GIB


def test_cgroup_v1(fake: FakeRoot) -> None:
    fake.mount("cgroup", "/sys/fs/cgroup/memory", "/docker/abc")
    fake.folder("/sys/fs/cgroup/memory", memory_limit_in_bytes=UNLIMITED_V1, memory_usage_in_bytes=30 * GIB)
    fake.folder(
        "/sys/fs/cgroup/memory/docker/abc",
        memory_limit_in_bytes=3 * GIB,
        memory_usage_in_bytes=2 * GIB,
        memory_stat="inactive_file 7\ntotal_inactive_file 0\ntotal_active_file 0\ntotal_mapped_file 0",
    )
    found = detect_cpu(root=fake.path)
    assert (found.total_nbytes, found.available_nbytes) == (3 * GIB, 1 * GIB)
    assert found.limit_source == "the cgroup v1 limit of /docker/abc"


def test_cgroup_hybrid_reads_memory_from_v1(fake: FakeRoot) -> None:
    fake.mount("cgroup", "/sys/fs/cgroup/memory", "/job")
    fake.mount("cgroup2", "/sys/fs/cgroup/unified", "/job")
    fake.folder("/sys/fs/cgroup/memory/job", memory_limit_in_bytes=2 * GIB, memory_usage_in_bytes=GIB)
    fake.folder("/sys/fs/cgroup/unified/job", memory_pressure="some avg10=0.00")
    assert detect_cpu(root=fake.path).available_nbytes == GIB


@pytest.mark.parametrize(
    ("membership", "mount_root"),
    [("/docker/abc", "/docker/abc"), ("/docker/abc", "/"), ("/", "/"), ("/../../outside", "/")],
    ids=["host_path_below_mount_root", "host_path_not_visible", "own_namespace", "above_the_namespace"],
)
def test_cgroup_inside_a_container(fake: FakeRoot, membership: str, mount_root: str) -> None:
    fake.mount("cgroup2", "/sys/fs/cgroup", membership, mount_root=mount_root)
    fake.folder("/sys/fs/cgroup", memory_max=2 * GIB, memory_current=GIB)
    assert detect_cpu(root=fake.path).available_nbytes == GIB


def test_mount_point_with_a_space(fake: FakeRoot) -> None:
    fake.mount("cgroup2", "/sys/my\\040cgroup", "/a")
    fake.folder("/sys/my cgroup/a", memory_max=2 * GIB, memory_current=GIB)
    assert detect_cpu(root=fake.path).available_nbytes == GIB


@pytest.mark.parametrize(
    ("inactive", "active", "mapped", "droppable"),
    [
        (500, 0, 0, 500),  # a file was streamed through the page cache
        (300, 0, 250, 50),  # fresh library pages sit on the inactive list: dropping them is reading code again
        (500, 250, 250, 500),  # the library pages are the active ones
        (100, 0, 400, 0),
    ],
)
def test_page_cache_counts_as_available_unless_mapped(
    fake: FakeRoot, inactive: int, active: int, mapped: int, droppable: int
) -> None:
    stat = f"inactive_file {inactive * MIB}\nactive_file {active * MIB}\nfile_mapped {mapped * MIB}\n"
    fake.mount("cgroup2", "/sys/fs/cgroup", "/")
    fake.folder("/sys/fs/cgroup", memory_max=2 * GIB, memory_current=GIB, memory_stat=stat)
    assert detect_cpu(root=fake.path).available_nbytes == GIB + droppable * MIB


def test_use_above_the_limit_leaves_nothing(fake: FakeRoot) -> None:
    fake.mount("cgroup2", "/sys/fs/cgroup", "/")
    fake.folder("/sys/fs/cgroup", memory_max=GIB, memory_current=2 * GIB)
    assert detect_cpu(root=fake.path).available_nbytes == 0


def test_detection_on_this_machine() -> None:
    found = detect_cpu()
    assert 0 < found.available_nbytes <= found.total_nbytes
    baseline = process_baseline()
    assert baseline.anonymous_nbytes > 20 * MIB  # torch is imported
    assert baseline.total_nbytes == baseline.anonymous_nbytes + baseline.file_nbytes


# the dial

BASELINE = Baseline(150 * MIB, 100 * MIB)
CPU = TierInfo(16 * GIB, 8 * GIB, "the cgroup v2 limit of /app")
GPU = TierInfo(24 * GIB, 20 * GIB, "the free memory of cuda:0")


@pytest.mark.parametrize(
    ("available", "margin"),
    [(0, 0), (300 * MIB, 75 * MIB), (3 * GIB, 3 * GIB // 4), (8 * GIB, GIB), (100 * GIB, 10 * GIB)],
)
def test_margin(available: int, margin: int) -> None:
    assert margin_nbytes(available) == margin


@pytest.mark.parametrize(
    ("available", "margin"), [(0, 0), (100 * MIB, 25 * MIB), (536 * MIB, 64 * MIB), (8 * GIB, 8 * GIB // 10)]
)
def test_margin_in_a_cgroup_of_our_own(available: int, margin: int) -> None:
    assert margin_nbytes(available, is_ours_alone=True) == margin


def test_auto_leaves_the_margin_and_says_so() -> None:
    limits = resolve_budgets(gpu=GPU, cpu=CPU, baseline=BASELINE)
    assert limits.cpu.nbytes == 7 * GIB
    assert limits.cpu.margin_nbytes == GIB
    assert limits.gpu is not None
    assert limits.gpu.nbytes == 18 * GIB
    assert limits.ledger_limits() == {"cpu": 7 * GIB, "gpu": 18 * GIB}
    assert limits.lines() == [
        "gpu 18.0 GiB: 20.0 GiB available (the free memory of cuda:0), less a margin of 2.0 GiB",
        "cpu 7.0 GiB: 8.0 GiB available (the cgroup v2 limit of /app), less a margin of 1.0 GiB",
        "interpreter and libraries 250.0 MiB, outside the budgets (150.0 MiB private, 100.0 MiB mapped from files)",
    ]


def test_percentages_and_sizes_have_no_margin() -> None:
    limits = resolve_budgets("6GiB", "50%", gpu=GPU, cpu=CPU, baseline=BASELINE)
    assert limits.gpu is not None
    assert (limits.gpu.nbytes, limits.gpu.margin_nbytes) == (6 * GIB, 0)
    assert (limits.cpu.nbytes, limits.cpu.margin_nbytes) == (4 * GIB, 0)
    assert "50% of 8.0 GiB available" in limits.cpu.source
    assert "as asked" in limits.gpu.source


def test_a_small_cgroup_is_usable() -> None:
    left = TierInfo(700 * MIB, 300 * MIB, "the cgroup v1 limit of /job")
    assert resolve_budgets(cpu=left, baseline=BASELINE).cpu.nbytes == 225 * MIB


def test_no_gpu_tier() -> None:
    assert resolve_budgets(cpu=CPU, baseline=BASELINE).gpu is None
    assert resolve_budgets(0, cpu=CPU, baseline=BASELINE).gpu is None
    assert resolve_budgets("0GiB", gpu=GPU, cpu=CPU, baseline=BASELINE).gpu is None
    for asked in ("6GiB", "50%", 1):
        with pytest.raises(ConfigError, match=r"gpu_memory=.*no gpu tier"):
            resolve_budgets(asked, cpu=CPU, baseline=BASELINE)


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory='21GiB' is 21\.0 GiB, but only 20\.0 GiB"):
        resolve_budgets("21GiB", gpu=GPU, cpu=CPU, baseline=BASELINE)
    with pytest.raises(ConfigError, match=r"cpu_memory='17GiB' is 17\.0 GiB, but only 16\.0 GiB"):
        resolve_budgets(cpu_memory="17GiB", cpu=CPU, baseline=BASELINE)
    with pytest.raises(ConfigError, match="nothing is available"):
        resolve_budgets(cpu=TierInfo(GIB, 0, "x"), baseline=BASELINE)


def test_more_ram_than_is_free_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="hetero.memory"):
        limits = resolve_budgets(cpu_memory="12GiB", cpu=CPU, baseline=BASELINE)
    assert limits.cpu.nbytes == 12 * GIB
    assert "12GiB" in caplog.text and "8.0 GiB available" in caplog.text
