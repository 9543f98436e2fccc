"""hetero.wrap beside plain torch: what it costs when everything fits, and what it hides when weights stream.

    python benchmarks/wrap.py [--layers 12] [--hidden 768] [--pairs 30] [--workdir DIR] [--no-report]

Overhead: one Llama of 100M+ parameters, plain and wrapped with budgets that hold it, in turn, forward and forward with
backward. Overlap: the same training step on the emulated GPU over links of set speeds, beside the larger of its compute
and its link time. Peak memory about 3 GB.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from _report import machine_facts, markdown_table, public_command, report_path, versions, write_report
from transformers import LlamaConfig, LlamaForCausalLM

import hetero

NUM_TOKENS = 32
LINK_SHARES = (0.25, 0.5, 1.0, 2.0)
"""Link time of a step, as a share of its compute time."""
NUM_STEPS = 5
NUM_ROUNDS = 6
"""Of the overhead's pairs, in each of which the model is wrapped anew."""
NUM_TOKENS_OVERLAP = 256


def make_model(layers: int, hidden: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        vocab_size=16000,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def forward(model: Any, ids: torch.Tensor) -> None:
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)


def step(model: Any, ids: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach()


WORKS: tuple[tuple[str, Callable[[Any, torch.Tensor], object]], ...] = (
    ("forward", forward),
    ("forward and backward", step),
)


def seconds(run: Callable[[], object]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


def interval(ratios: Sequence[float], controls: Sequence[float]) -> tuple[float, float, float]:
    """Quotient of the geometric means and its 95 % interval (normal approximation on the logarithms)."""
    logs, control_logs = ([math.log(ratio) for ratio in each] for each in (ratios, controls))
    mean = statistics.fmean(logs) - statistics.fmean(control_logs)
    half = 1.96 * math.sqrt(sum(statistics.variance(each) / len(each) for each in (logs, control_logs)))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def measure_overhead(model: Any, ids: torch.Tensor, num_pairs: int) -> list[tuple[str, ...]]:
    """Wrapped beside a copy, divided by the same model not wrapped beside that copy: where a copy's memory happens to
    lie changes its time by more than anything here. The wrapped model's weights do not move."""
    other = copy.deepcopy(model)
    ratios: dict[tuple[str, bool], list[float]] = {}
    for _ in range(NUM_ROUNDS):
        for is_wrapped in (False, True):
            run = hetero.wrap(model, device="cpu") if is_wrapped else None
            for _ in range(2):  # the warm-up, and one for the caches
                assert torch.equal(step(other, ids), step(model, ids))
                forward(model, ids)
                forward(other, ids)
            assert run is None or (run.plan.num_streamed == 0 and not run.is_watching)
            for name, work in WORKS:
                pairs = ratios.setdefault((name, is_wrapped), [])
                for number in range(-(-num_pairs // NUM_ROUNDS)):
                    order = (other, model) if number % 2 else (model, other)
                    times = {id(which): seconds(lambda which=which, work=work: work(which, ids)) for which in order}
                    pairs.append(times[id(model)] / times[id(other)])
            if run is not None:
                run.close()
    rows = []
    for name, _ in WORKS:
        mean, low, high = interval(ratios[name, True], ratios[name, False])
        control = statistics.geometric_mean(ratios[name, False])
        num = str(len(ratios[name, True]))
        rows.append((name, f"{mean:.4f}", f"{low:.4f} to {high:.4f}", f"{control:.3f}", num))
        print(f"{name:22} wrapped / not wrapped {mean:.4f} ({low:.4f} to {high:.4f})", flush=True)
    return rows


def measure_overlap(model: Any, ids: torch.Tensor, num_threads: int) -> list[tuple[str, ...]]:
    """The emulated link is a thread that copies: it needs a core of its own to stand for a GPU's copy engine."""
    torch.set_num_threads(num_threads)
    weight_nbytes = sum(p.nbytes for p in model.parameters())
    plain = copy.deepcopy(model)
    step(plain, ids)
    compute_s = min(seconds(lambda: step(plain, ids)) for _ in range(3))
    gpu_memory = weight_nbytes * 2  # gradients and half of the weights, and activations
    rows = []
    for share in LINK_SHARES:
        link = int(weight_nbytes / (share * compute_s))
        with hetero.wrap(
            model, device="emulated", gpu_memory=gpu_memory, cpu_memory=weight_nbytes + (64 << 20), link=link
        ) as run:
            for _ in range(3):
                step(model, ids)
            before = run.stats().gpu_link_nbytes
            times_s = [(seconds(lambda: step(plain, ids)), seconds(lambda: step(model, ids))) for _ in range(NUM_STEPS)]
            crossed = (run.stats().gpu_link_nbytes - before) / NUM_STEPS
            planned, streamed, expected_s = run.plan.gpu_link_nbytes, run.plan.num_streamed, run.plan.time_s or 0.0
        compute_s, wall_s = (statistics.median(each) for each in zip(*times_s, strict=True))
        link_s = crossed / link
        bound_s = max(compute_s, link_s)
        rows.append(
            (
                str(num_threads),
                f"{link / 1e9:.2f}",
                str(streamed),
                f"{crossed / 1e6:.1f}",
                "yes" if crossed == planned else f"no, {planned / 1e6:.1f}",
                f"{compute_s * 1e3:.0f}",
                f"{link_s * 1e3:.0f}",
                f"{expected_s * 1e3:.0f}",
                f"{wall_s * 1e3:.0f}",
                f"{wall_s / bound_s:.3f}",
            )
        )
        print(
            f"{num_threads} threads, link {link / 1e9:.2f} GB/s: step {wall_s:.3f} s, compute {compute_s:.3f}, link "
            f"{link_s:.3f}, planned {expected_s:.3f}, {wall_s / bound_s:.3f} of the larger",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--pairs", type=int, default=30, help="interleaved pairs per figure (default: 30)")
    parser.add_argument("--workdir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--peers-python", help=argparse.SUPPRESS)  # make bench gives it to all
    parser.add_argument("--no-report", action="store_true", help="print only")
    options = parser.parse_args()
    model = make_model(options.layers, options.hidden)
    num_parameters = sum(p.numel() for p in model.parameters())
    ids = torch.randint(0, 16000, (1, NUM_TOKENS))
    overhead = measure_overhead(model, ids, options.pairs)
    num_threads, longer = torch.get_num_threads(), torch.randint(0, 16000, (1, NUM_TOKENS_OVERLAP))
    overlap = [row for n in sorted({max(1, num_threads - 1), num_threads}) for row in measure_overlap(model, longer, n)]
    overhead_table = markdown_table(
        ("work", "wrapped / not wrapped", "95 % interval", "not wrapped / its copy", "pairs"), overhead
    )
    overlap_table = markdown_table(
        (
            "compute threads",
            "link GB/s",
            "chunks streamed",
            "MB a step",
            "as planned",
            "compute ms",
            "link ms",
            "planned ms",
            "step ms",
            "step / larger",
        ),
        overlap,
    )
    print(f"\n{overhead_table}\n\n{overlap_table}")
    if options.no_report:
        return
    machine = machine_facts(options.workdir)
    facts = [*machine.rows(), *versions(("hetero", "torch", "transformers")).items()]
    path = report_path("wrap", machine)
    sections = [
        (
            "Overhead when everything fits",
            f"A Llama of {num_parameters / 1e6:.0f}M parameters, {NUM_TOKENS} tokens, fp32, beside a copy of "
            "itself that is never wrapped. Pairs run in turn, every other one backwards, in rounds in which the model "
            "is wrapped and not; geometric means, and the quotient of wrapped and not wrapped, because copies of one "
            f"model differ more than that.\n\n{overhead_table}",
        ),
        (
            "Overlap on the emulated GPU",
            f"A forward and backward of the same model, {NUM_TOKENS_OVERLAP} tokens; its gradients and part of its "
            "weights fit the gpu tier, the rest crosses the link twice a step. Plain and wrapped steps in turn; medians"
            f" of {NUM_STEPS}; compute is the plain one. A backward computes for twice as long as its forward and moves"
            " as much, so a step cannot be as short as the larger of both sums where one is the larger in the forward "
            "and the other in the backward: planned is what the plan expects. The link is a thread that copies, and "
            "takes core and memory bandwidth from compute that uses every core; a GPU has engines of its own for it, "
            f"which a core that compute leaves alone stands for.\n\n{overlap_table}",
        ),
        ("Machine and versions", markdown_table(["", ""], facts)),
        ("Command", f"`{public_command(sys.argv)}`"),
    ]
    write_report(path, "hetero.wrap beside plain torch", sections)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
