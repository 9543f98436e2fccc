"""What every benchmark report says beside its figures (machine, versions, command), and how it is written."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

REPORTS = Path(__file__).resolve().parent / "reports"


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """A machine in public words: no host name, no path. Sizes in bytes."""

    cpu: str
    num_cpus: int
    ram_nbytes: int
    kernel: str
    filesystem: str

    def rows(self) -> list[tuple[str, str]]:
        return [
            ("CPU", f"{self.cpu}, {self.num_cpus} usable"),
            ("RAM", f"{self.ram_nbytes / 2**30:.1f} GiB"),
            ("kernel", self.kernel),
            ("file system of the data", self.filesystem),
        ]

    @property
    def words(self) -> str:
        """For file names, like "amd-epyc_2cpu_24gib"."""
        return f"{slug(self.cpu)}_{self.num_cpus}cpu_{round(self.ram_nbytes / 2**30)}gib"


def machine_facts(data: Path) -> MachineFacts:
    """Describe this machine; `data` is an existing file or folder on the disk that is measured. Linux only."""
    cpuinfo = dict(
        (key.strip(), value.strip())
        for key, _, value in (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
        if value
    )
    cpu = cpuinfo.get("model name") or platform.processor() or platform.machine()
    identity = [cpuinfo[key] for key in ("cpu family", "model") if key in cpuinfo]
    if len(identity) == 2 and not any(character.isdigit() for character in cpu):
        cpu += f" (family {identity[0]} model {identity[1]})"  # virtual machines hide the name
    return MachineFacts(
        cpu=cpu,
        num_cpus=len(os.sched_getaffinity(0)),
        ram_nbytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=f"Linux {platform.release().partition('-')[0]} {platform.machine()}",
        filesystem=_filesystem(data),
    )


def _filesystem(data: Path) -> str:
    device = os.stat(data).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == number:
            kind, source = after.split()[:2]
            name = os.path.basename(source)
            return f"{kind} on {name}" if source.startswith("/dev/") else kind
    return "unknown"


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The installed ones of `packages`, by name."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def public_command(argv: Sequence[str]) -> str:
    """The command as it may be published: every absolute path becomes <path>."""
    words = ["python", f"benchmarks/{Path(argv[0]).name}"]
    for word in argv[1:]:
        option, equals, value = word.partition("=")
        words.append(f"{option}=<path>" if equals and os.path.isabs(value) else word)
    return " ".join(
        "<path>" if os.path.isabs(word) else shlex.quote(word).replace("'<path>'", "<path>") for word in words
    )


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are text; a bar in one is escaped. The first column is left-aligned, the others right."""
    lines = [list(headers), ["---", *("---:" for _ in headers[1:])], *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def details(summary: str, body: str) -> str:
    """A block that a reader opens on demand; `body` is shown as it is."""
    return f"<details><summary>{summary}</summary>\n\n```\n{body}\n```\n\n</details>"


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\(r\)|\(tm\)|\(.*?\)|@.*|\bcpu\b", " ", text.lower())).strip("-")


def report_path(theme: str, machine: MachineFacts, *, folder: Path = REPORTS) -> Path:
    """Where today's report on this theme from this machine goes; another one of the same day is replaced."""
    return folder / f"{theme}_{machine.words}_{date.today():%Y-%m-%d}.md"


def write_report(path: Path, title: str, sections: Iterable[tuple[str, str]]) -> None:
    """Write a report: a title, then (heading, markdown) sections. The folder is made when it is not there."""
    blocks = [f"# {title}", f"Measured on {date.today():%Y-%m-%d}."]
    for heading, body in sections:
        blocks += [f"## {heading}", body.strip()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(blocks) + "\n", encoding="utf-8")
