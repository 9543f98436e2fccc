"""What has to be true on a GPU: copies at full rate, hidden behind compute, exact results, bytes as planned, the
training zoo of the tests bit for bit.

    python benchmarks/gpu_suite.py [--device cuda|xpu|emulated] [--tiny] [--workdir DIR] [--no-report]

Under ten minutes on a GPU; needs 3 GB of disk in --workdir, and as much GPU memory for the reference. With `--device
emulated --tiny` the same code runs without a GPU in seconds: exactness and bytes are then checked as well, rates are
only printed. Exits with 1 when a check fails.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from _models import LlamaShape, weight_nbytes, write_checkpoint
from _report import machine_facts, markdown_table, public_command, report_path, versions, write_report

import hetero
from hetero.memory.device import Device, open_device
from hetero.memory.residency import alias
from hetero.planning import TooSmallError

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
LARGE = LlamaShape(layers=9, vocab=16000)  # 0.98 GB
SMALL = LlamaShape(hidden=128, layers=4, intermediate=256, vocab=320, heads=4, kv_heads=2)
FAMILIES = ("llama", "qwen3", "gemma2", "gpt2", "mixtral")
EMULATED: dict[str, Any] = {"capacity_nbytes": 64 * MIB, "bandwidth_bytes_per_s": 2e9}
CONTEXT = 128
PROMPT, STEPS = 13, 8
LEAST_OF_PLAIN, LEAST_OF_BOUND, MOST_OF_LONGER = 0.9, 0.8, 1.15
ZOO_SHARES = (0.6, None)
"""Of the weights that the gpu tier holds; None: the least that works."""


@dataclass(slots=True)
class Suite:
    """The device under test and what was found. A `rate` check fails on a GPU only."""

    device_name: str
    tiny: bool
    rows: list[tuple[str, str, str, str]] = field(default_factory=list)
    has_failed: bool = False

    def check(self, what: str, found: str, goal: str, is_met: bool, *, rate: bool = False) -> None:
        is_failure = not is_met and not (rate and self.is_emulated)
        self.has_failed |= is_failure
        verdict = "FAILED" if is_failure else "met" if is_met else "not met (not a GPU)"
        self.rows.append((what, found, goal, verdict))
        print(f"{what:48} {found:34} {goal:24} {verdict}", flush=True)

    @property
    def is_emulated(self) -> bool:
        return self.device_name == "emulated"

    def open(self) -> Device:
        return open_device(self.device_name, **(EMULATED if self.is_emulated else {}))


# -- copies ------------------------------------------------------------------------------------------------------------


def check_copies(suite: Suite, device: Device) -> float:
    """Our copies beside torch's own between pinned memory and the device; returns our rate to the device."""
    nbytes = (4 if suite.tiny else 256) * MIB
    num_copies, num_rounds = (2, 3) if suite.tiny else (8, 5)
    gpu, host = device.allocate(nbytes, name="suite"), device.allocate_host(nbytes, name="suite")
    plain_host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=not suite.is_emulated)
    plain_gpu = torch.empty(nbytes, dtype=torch.uint8, device=device.torch_device)
    to_device_bytes_per_s = 0.0
    try:
        for to_device in (True, False):
            ends = (gpu.address, host.address) if to_device else (host.address, gpu.address)
            dst, src = (plain_gpu, plain_host) if to_device else (plain_host, plain_gpu)

            def ours(ends: tuple[int, int] = ends, to_device: bool = to_device) -> None:
                for _ in range(num_copies):
                    event = device.copy(*ends, nbytes, to_device=to_device)
                event.synchronize()

            def plain(dst: torch.Tensor = dst, src: torch.Tensor = src) -> None:
                for _ in range(num_copies):
                    dst.copy_(src, non_blocking=True)
                device.synchronize()

            ours_s, plain_s = interleaved((ours, plain), num_rounds)
            rates = [num_copies * nbytes / seconds for seconds in (ours_s, plain_s)]
            to_device_bytes_per_s = to_device_bytes_per_s or rates[0]
            suite.check(
                f"copies {'to' if to_device else 'from'} the device",
                f"{rates[0] / 1e9:.2f} GB/s, plain pinned {rates[1] / 1e9:.2f}",
                f">= {LEAST_OF_PLAIN} of plain",
                rates[0] >= LEAST_OF_PLAIN * rates[1],
                rate=True,
            )
    finally:
        host.close()
        gpu.close()
    return to_device_bytes_per_s


def check_overlap(suite: Suite, device: Device) -> None:
    """Copies beside a loop of matrix products: together they take little more than the longer of the two."""
    nbytes, num_copies = (4 * MIB, 4) if suite.tiny else (64 * MIB, 32)
    size = 256 if suite.tiny else 4096
    factor = torch.randn(size, size, device=device.torch_device)
    gpu, host = device.allocate(nbytes, name="suite"), device.allocate_host(nbytes, name="suite")

    def copies() -> None:
        for _ in range(num_copies):
            device.copy(gpu.address, host.address, nbytes, to_device=True)

    def compute(num: int) -> None:
        for _ in range(num):
            factor @ factor

    def timed(*parts: Callable[[], None]) -> float:
        def run() -> None:
            for part in parts:
                part()
            device.synchronize()

        return interleaved((run,), 3)[0]

    try:
        copies_s = timed(copies)
        num_products = max(1, round(8 * copies_s / timed(lambda: compute(8))))
        compute_s = timed(lambda: compute(num_products))
        both_s = timed(copies, lambda: compute(num_products))
    finally:
        host.close()
        gpu.close()
    longer_s = max(copies_s, compute_s)
    suite.check(
        "copies beside compute",
        f"{both_s * 1e3:.1f} ms; alone {copies_s * 1e3:.1f}, {compute_s * 1e3:.1f}",
        f"<= {MOST_OF_LONGER} of the longer",
        both_s <= MOST_OF_LONGER * longer_s,
        rate=True,
    )


def interleaved(contenders: tuple[Callable[[], None], ...], num_rounds: int) -> list[float]:
    """Median seconds of each, after one round that does not count."""
    times: list[list[float]] = [[] for _ in contenders]
    for number in range(num_rounds + 1):
        for run, of_run in zip(contenders, times, strict=True):
            start_s = time.perf_counter()
            run()
            if number:
                of_run.append(time.perf_counter() - start_s)
    return [statistics.median(of_run) for of_run in times]


# -- memory ------------------------------------------------------------------------------------------------------------


def check_alias(suite: Suite, device: Device) -> None:
    """A view keeps an alias alive, the last one's death is told, and the bytes are the arena's."""
    gpu, host = device.allocate(MIB, name="suite"), device.allocate_host(MIB, name="suite")
    deaths: deque[str] = deque()
    try:
        ctypes.memset(host.address, 7, MIB)
        device.copy(gpu.address, host.address, MIB, to_device=True).synchronize()
        tensor = alias(gpu.address, MIB, device.torch_device, lambda: deaths.append("dead"))
        view = tensor[1000:].view(-1).detach()
        del tensor
        is_alive = not deaths and bool((view == 7).all())
        del view
        num_deaths = len(deaths)
    finally:
        device.synchronize()
        host.close()
        gpu.close()
    is_met = is_alive and num_deaths == 1
    suite.check("an alias dies with its last view", f"alive {is_alive}, deaths {num_deaths}", "alive, then 1", is_met)


# -- models ------------------------------------------------------------------------------------------------------------


def decode(model: Any, torch_device: torch.device, vocab: int) -> list[torch.Tensor]:
    """Logits, on the CPU, of a prompt and of greedy steps after it."""
    from transformers import DynamicCache

    torch.manual_seed(1)
    ids = torch.randint(3, vocab, (1, PROMPT)).to(torch_device)
    cache = DynamicCache(config=model.config)
    logits = []
    with torch.no_grad():
        for _ in range(STEPS + 1):
            out = model(input_ids=ids, cache=cache, use_cache=True).logits
            logits.append(out.cpu())
            ids = out[:, -1:].argmax(-1)
    return logits


def reference(folder: Path, torch_device: torch.device, vocab: int) -> list[torch.Tensor]:
    """What transformers computes with the whole model on the device."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    model.to(torch_device).eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return decode(model, torch_device, vocab)


@cache
def smallest(folder: Path, device_name: str) -> dict[str, int]:
    try:
        hetero.plan(folder, device=device_name, gpu_memory=4096, cpu_memory=4096, context=CONTEXT)
    except TooSmallError as error:
        return error.needs
    raise AssertionError("a model in a page of memory")


def budgets(folder: Path, suite: Suite) -> dict[str, int]:
    """A quarter of the weights on the gpu, or the smallest that works and a quarter; RAM for all of them."""
    needs, weights = smallest(folder, suite.device_name), weight_nbytes(folder)
    gpu = weights // 4 if weights // 4 >= needs["gpu"] else needs["gpu"] + weights // 4
    return {"gpu_memory": gpu, "cpu_memory": needs["cpu"] + 2 * weights}


def check_exact(suite: Suite, folder: Path, name: str, vocab: int) -> None:
    """Logits and greedy tokens of a streamed model against transformers with all of it on the device."""
    torch_device = torch.device("cpu") if suite.is_emulated else torch.device(suite.device_name)
    expected = reference(folder, torch_device, vocab)
    with hetero.load(folder, device=suite.device_name, context=CONTEXT, **budgets(folder, suite)) as run:
        if hasattr(run.model, "set_experts_implementation"):
            run.model.set_experts_implementation("eager")
        logits = decode(run.model, run.device.torch_device, vocab)
        num_streamed, num_demands = len(run.decision.plan.schedule), run.executor.stats.num_demands
    furthest = max(float((ours - theirs).abs().max()) for ours, theirs in zip(logits, expected, strict=True))
    same_text = all(
        torch.equal(a[:, -1].argmax(-1), b[:, -1].argmax(-1)) for a, b in zip(logits, expected, strict=True)
    )
    is_equal = all(torch.equal(ours, theirs) for ours, theirs in zip(logits, expected, strict=True))
    found = f"differ by {furthest:g}, text {'same' if same_text else 'differs'}, {num_streamed} streamed"
    suite.check(
        f"{name}: logits and greedy text", found, "equal, streamed", is_equal and same_text and num_streamed > 0
    )
    suite.check(f"{name}: chunks fetched out of turn", str(num_demands), "0", num_demands == 0)


def check_larger(suite: Suite, folder: Path, vocab: int, to_device_bytes_per_s: float) -> None:
    """A model four times its gpu budget: bytes per token as planned, time near what the link allows."""
    from transformers import DynamicCache

    num_tokens = 4 if suite.tiny else 32
    link = {"link": "200MB/s"} if suite.is_emulated else {}
    rate = 200e6 if suite.is_emulated else to_device_bytes_per_s
    with hetero.load(folder, device=suite.device_name, context=CONTEXT, **budgets(folder, suite), **link) as run:
        model: Any = run.model
        cache = DynamicCache(config=model.config)
        token = torch.tensor([[5]], device=run.device.torch_device)
        stats = run.executor.stats
        times_s, copied = [], []
        with torch.inference_mode():
            for _ in range(num_tokens + 4):
                before, start_s = stats.copied_nbytes, time.perf_counter()
                token = model(input_ids=token, cache=cache, use_cache=True).logits[:, -1:].argmax(-1)
                int(token)  # waits for the compute
                times_s.append(time.perf_counter() - start_s)
                copied.append(stats.copied_nbytes - before)
        plan = run.decision.plan
    expected = plan.prediction.gpu_link_nbytes
    ahead = plan.gpu_ring_nbytes
    counted = sum(copied[4:])
    suite.check(
        "larger than the gpu: bytes copied per token",
        f"{counted / num_tokens / MIB:.2f} MiB",
        f"{expected / MIB:.2f} MiB, as planned",
        expected > 0 and abs(counted - num_tokens * expected) <= ahead,
    )
    pass_s = statistics.median(times_s[4:])
    bound_s = expected / rate
    suite.check(
        "larger than the gpu: time per token",
        f"{pass_s * 1e3:.2f} ms, the link needs {bound_s * 1e3:.2f}",
        f">= {LEAST_OF_BOUND} of the bound",
        bound_s >= LEAST_OF_BOUND * pass_s or plan.prediction.bottleneck != "gpu link",
        rate=True,
    )


def check_models(suite: Suite, workdir: Path, to_device_bytes_per_s: float) -> None:
    from tests.tiny_models import VOCAB
    from tests.tiny_models import write_checkpoint as write_tiny

    with tempfile.TemporaryDirectory() as folder:
        for family in FAMILIES[:1] if suite.tiny else FAMILIES:
            check_exact(suite, write_tiny(Path(folder) / family, family), family, VOCAB)
    shape, name = (SMALL, "small") if suite.tiny else (LARGE, "large")
    large = workdir / f"gpu-suite-{name}"
    if not large.exists():
        write_checkpoint(large, shape, seed=0)
    check_exact(suite, large, f"{name} llama", shape.vocab)
    check_larger(suite, large, shape.vocab, to_device_bytes_per_s)


# -- training ----------------------------------------------------------------------------------------------------------


def check_zoo(suite: Suite) -> None:
    """Five optimizer steps of each model of the zoo, plain and wrapped on the same device: every bit of every output,
    gradient and weight."""
    from tests.exact.on_gpu import NOT_ON_A_GPU, PLAIN_ON_CPU
    from tests.exact.test_wrap_zoo import CASES
    from tests.exact.wrap_rig import Budget, Reference, check_training

    where = None if suite.is_emulated else torch.device(suite.device_name)
    names = [name for name in CASES if where is None or name not in NOT_ON_A_GPU]
    failures = []
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for name in names[:3] if suite.tiny else names:
            for share in ZOO_SHARES:
                try:
                    reference = Reference(CASES[name], where, plain_on_cpu=name in PLAIN_ON_CPU)
                    with tempfile.TemporaryDirectory() as folder:
                        check_training(reference, Budget(suite.device_name, share, share is None), Path(folder))
                except Exception as error:
                    (message, *_) = str(error).splitlines() or ["no message"]
                    failures.append(f"{name} ({share}): {type(error).__name__}: {message}")
    finally:
        torch.use_deterministic_algorithms(False)
    for failure in failures:
        print(f"  zoo: {failure}", flush=True)
    num = (3 if suite.tiny else len(names)) * len(ZOO_SHARES)
    suite.check("the training zoo", f"{num - len(failures)} of {num} equal plain", "all", not failures)


def check_step(suite: Suite, to_device_bytes_per_s: float) -> None:
    """Forward and backward through frozen weights that stream, beside the larger of compute and link time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, hidden, num_tokens = (4, 256, 64) if suite.tiny else (16, 2048, 2048)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        vocab_size=512,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    model: Any = LlamaForCausalLM(config).to(torch.bfloat16).requires_grad_(False)
    torch_device = torch.device("cpu") if suite.is_emulated else torch.device(suite.device_name)
    x = torch.randn(1, num_tokens, hidden, dtype=torch.bfloat16, device=torch_device, requires_grad=True)
    device = suite.open()

    def step() -> None:
        model(inputs_embeds=x, use_cache=False).logits.float().square().mean().backward()
        device.synchronize()

    weight_nbytes = sum(p.nbytes for p in model.parameters())
    link = 400e6 if suite.is_emulated else to_device_bytes_per_s
    try:
        model.to(torch_device)
        compute_s = interleaved((step,), 5)[0]
        model.to("cpu")
        options: dict[str, Any] = {"device": suite.device_name, "cpu_memory": 2 * weight_nbytes + 64 * MIB}
        options |= {"link": int(link)} if suite.is_emulated else {}
        with hetero.wrap(model, gpu_memory=4 * weight_nbytes + (1 << 30), **options) as run:
            for _ in range(3):
                step()
            others_nbytes = run.stats().tiers["gpu"].peak_nbytes - weight_nbytes
        with hetero.wrap(model, gpu_memory=weight_nbytes // 2 + others_nbytes, **options) as run:
            for _ in range(3):
                step()
            before = run.stats()
            step_s = interleaved((step,), 5)[0]
            link_nbytes = (run.stats().gpu_link_nbytes - before.gpu_link_nbytes) / 6
            planned_nbytes = run.plan.gpu_link_nbytes
    finally:
        device.close()
    suite.check(
        "a step: bytes to the device",
        f"{link_nbytes / MIB:.2f} MiB",
        f"{planned_nbytes / MIB:.2f} MiB, as planned",
        link_nbytes == planned_nbytes,
    )
    bound_s = max(compute_s, link_nbytes / link)
    suite.check(
        "a step: compute and link together",
        f"{step_s * 1e3:.1f} ms; compute {compute_s * 1e3:.1f}, link {link_nbytes / link * 1e3:.1f}",
        f"<= {MOST_OF_LONGER} of the longer",
        step_s <= MOST_OF_LONGER * bound_s,
        rate=True,
    )


def main() -> None:
    sys.path.insert(0, str(ROOT))  # for the tests' models: a script's path has its own folder only
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto (default), cuda, cuda:1, xpu or emulated")
    parser.add_argument("--tiny", action="store_true", help="seconds instead of minutes")
    parser.add_argument("--workdir", type=Path, default=ROOT / "build" / "bench", help="where the model is kept")
    parser.add_argument("--no-report", action="store_true", help="print only")
    options = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # products that do not depend on the stream
    found = torch.accelerator.current_accelerator(check_available=True)
    if options.device == "auto" and found is None:
        print("gpu_suite: no CUDA or XPU device here; --device emulated --tiny runs its logic without one")
        return
    name = found.type if options.device == "auto" and found is not None else options.device
    suite = Suite(name, options.tiny)
    device = suite.open()
    try:
        to_device_bytes_per_s = check_copies(suite, device)
        check_overlap(suite, device)
        check_alias(suite, device)
    finally:
        device.close()
    options.workdir.mkdir(parents=True, exist_ok=True)
    check_models(suite, options.workdir, to_device_bytes_per_s)
    check_zoo(suite)
    check_step(suite, to_device_bytes_per_s)
    if not options.no_report:
        report(suite, options.workdir)
    if suite.has_failed:
        sys.exit(1)


def report(suite: Suite, workdir: Path) -> None:
    machine = machine_facts(workdir)
    gpu = "emulated" if suite.is_emulated else torch.get_device_module(suite.device_name).get_device_name()
    facts = [("GPU", gpu), *machine.rows(), *versions(("hetero", "torch", "transformers")).items()]
    path = report_path(f"gpu-suite-{suite.device_name.replace(':', '')}", machine)
    sections = [
        ("Result", markdown_table(("what", "found", "goal", "verdict"), suite.rows)),
        ("Machine and versions", markdown_table(["", ""], facts)),
        ("Command", f"`{public_command(sys.argv)}`"),
    ]
    write_report(path, "The GPU suite", sections)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
