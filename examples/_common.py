"""What the examples share: options, progress on stderr, errors in one line, the comparison with plain torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, track
from rich.progress import Progress as Bar
from torch import Tensor, nn

import hetero
from hetero.report.progress import Progress

EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """Options of a wrapped run. `gpu_memory` and `cpu_memory` say in words what the defaults are."""

    def __init__(self, description: str | None, *, device: str, gpu_memory: str, cpu_memory: str) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        add = self.add_argument
        add("--device", default=device, metavar="NAME", help="auto, cpu, cuda, xpu or emulated (%(default)s)")
        add("--gpu-memory", metavar="SIZE", help=f"like 6GiB, 80%% or auto ({gpu_memory})")
        add("--cpu-memory", metavar="SIZE", help=f"like 6GiB, 80%% or auto ({cpu_memory})")
        add("--disk", default=".", metavar="DIR", help="folder for what fits nowhere else (the current one)")
        add("--activations", default="auto", metavar="POLICY", help="keep, cpu, disk or auto (%(default)s)")
        add("--timeline", type=Path, metavar="FILE", help="write a Chrome trace of the last passes (opens in Perfetto)")

    def parse(self) -> argparse.Namespace:
        """Parse the command line; every wrong option is one line on stderr and exit code 2."""
        options = self.parse_args()
        if options.timeline is not None and not options.timeline.absolute().parent.is_dir():
            self.error(f"--timeline {options.timeline}: its folder does not exist; create it first")
        return options

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\n")


def at_least_one(text: str) -> int:
    """The type of an option that counts something."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return number


def wrap_options(options: argparse.Namespace, budgets: Mapping[str, tuple[int | str, int | str]]) -> dict[str, Any]:
    """The options as `hetero.wrap` takes them; `budgets` are the default gpu and cpu memory of some devices."""
    gpu_memory, cpu_memory = budgets.get(options.device, ("auto", "auto"))
    return {
        "device": options.device,
        "gpu_memory": options.gpu_memory or gpu_memory,
        "cpu_memory": options.cpu_memory or cpu_memory,
        "disk": options.disk,
        "activations": options.activations,
    }


def compute_device(options: argparse.Namespace) -> torch.device:
    """Where inputs belong."""
    if options.device == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    return torch.device("cpu" if options.device == "emulated" else options.device)


def tracked(items: Iterable[T], total: int, description: str) -> Iterable[T]:
    """Draw a bar on stderr; where that is no terminal, one line at the end."""
    return track(items, description, total, console=Console(stderr=True))


@contextmanager
def moving_bar() -> Iterator[Callable[[Progress], None]]:
    """What to give to hetero.wrap as `progress`: draws a bar on stderr while weights move."""
    bar = Bar(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), console=Console(stderr=True)
    )

    def tell(progress: Progress) -> None:
        if not bar.tasks:
            bar.add_task(progress.message, total=progress.total_nbytes)
            bar.start()
        bar.update(bar.task_ids[0], completed=progress.done_nbytes)
        if progress.done_nbytes == progress.total_nbytes:
            bar.stop()
            bar.remove_task(bar.task_ids[0])

    try:
        yield tell
    finally:
        if bar.live.is_started:
            bar.stop()


def copy_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter and buffer, in RAM."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.state_dict().items()}


def check_equal(what: str, plain: Mapping[str, Tensor], wrapped: Mapping[str, Tensor]) -> None:
    """Say that two runs gave the same bits, or exit with what differs."""
    different = [name for name in plain if bytes_of(plain[name]) != bytes_of(wrapped[name])]
    if different or plain.keys() != wrapped.keys():
        more = f" and {len(different) - 3} more" if len(different) > 3 else ""
        sys.exit(f"DIFFERENT from plain torch: {', '.join(different[:3])}{more}")
    print(f"exact: {what} equal plain torch's, bit for bit")


def bytes_of(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    """What tells a tensor from any other; a NaN is equal to itself."""
    return tensor.dtype, tensor.shape, tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def run(main: Callable[[], None]) -> None:
    """Run an example; what a user can cause is one line on stderr."""
    try:
        main()
    except (hetero.ConfigError, hetero.UnsupportedError, hetero.OutOfMemoryError) as error:
        _fail(error, EXIT_USAGE)
    except (hetero.HeteroError, OSError) as error:
        _fail(error, EXIT_FAILURE)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def _fail(error: Exception, code: int) -> NoReturn:
    print(f"{Path(sys.argv[0]).name}: {' '.join(str(error).split())}", file=sys.stderr)
    sys.exit(code)
