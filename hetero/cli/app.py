"""The commands of `hetero`. Each imports what it needs when it runs, so that help comes at once."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero.cli import options
from hetero.cli.options import option
from hetero.io.errors import ConfigError, HeteroError

if TYPE_CHECKING:
    from hetero.cli.progress import ProgressView
    from hetero.report.schema import StatsDict

EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
SPIN_COUNT = "4000"
"""So often a thread of torch's looks whether the others are done before it sleeps. For ever, which is the default,
takes the cores of a busy machine from those it waits for: many small operations are up to 20 times slower. This many
costs 3 % where the machine is quiet, and sleeping at once a quarter."""

app = typer.Typer(
    name="hetero",
    help="Run models that do not fit: weights stream across GPU, CPU and disk, exactly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Prompt = Annotated[str, option("--prompt", "-p", metavar="TEXT", help="What to answer; - reads it from stdin.")]
MaxTokens = Annotated[int, option("--max-tokens", "-n", min=1, help="Longest answer, in tokens.")]
Temperature = Annotated[float, option("--temp", min=0.0, help="Sampling temperature; 0 takes the likeliest token.")]
Seed = Annotated[int, option("--seed", "-s", help="The same seed gives the same text.")]
Raw = Annotated[bool, option("--raw", help="Continue the text as it is, without the model's chat template.")]
Timeline = Annotated[
    Path | None,
    option("--timeline", metavar="FILE", help="Write a Chrome trace of the run (opens in Perfetto)."),
]


def main() -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    try:
        app()
    except HeteroError as error:
        _fail(error, EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILURE)
    except OSError as error:
        # A path or a disk that the user named; bugs of ours raise other classes and keep their traceback.
        _fail(error, EXIT_FAILURE)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        from hetero import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.command()
def generate(
    model: options.ModelPath,
    prompt: Prompt,
    max_tokens: MaxTokens = 256,
    temp: Temperature = 0.0,
    seed: Seed = 0,
    raw: Raw = False,
    gpu_memory: options.GpuMemory = "auto",
    cpu_memory: options.CpuMemory = "auto",
    disk: options.Disk = None,
    device: options.Device = "auto",
    link: options.Link = None,
    dtype: options.Dtype = "auto",
    context: options.Context = 2048,
    trust_remote_code: options.TrustRemoteCode = False,
    offline: options.Offline = False,
    timeline: Timeline = None,
    as_json: options.Json = False,
    verbose: options.Verbose = False,
    log_level: options.Level = "info",
) -> None:
    """Answer one prompt: the text on stdout, progress and rates on stderr."""
    _prepare(verbose, log_level, offline)
    text = _prompt_text(prompt)
    if timeline is not None and not timeline.absolute().parent.is_dir():
        raise ConfigError(f"--timeline {timeline}: its folder does not exist; create it first")
    import hetero
    from hetero.cli import progress

    with (
        progress.ProgressView() as view,
        hetero.load(
            model,
            device=device,
            gpu_memory=gpu_memory,
            cpu_memory=cpu_memory,
            disk=disk,
            dtype=dtype,
            context=context,
            link=link,
            trust_remote_code=trust_remote_code,
            progress=view,
        ) as run,
    ):
        if timeline is not None:
            run.record_timeline()
        segments = run.stream(text, max_tokens=max_tokens, temperature=temp, seed=seed, chat=not raw)
        try:
            answer = _write_answer(segments, view, None if as_json else sys.stdout.write)
        except KeyboardInterrupt:
            if not as_json:
                _print_stats(run.stats().to_dict())
            raise
        stats = run.stats().to_dict()
        if timeline is not None:
            run.trace(timeline)
        plan_dict = run.plan.to_dict() if as_json else None
    if as_json:
        _print_json({**asdict(answer), "stats": stats, "plan": plan_dict})
    else:
        if answer.finish_reason == "length" and len(answer.tokens) < max_tokens:
            typer.echo(f"stopped: the context of {context} tokens is full; raise --context", err=True)
        _print_stats(stats)


@app.command()
def plan(
    model: options.ModelPath,
    gpu_memory: options.GpuMemory = "auto",
    cpu_memory: options.CpuMemory = "auto",
    disk: options.Disk = None,
    device: options.Device = "auto",
    link: options.Link = None,
    dtype: options.Dtype = "auto",
    context: options.Context = 2048,
    trust_remote_code: options.TrustRemoteCode = False,
    offline: options.Offline = False,
    as_json: options.Json = False,
    verbose: options.Verbose = False,
    log_level: options.Level = "info",
) -> None:
    """Show where every byte would live and how fast the model would run, without running it."""
    _prepare(verbose, log_level, offline)
    import hetero
    from hetero.cli import render

    report = hetero.plan(
        model,
        device=device,
        gpu_memory=gpu_memory,
        cpu_memory=cpu_memory,
        disk=disk,
        dtype=dtype,
        context=context,
        link=link,
        trust_remote_code=trust_remote_code,
    )
    if as_json:
        _print_json(report.to_dict())
    else:
        render.print_plan(render.output_console(), report.to_dict())


@app.command()
def doctor(
    disk: options.Disk = None,
    as_json: options.Json = False,
    verbose: options.Verbose = False,
    log_level: options.Level = "warning",
) -> None:
    """Report what this machine offers to hetero, measure its disk and memory briefly, and say what is wrong."""
    _prepare(verbose, log_level, offline=True)
    if disk is not None and not disk.is_dir():
        raise ConfigError(f"--disk {disk} is not a folder: create it first")
    from hetero.cli import render
    from hetero.cli.doctor import examine

    checks = examine(disk or Path.cwd())
    if as_json:
        _print_json({"checks": [check.to_dict() for check in checks]})
    else:
        render.print_checks(render.output_console(), checks)
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(EXIT_FAILURE)


def _prepare(verbose: bool, log_level: str, offline: bool) -> None:
    """Set up logging and the offline switch, before anything heavy is imported and could read them."""
    from hetero.cli import render
    from hetero.native import report_missing_once

    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    render.install_logging("debug" if verbose else log_level)
    report_missing_once()


def _prompt_text(prompt: str) -> str:
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise ConfigError("--prompt is empty: give a text, or - and the text on stdin")
    return text


@dataclass(slots=True)
class _Answer:
    """What `--json` says of the text itself."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None


def _write_answer(segments: Iterable[Any], view: ProgressView, write: Callable[[str], Any] | None) -> _Answer:
    """Consume the segments, writing each as it comes."""
    answer = _Answer()
    try:
        for segment in segments:
            view.stop()  # before any text: on a terminal the bar would be drawn over it
            answer.text += segment.text
            answer.tokens.append(segment.token)
            answer.finish_reason = segment.finish_reason
            if write is not None:
                write(segment.text)
                sys.stdout.flush()
    finally:
        if write is not None and answer.text:
            write("\n")
            sys.stdout.flush()
    return answer


def _print_stats(stats: StatsDict) -> None:
    from hetero.cli import render

    render.error_console().print(render.stats_line(stats), style="dim", highlight=False, soft_wrap=True)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False, default=str))


def _fail(error: Exception, exit_code: int) -> None:
    if "--verbose" in sys.argv or "-v" in sys.argv:
        import traceback

        traceback.print_exception(error)
    message = options.as_flags(" ".join(str(error).split())) or type(error).__name__
    typer.echo(f"hetero: {type(error).__name__}: {message}", err=True)
    sys.exit(exit_code)
