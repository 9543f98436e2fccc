"""The command line options that several commands share, each with its environment twin `HETERO_<FLAG>`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

DeviceName = Literal["auto", "cpu", "cuda", "xpu", "emulated"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
LogLevel = Literal["debug", "info", "warning", "error"]


def option(*names: str, help: str, **extra: Any) -> Any:  # noqa: A002 - typer's own word for it
    """Declare an option whose environment twin is named after its long flag and shown in the help."""
    flag = next(name for name in names if name.startswith("--"))
    twin = "HETERO_" + flag.removeprefix("--").upper().replace("-", "_")
    return typer.Option(*names, help=help, envvar=twin, show_envvar=True, **extra)


_ASSIGNED = re.compile(
    r"""\b(gpu_memory|cpu_memory|disk|device|link|dtype|context|max_tokens|temperature|trust_remote_code)"""
    r"""=(?:"([^"]*)"|'([^']*)'|([^\s,;:()]+))"""
)
_NAMED = re.compile(r"\b(gpu_memory|cpu_memory|max_tokens|trust_remote_code)\b")


def as_flags(message: str) -> str:
    """Spell the options in a message as they are typed here: cpu_memory="6G" becomes --cpu-memory 6G."""

    def assigned(match: re.Match[str]) -> str:
        value = next(group for group in match.groups()[1:] if group is not None)
        if match[1] == "trust_remote_code":
            return _flag(match[1])
        return f"{_flag(match[1])} {value or repr(value)}"

    return _NAMED.sub(lambda match: _flag(match[1]), _ASSIGNED.sub(assigned, message))


def _flag(name: str) -> str:
    return "--temp" if name == "temperature" else "--" + name.replace("_", "-")


_MEMORY, _MODEL, _OUTPUT = "Memory", "Model", "Output"

ModelPath = Annotated[str, typer.Argument(help="A checkpoint folder, a .gguf or .safetensors file, or a hub id.")]
GpuMemory = Annotated[
    str,
    option(
        "--gpu-memory",
        help="Hard limit on accelerator memory: 6GiB, 80% or auto.",
        rich_help_panel=_MEMORY,
    ),
]
CpuMemory = Annotated[
    str,
    option("--cpu-memory", help="Hard limit on RAM: 6GiB, 80% or auto.", rich_help_panel=_MEMORY),
]
Disk = Annotated[
    Path | None,
    option(
        "--disk", metavar="DIR", help="Folder for data that changes; answering writes none.", rich_help_panel=_MEMORY
    ),
]
Device = Annotated[
    DeviceName,
    option("--device", help="Where the first tier is; emulated is a GPU made of RAM.", rich_help_panel=_MEMORY),
]
Link = Annotated[
    str | None,
    option(
        "--link",
        metavar="RATE",
        help="Bandwidth to the emulated device, 12GB/s for example.",
        rich_help_panel=_MEMORY,
    ),
]
Dtype = Annotated[
    DtypeName,
    option("--dtype", help="Type to compute in; auto takes the checkpoint's.", rich_help_panel=_MODEL),
]
Context = Annotated[
    int,
    option("--context", "-c", min=1, help="Tokens to make room for, prompt included.", rich_help_panel=_MODEL),
]
# Without an environment twin on purpose: running a stranger's code is decided anew each time.
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run Python code that the checkpoint brings.", rich_help_panel=_MODEL),
]
Offline = Annotated[
    bool,
    option("--offline", help="Use only files already on this machine.", rich_help_panel=_MODEL),
]
Json = Annotated[
    bool,
    option("--json", help="Print one JSON object on stdout instead.", rich_help_panel=_OUTPUT),
]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Same as --log-level debug.", rich_help_panel=_OUTPUT),
]
Level = Annotated[
    LogLevel,
    option("--log-level", help="What to log on stderr.", rich_help_panel=_OUTPUT),
]
