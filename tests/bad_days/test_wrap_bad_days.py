"""What is wrong with a model, an option or a disk: one clear error before anything is touched, and nothing lost."""

from __future__ import annotations

import errno
import gc
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetero
import hetero.wrapping
from hetero.io.backends.base import Block
from hetero.io.backends.faulty import Fault
from hetero.io.errors import ConfigError, HeteroError, IOEngineError, OutOfMemoryError, UnsupportedError
from hetero.memory.activations import Policy
from hetero.memory.homes import Homes
from hetero.memory.weights import Place, WeightChunk
from hetero.planning import TooSmallError
from hetero.wrapped import _live
from tests.bad_days.rig import DEVICES, Disk
from tests.bad_days.wrap_rig import LAYER_NBYTES, Net, num_hooks, same, step, tight, untouched, wrap, x

CHILD = Path(__file__).with_name("wrap_child.py")


@pytest.fixture(autouse=True)
def every_run_is_closed(no_leaks: None, no_memory_left: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(hetero.wrapping, "trim_heap", lambda: None)
    yield
    left = list(_live)
    for run in left:
        run.close()
    assert not left and num_hooks() == 0


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(hetero.wrapping, "Engine", disk.make_engine)
    return disk


@pytest.fixture(scope="module")
def expected() -> list[list[Tensor]]:
    """What the plain model does for each of a few batches."""
    model = Net()
    return [step(model, seed) for seed in range(4)]


# -- models ------------------------------------------------------------------------------------------------------------


def scripted_inside() -> nn.Module:
    return nn.Sequential(Net(), torch.jit.script(nn.Linear(64, 64)))


def traced() -> Any:
    return torch.jit.trace(Net(), x())  # type: ignore[no-untyped-call]


def lazy_buffer() -> nn.Module:
    return nn.Sequential(Net(), nn.LazyBatchNorm1d(affine=False))


MODELS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "nothing": (lambda: None, ConfigError, r"torch\.nn\.Module, got NoneType.*hetero\.load"),
    "a path": (lambda: "model.safetensors", ConfigError, r"torch\.nn\.Module, got str.*hetero\.load"),
    "a class": (lambda: Net, ConfigError, r"torch\.nn\.Module, got type"),
    "a state dict": (lambda: Net().state_dict(), ConfigError, r"torch\.nn\.Module, got OrderedDict"),
    "on meta": (lambda: Net().to("meta"), ConfigError, r"layers\.0\.weight is on meta.*load weights first"),
    "partly on meta": (
        lambda: nn.Sequential(Net(), nn.Linear(64, 64, device="meta")), ConfigError, r"1\.weight is on meta",
    ),
    "scripted": (lambda: torch.jit.script(nn.Linear(64, 64)), UnsupportedError, r"scripted module.*before torch\.jit"),
    "traced": (traced, UnsupportedError, r"scripted module.*before torch\.jit"),
    "scripted inside": (scripted_inside, UnsupportedError, r"^1 is a scripted module"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(64)), UnsupportedError, r"0\.weight is not initialised.*one batch"),
    "lazy buffer": (lazy_buffer, UnsupportedError, r"1\.running_mean is not initialised"),
    "data parallel": (lambda: nn.DataParallel(Net()), UnsupportedError, r"DataParallel: wrap the module inside"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_be_wrapped_is_refused_untouched(tmp_path: Path, name: str) -> None:
    build, kind, message = MODELS[name]
    model = build()
    with untouched(model, tmp_path), pytest.raises(kind, match=message) as caught:
        wrap(model, tmp_path)
    assert isinstance(caught.value, HeteroError) and "\n" not in str(caught.value)


def test_a_sharded_parameter_is_refused_untouched(tmp_path: Path) -> None:
    from torch import distributed
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = Net()
        mesh = DeviceMesh("cpu", [0, 1])
        sharded = distribute_tensor(model.get_parameter("layers.2.weight").detach(), mesh, [Replicate()])
        model.get_submodule("layers.2").weight = nn.Parameter(sharded)
        names = [name for name, _ in model.named_parameters()]
        with pytest.raises(UnsupportedError, match=r"layers\.2\.weight is a DTensor.*plain tensors"):
            wrap(model, tmp_path)
        assert [name for name, _ in model.named_parameters()] == names
        assert list(tmp_path.iterdir()) == []
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("what", ["the model", "a part of it", "a model around it"])
def test_a_model_that_is_wrapped_already_is_refused_until_its_run_is_closed(tmp_path: Path, what: str) -> None:
    model = Net()
    again = {"the model": model, "a part of it": model.layers[2], "a model around it": nn.Sequential(model)}[what]
    run = wrap(model, tmp_path)
    with untouched(again, tmp_path), pytest.raises(ConfigError, match="is wrapped already: close that run first"):
        wrap(again, tmp_path)
    run.close()
    with wrap(again, tmp_path):
        again(x())


class Subclass(torch.Tensor):
    pass


class WithOdd(nn.Module):
    """A net beside a parameter of a kind that stays where it is."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net = Net()
        torch.manual_seed(1)
        data = torch.randn(64, 64)
        if kind == "sparse":
            data = (data * (data > 1)).to_sparse()
        elif kind == "subclass":
            data = data.as_subclass(Subclass)
        elif kind == "complex":
            data = torch.complex(data, -data)
        elif kind == "shared memory":
            data.share_memory_()  # type: ignore[no-untyped-call]
        self.odd = nn.Parameter(data)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        if self.odd.layout is torch.sparse_coo:
            y = torch.sparse.mm(self.odd, y.t()).t()
        else:
            y = (y @ (self.odd.abs() if self.odd.is_complex() else self.odd)).as_subclass(Tensor)
        return y


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["sparse", "subclass", "complex", "shared memory"])
def test_an_odd_parameter_trains_beside_weights_that_stream(tmp_path: Path, device: str, kind: str) -> None:
    def found(model: nn.Module) -> list[Tensor]:
        return [each.to_dense() if each.layout is torch.sparse_coo else each for each in step(model)]

    reference = found(WithOdd(kind))
    model = WithOdd(kind)
    budgets = tight(device)
    first = "gpu_memory" if device == "emulated" else "cpu_memory"
    budgets |= {first: budgets[first] + 8 * LAYER_NBYTES, "cpu_memory": budgets["cpu_memory"] + 8 * LAYER_NBYTES}
    budgets[first] -= 4 * LAYER_NBYTES
    address = model.odd.data_ptr() if kind != "sparse" else 0
    with wrap(model, tmp_path, **budgets) as run:
        for _ in range(3):
            assert same(found(model), reference)
        assert type(model.odd.data) is (Subclass if kind == "subclass" else Tensor)
        assert run.plan.num_streamed > 0 and run.stats().executor["num_leases"] > 0
    assert kind in ("sparse", "complex") or model.odd.data_ptr() == address


# -- options -----------------------------------------------------------------------------------------------------------

EMULATED = {"device": "emulated", "gpu_memory": "1MiB"}
OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no unit": ({"cpu_memory": "6G"}, r"cpu_memory='6G'.*6GiB"),
    "words": ({"cpu_memory": "lots"}, r"cpu_memory='lots' is not a size; write it like"),
    "zero": ({"cpu_memory": 0}, r"cpu_memory=0 comes to 0 bytes"),
    "negative": ({"cpu_memory": -1}, r"cpu_memory=-1 comes to -1 bytes"),
    "fraction": ({"cpu_memory": 1.5e9}, r"cpu_memory=1500000000\.0 is a float"),
    "truth": ({"cpu_memory": True}, r"cpu_memory=True is a bool"),
    "no cpu memory": ({"cpu_memory": None}, r"cpu_memory=None is a NoneType"),
    "too many percent": ({"cpu_memory": "120%"}, r"cpu_memory='120%' is more than 100%"),
    "more than exists": ({"cpu_memory": "500TiB"}, r"cpu_memory='500TiB' is 500\.0 TiB, but only .* can be had"),
    "a gpu's memory without a gpu": ({"gpu_memory": "1GiB"}, r"gpu_memory='1GiB'.*no gpu tier.*drop the option"),
    "no unit for the gpu": (EMULATED | {"gpu_memory": "1M"}, r"gpu_memory='1M'.*1MiB"),
    "no gpu memory": (EMULATED | {"gpu_memory": 0}, r"gpu_memory=0 comes to 0 bytes"),
    "how large a gpu": ({"device": "emulated"}, r"needs to know how large it is: set gpu_memory"),
    "unknown device": ({"device": "tpu"}, r"device='tpu' is not known; choose"),
    "device as object": ({"device": torch.device("cpu")}, r"device=device\(type='cpu'\) is a device.*choose"),
    "no device": ({"device": None}, r"device=None is a NoneType.*choose"),
    "unknown policy": ({"activations": "ram"}, r"activations='ram' is not known; choose \"keep\""),
    "no policy": ({"activations": None}, r"activations=None is not known; choose \"keep\""),
    "policy as list": ({"activations": ["cpu"]}, r"activations=\['cpu'\] is not known"),
    "activations to no disk": ({"activations": "disk", "disk": None}, r"activations='disk' needs.*disk="),
    "a link without a gpu": ({"link": "1GiB"}, r"link speed can only be set with device=\"emulated\""),
    "no link": (EMULATED | {"link": 0}, r"link=0 comes to 0 bytes"),
    "a link in words": (EMULATED | {"link": "fast"}, r"link='fast' is not a size"),
    "progress in words": ({"progress": "bar"}, r"progress='bar' is a str.*function"),
    "a folder that is a number": ({"disk": 5}, r"disk=5 is a int, not a folder"),
    "a folder in bytes": ({"disk": b"/tmp"}, r"disk=b'/tmp' is a bytes, not a folder"),
    "no folder": ({"disk": ""}, r"disk='' is not a folder: create it first"),
    "a null byte": ({"disk": "a\0b"}, r"disk=.*is not a folder"),
    "disk memory without a disk": ({"disk_memory": "1GiB", "disk": None}, r"disk_memory='1GiB'.*set disk="),
    "disk memory in words": ({"disk_memory": "much"}, r"disk_memory='much' is not a size"),
    "a share of the disk": ({"disk_memory": "50%"}, r"disk_memory='50%' needs to know.*name a size"),
    "too little disk memory": ({"disk_memory": "8KiB"}, r"disk_memory='8KiB' is 8192 bytes, but the weights.*98304"),
    "more than the disk has": ({"disk_memory": "900TiB"}, r"needs \d+ bytes.*free.*smaller disk budget"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_cannot_work_is_refused_untouched(tmp_path: Path, name: str) -> None:
    options, message = OPTIONS[name]
    model = Net()
    defaults: dict[str, Any] = {"device": "cpu", "disk": tmp_path}
    with untouched(model, tmp_path), pytest.raises(ConfigError, match=message) as caught:
        hetero.wrap(model, **(defaults | options))
    assert "\n" not in str(caught.value)


def test_an_unknown_option_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="gpu_mem"):
        hetero.wrap(Net(), gpu_mem="1GiB")


def test_a_folder_that_is_missing_or_is_a_file_is_refused_untouched(tmp_path: Path) -> None:
    model = Net()
    missing, file = tmp_path / "missing", tmp_path / "file"
    file.touch()
    for folder in (missing, file, file / "below"):
        with (
            untouched(model, tmp_path),
            pytest.raises(ConfigError, match=r"disk='.*' is not a folder: create it first"),
        ):
            wrap(model, folder)


def test_a_folder_that_cannot_be_written_to_is_refused_untouched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net()

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with untouched(model, tmp_path), monkeypatch.context() as patch:
        patch.setattr("hetero.io.scratch_folder.os.mkdir", refuse)
        with pytest.raises(ConfigError, match="cannot hold scratch files: Permission denied"):
            wrap(model, tmp_path)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm here")
def test_a_folder_in_memory_is_refused_untouched() -> None:
    model = Net()
    with untouched(model, Path("/dev/shm")), pytest.raises(ConfigError, match="tmpfs, which is memory, not disk"):
        wrap(model, Path("/dev/shm"))


def test_space_that_is_gone_when_it_is_taken_is_refused_untouched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    model = Net()
    monkeypatch.setattr("hetero.io.scratch.os.posix_fallocate", full)
    with untouched(model, tmp_path), pytest.raises(ConfigError, match=r"smaller disk budget.*No space left"):
        wrap(model, tmp_path)


def test_a_file_that_cannot_be_mapped_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOMEM, "cannot map")

    model = Net()
    monkeypatch.setattr("hetero.memory.homes.MappedFile", fail)
    with untouched(model, tmp_path), pytest.raises(OSError, match="cannot map"):
        wrap(model, tmp_path)


@pytest.mark.parametrize("device", DEVICES)
def test_budgets_that_are_too_small_are_refused_untouched_with_those_that_work(
    tmp_path: Path, device: str, expected: list[list[Tensor]]
) -> None:
    model = Net()
    tiny = {"cpu_memory": 4096} | ({"gpu_memory": 4096} if device == "emulated" else {})
    with untouched(model, tmp_path), pytest.raises(TooSmallError, match="smallest that works") as caught:
        wrap(model, tmp_path, device, **tiny)
    needs = {f"{tier}_memory": nbytes for tier, nbytes in caught.value.needs.items()}
    for name, nbytes in needs.items():
        assert f"{name} is 4096 bytes, it needs {nbytes}" in str(caught.value)
    with wrap(model, tmp_path, device, **needs) as run, torch.no_grad():
        assert torch.equal(model(x()), expected[0][0])
        assert run.plan.num_streamed > 0 and run.stats().num_unleased == 0


def test_without_a_disk_the_remedy_names_one(tmp_path: Path) -> None:
    model = Net()
    with untouched(model, tmp_path), pytest.raises(TooSmallError, match='with disk="FOLDER"'):
        hetero.wrap(model, device="cpu", cpu_memory="2100KiB")


def test_a_progress_function_that_raises_leaves_a_whole_model(tmp_path: Path, expected: list[list[Tensor]]) -> None:
    def fail(progress: Any) -> None:
        raise RuntimeError("the user's")

    model = Net()
    with pytest.raises(RuntimeError, match="the user's"):
        wrap(model, tmp_path, **tight("cpu", training=False), progress=fail)
    check_plain(model, tmp_path, expected)
    run = wrap(model, tmp_path, progress=fail)
    step(model)
    with pytest.raises(RuntimeError, match="the user's"):
        run.close()
    check_plain(model, tmp_path, expected)


# -- faults ------------------------------------------------------------------------------------------------------------


def check_plain(model: nn.Module, folder: Path, expected: list[list[Tensor]]) -> None:
    """The model is as it was before any wrap, but for its addresses."""
    assert list(folder.iterdir()) == [] and num_hooks() == 0
    assert f"{folder}/" not in Path("/proc/self/maps").read_text()
    assert all(not module._forward_pre_hooks and not module._forward_hooks for module in model.modules())
    assert same(step(model), expected[0])


class FailAt:
    """Lets blocks pass until the `number`-th of a kind, and fails it and, if told, all later ones."""

    def __init__(self, number: int, *, write: bool | None, error: int = errno.EIO, for_good: bool = False) -> None:
        self.number, self.write, self.error, self.for_good = number, write, error, for_good
        self.num_seen = 0

    def __call__(self, block: Block) -> Fault | None:
        if self.write not in (None, block.write):
            return None
        self.num_seen += 1
        fails = self.num_seen >= self.number if self.for_good else self.num_seen == self.number
        return Fault(error=self.error) if fails else None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
def test_a_disk_that_fails_while_weights_are_written_to_it_leaves_a_whole_model(
    tmp_path: Path, disk: Disk, expected: list[list[Tensor]], device: str, error: int, for_good: bool
) -> None:
    model = Net()
    for number in range(1, 40):
        fault = FailAt(number, write=True, error=error, for_good=for_good)
        disk.fault = fault
        try:
            wrap(model, tmp_path, **tight(device, training=False)).close()
        except IOEngineError as caught:
            assert caught.errno == error
        else:
            break
        disk.fault = None
        check_plain(model, tmp_path, expected)
    assert number > 2 and fault.num_seen < number
    check_plain(model, tmp_path, expected)


def place_of_error(model: nn.Module) -> str | None:
    """Where an iteration meets an EIO, if it does."""
    place = "forward"
    try:
        output = model(x(1))
        place = "backward"
        output.square().mean().backward()
    except IOEngineError as caught:
        assert caught.errno == errno.EIO
        return place
    return None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activations", ["auto", "disk"])
def test_a_read_that_fails_reaches_the_caller_and_the_next_pass_works(
    tmp_path: Path,
    disk: Disk,
    monkeypatch: pytest.MonkeyPatch,
    expected: list[list[Tensor]],
    device: str,
    activations: str,
) -> None:
    monkeypatch.setattr("hetero.memory.activations.LARGE_NBYTES", 4096)
    monkeypatch.setattr("hetero.memory.activations.WINDOW_NBYTES", 16 << 10)
    model = Net()
    where = set()
    budgets = tight(device, with_activations=activations == "auto")
    with wrap(model, tmp_path, **budgets, activations=activations) as run:
        for seed in range(3):
            assert same(step(model, seed), expected[seed])
        num_streamed, number = run.plan.num_streamed, 0
        assert num_streamed > 2 and run.plan.disk_nbytes > 0
        while number < 100:
            number += 1
            disk.fault = fault = FailAt(number, write=False)
            where.add(place_of_error(model))
            disk.fault = None
            if fault.num_seen < number:
                break
            gc.collect()  # what the failed pass has saved dies with its error
            seed = number % 4
            assert same(step(model, seed), expected[seed]), number
            assert same([p.detach() for p in model.parameters()], list(Net().parameters())), number
        assert where == {"forward", "backward", None} and number > num_streamed
        assert run.plan.num_streamed == num_streamed and run.plan.state == "planned"
    check_plain(model, tmp_path, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_disk_that_fails_while_a_plan_is_carried_out_is_survived(
    tmp_path: Path, disk: Disk, expected: list[list[Tensor]], device: str
) -> None:
    num_errors = 0
    for number in range(1, 30):
        model = Net()
        with wrap(model, tmp_path, device) as run:
            assert same(step(model), expected[0])
            disk.fault = fault = FailAt(number, write=None)
            try:
                assert same(step(model, 1), expected[1])
            except IOEngineError:
                num_errors += 1
            disk.fault = None
            for seed in (2, 3, 0):
                assert same(step(model, seed), expected[seed]), number
            assert run.plan.state == "planned" and run.plan.num_streamed > 0, number
            before = run.stats().executor["num_leases"]
            step(model)
            assert run.stats().executor["num_leases"] - before >= run.plan.num_streamed, number
        check_plain(model, tmp_path, expected)
        if fault.num_seen < number:
            break
    assert num_errors > 4


@pytest.mark.parametrize("device", DEVICES)
def test_a_disk_that_fails_at_the_end_loses_no_weight(
    tmp_path: Path, disk: Disk, expected: list[list[Tensor]], device: str
) -> None:
    model = Net()
    run = wrap(model, tmp_path, device)
    step(model)
    disk.fault = FailAt(2, write=False, for_good=True)
    with pytest.raises(IOEngineError):
        run.close()
    run.close()
    disk.fault = None
    assert list(tmp_path.iterdir()) == [] and num_hooks() == 0
    for seed in range(4):
        assert same(step(model, seed), expected[seed])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("comes_back", [True, False], ids=["late", "never"])
def test_a_disk_that_does_not_answer_is_an_error_and_no_hang(
    tmp_path: Path, disk: Disk, expected: list[list[Tensor]], device: str, comes_back: bool
) -> None:
    disk.timeout_s = 0.3
    model = Net()
    run = wrap(model, tmp_path, device)
    for seed in range(3):
        step(model, seed)
    assert run.plan.disk_nbytes > 0
    output = model(x(1))
    disk.fault = lambda block: None if block.write else Fault(stuck=True)
    with pytest.raises(IOEngineError, match="the disk does not answer") as caught:
        output.square().mean().backward()
    assert caught.value.errno == errno.ETIMEDOUT
    for _ in range(2):
        with pytest.raises(IOEngineError, match="the disk does not answer"):
            step(model)
    del output, caught
    if comes_back:
        disk.fault = None
        for backend in disk.backends:
            backend.release_stuck()
        for seed in range(4):
            assert same(step(model, seed), expected[seed])
        run.close()
    else:
        with pytest.raises(IOEngineError, match="the disk does not answer"):
            run.close()
        for backend in disk.backends:
            backend.release_stuck()
    assert list(tmp_path.iterdir()) == []
    for seed in range(4):
        assert same(step(model, seed), expected[seed])


@pytest.mark.parametrize("device", DEVICES)
def test_a_second_backward_after_one_that_failed_uses_the_weights_of_then(
    tmp_path: Path, disk: Disk, device: str
) -> None:
    # numpy writes, which no version counter tells of, between a backward that a disk made fail and its repetition.
    model, plain = Net(), Net()
    with wrap(model, tmp_path, device) as run:
        for seed in range(3):
            step(model, seed)
        for number in range(1, 8):
            outputs = [each(x()) for each in (model, plain)]
            disk.fault = FailAt(number, write=False)
            has_failed = False
            try:
                outputs[0].square().mean().backward(retain_graph=True)
            except IOEngineError:
                has_failed = True
            disk.fault = None
            if not has_failed:
                break
            for each in (model, plain):
                each.zero_grad()
                for name, parameter in each.named_parameters():
                    if name.endswith("weight"):
                        parameter.detach().numpy()[...] *= 0.5
            for output in outputs:
                output.square().mean().backward()
            for name, parameter in plain.named_parameters():
                assert torch.equal(model.get_parameter(name).grad, parameter.grad), (number, name)  # type: ignore[arg-type]
        assert number > 2 and run.plan.num_streamed > 0


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_close_in_the_middle_of_a_pass_is_refused_on_any_thread(
    tmp_path: Path, device: str, expected: list[list[Tensor]]
) -> None:
    model = Net()
    errors: list[BaseException] = []

    def close(*_: Any) -> None:
        try:
            run.close()
        except HeteroError as error:
            errors.append(error)

    def close_elsewhere(*_: Any) -> None:
        thread = threading.Thread(target=close)
        thread.start()
        thread.join()

    run = wrap(model, tmp_path, device)
    handles = [
        model.layers[2].register_forward_hook(close),
        model.layers[3].register_forward_hook(close_elsewhere),
        model.get_parameter("layers.1.bias").register_hook(close),  # type: ignore[no-untyped-call]
    ]
    for seed in range(3):
        assert same(step(model, seed), expected[seed])
    assert ["in the middle of a pass: close the run after it" in str(error) for error in errors] == [True] * 9
    for handle in handles:
        handle.remove()
    run.close()
    run.close()
    check_plain(model, tmp_path, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_exception_inside_the_block_closes_the_run_and_goes_on(
    tmp_path: Path, device: str, kind: type[BaseException], expected: list[list[Tensor]]
) -> None:
    def fail(*_: Any) -> None:
        raise kind("the user's")

    model = Net()
    for is_inside_forward in (False, True):
        with pytest.raises(kind, match="the user's"), wrap(model, tmp_path, device):
            step(model)
            if is_inside_forward:
                handle = model.layers[3].register_forward_pre_hook(fail)
                step(model)
            fail()
        if is_inside_forward:
            handle.remove()
        check_plain(model, tmp_path, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_default_device_of_torch_is_nobodys_business(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, expected: list[list[Tensor]]
) -> None:
    monkeypatch.setattr("hetero.memory.activations.LARGE_NBYTES", 4096)
    monkeypatch.setattr("hetero.memory.activations.WINDOW_NBYTES", 16 << 10)
    model, inputs = Net(), [x(seed) for seed in range(4)]
    with torch.device("meta"):
        run = wrap(model, tmp_path, device, activations="disk")
        for given, (output, *_) in zip(inputs, expected, strict=True):
            model.zero_grad()
            found = model(given)
            assert torch.equal(found, output)
            found.square().mean().backward()
        assert run.plan.state == "planned" and run.stats().activations_back_nbytes > 0
        run.close()
    check_plain(model, tmp_path, expected)


def test_a_closed_run_still_tells_its_figures(tmp_path: Path) -> None:
    model = Net()
    with wrap(model, tmp_path) as run:
        for seed in range(2):
            step(model, seed)
    assert run.stats().passes["backward"] == 2 and "chunks stream" in str(run.plan) and "layers.3" in run.explain()
    run.trace(tmp_path / "trace.json")
    assert (tmp_path / "trace.json").stat().st_size > 100


def test_a_run_that_nobody_holds_goes_on_and_can_still_be_ended(tmp_path: Path, expected: list[list[Tensor]]) -> None:
    model = Net()
    wrap(model, tmp_path)
    for seed in range(3):
        assert same(step(model, seed), expected[seed])
    with pytest.raises(ConfigError, match="wrapped already"):
        wrap(model, tmp_path)
    _live[0].close()
    check_plain(model, tmp_path, expected)


# -- processes ---------------------------------------------------------------------------------------------------------


def start(mode: str, folder: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(hetero.__file__).parents[1])}
    command = [sys.executable, str(CHILD), mode, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def wait_until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    assert line == "ready\n", f"{line!r} {process.stderr.read()}"


def rest_of(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What it still writes until it ends. Not `communicate`, which knows nothing of what `readline` has read ahead."""
    assert process.stdout is not None and process.stderr is not None
    return process.stdout.read(), process.stderr.read()


def test_what_killed_processes_left_is_removed_by_the_next_wrap(tmp_path: Path, expected: list[list[Tensor]]) -> None:
    processes = [start(mode, tmp_path) for mode in ("killed", "killed emulated")]
    for process in processes:
        with process:
            wait_until_ready(process)
            process.kill()
        assert process.returncode == -signal.SIGKILL
    left = sorted(tmp_path.iterdir())
    assert len(left) == 2 and all((folder / "scratch.bin").exists() for folder in left)
    model = Net()
    with wrap(model, tmp_path):
        assert len(list(tmp_path.iterdir())) == 1 and not set(tmp_path.iterdir()) & set(left)
        assert same(step(model), expected[0])
    check_plain(model, tmp_path, expected)


def test_processes_and_runs_share_one_disk_folder(tmp_path: Path, expected: list[list[Tensor]]) -> None:
    with start("answer", tmp_path) as first, start("answer emulated", tmp_path) as second:
        models = [Net(), Net()]
        with wrap(models[0], tmp_path), wrap(models[1], tmp_path, "emulated"):
            wait_until_ready(first)
            wait_until_ready(second)
            for seed in range(4):
                for model in models:
                    assert same(step(model, seed), expected[seed])
            answers = [rest_of(process) for process in (first, second)]
    assert [stderr for _, stderr in answers] == ["", ""]
    assert answers[0][0] == answers[1][0] and len(answers[0][0]) == 65
    check_plain(models[0], tmp_path, expected)


def test_processes_that_end_without_closing_leave_nothing_and_say_nothing(tmp_path: Path) -> None:
    processes = {mode: start(mode, tmp_path) for mode in ("fork emulated", "in a forward")}
    for mode, process in processes.items():
        with process:
            wait_until_ready(process)
            assert rest_of(process) == ("", ""), mode
        assert process.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_training_that_does_not_fit_is_an_error_with_a_remedy_and_the_model_goes_on(
    tmp_path: Path, expected: list[list[Tensor]]
) -> None:
    model = Net()
    with wrap(model, tmp_path, cpu_memory=(2 << 20) + 2 * LAYER_NBYTES) as run:
        for _ in range(2):
            with pytest.raises(OutOfMemoryError, match=r"'gradients' asks for.*Raise cpu_memory by at least"):
                step(model)
        with torch.no_grad():
            for seed in range(4):
                assert torch.equal(model(x(seed)), expected[seed][0])
        assert run.plan.num_streamed > 0
    check_plain(model, tmp_path, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_the_least_for_training_that_an_error_names_trains(
    tmp_path: Path, device: str, expected: list[list[Tensor]]
) -> None:
    """Once what autograd saves has room as well, which no error can know before a forward."""

    def budgets_in(text: str) -> dict[str, int]:
        return {name: int(nbytes) for name, nbytes in re.findall(r"(\w+_memory)=(\d+)", text)}

    tiny = {"cpu_memory": 4096} | ({"gpu_memory": 4096} if device == "emulated" else {})
    with pytest.raises(TooSmallError) as refused:
        wrap(Net(), tmp_path, device, **tiny)
    forward, training = str(refused.value).split(", to train it ")
    needs = budgets_in(training)
    first = "gpu_memory" if device == "emulated" else "cpu_memory"
    gradients_nbytes = needs[first] - budgets_in(forward.split("smallest that works")[1])[first]
    assert gradients_nbytes == sum(p.nbytes for p in Net().parameters())
    with wrap(Net(), tmp_path, device, **(needs | {first: needs[first] - 1})) as run:
        with pytest.raises(OutOfMemoryError, match="'gradients' asks for") as full:
            step(run.model)
        assert budgets_in(str(full.value)) == needs
    with wrap(Net(), tmp_path, device, **(needs | {first: needs[first] + 6 * x().nbytes})) as run:
        assert all(torch.equal(a, b) for a, b in zip(step(run.model), expected[0], strict=True))
        assert run.plan.num_streamed > 0


@pytest.mark.parametrize("policy", ["auto", "keep"])
@pytest.mark.parametrize("has_disk", [True, False], ids=["disk", "no disk"])
def test_saved_activations_that_do_not_fit_are_an_error_with_the_ways_out(
    tmp_path: Path, policy: Policy, has_disk: bool
) -> None:
    model = Net()
    fixed = sum(p.nbytes for p in model.parameters()) + (2 << 20)
    budget = {"cpu_memory": fixed + sum(p.nbytes for p in model.parameters()) + (4 << 10)}
    disk = tmp_path if has_disk else None
    with hetero.wrap(model, device="cpu", disk=disk, activations=policy, **budget) as run:
        big = torch.randn(1 << 14, x().shape[1])
        with pytest.raises(OutOfMemoryError, match="'activations' asks for") as full:
            model(big)
        assert run.stats().tiers["cpu"].peak_nbytes <= budget["cpu_memory"]
    message = str(full.value)
    assert ('disk="FOLDER", where weights' in message) is not has_disk
    assert ('activations="auto"' in message) is (policy == "keep")
    assert "use a smaller batch." in message and "outside the model" not in message


def test_a_plan_that_fails_half_way_to_keeping_the_largest_weight_leaves_a_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for it is that of the ring it passed through, which then cannot be had again at that size."""

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)), nn.Linear(64, 2048))

    expected = make()(x())
    model = make()
    largest, small = 64 * 2048 * 4, 64 * 64 * 4
    move, moved = Homes.move, list[str]()

    def fail_after_the_largest(homes: Homes, chunk: WeightChunk, place: Place, **more: Any) -> None:
        if moved:
            raise OSError(errno.EIO, "the disk is gone")
        move(homes, chunk, place, **more)
        if chunk.nbytes == largest and place is Place.FIRST:
            moved.append(chunk.name)

    budget = (2 << 20) + (12 << 10) + largest + 3 * small
    with hetero.wrap(model, device="cpu", cpu_memory=budget, disk=tmp_path) as run, torch.no_grad():
        assert torch.equal(model(x()), expected)
        with monkeypatch.context() as patch:
            patch.setattr(Homes, "move", fail_after_the_largest)
            with pytest.raises(OSError, match="the disk is gone"):
                model(x())
        assert moved
        for _ in range(3):
            assert torch.equal(model(x()), expected)
        assert run.stats().tiers["cpu"].peak_nbytes <= budget and run.plan.num_streamed > 0
