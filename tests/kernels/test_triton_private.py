"""Triton's private parts: known forms are used, and of an unknown one nothing but the public way."""

import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_autotune.errors import CompileError
from fa_autotune.kernels import triton_private
from fa_autotune.kernels.triton_private import (
    FastPath,
    LaunchForm,
    checked_files,
    compile_kernel,
    disassembler,
    fast_path,
    install_interpreter_shim,
    keep_beside,
    kept_assembler_log,
    kept_beside,
    launch_form,
    parts_of,
    put_on_current_gpu,
)
from fa_autotune.problem.device import INTERPRETER_ARCH
from kit.launchers import (
    FIXED,
    INDEX,
    FlatLauncher,
    Launcher,
    NestedLauncher,
    Recorder,
    ScratchLauncher,
    compiled_with,
    describe,
    encoding_with,
    pretend_gpu,
    wrapped,
)

pytestmark = pytest.mark.kernel  # repeated with every supported Triton


@pytest.fixture(autouse=True)
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)


def test_compile_workers_start_without_torch() -> None:
    script = (
        "import sys, fa_autotune.kernels.compiler; print([name for name in ('torch', 'triton') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def path_of(run: Any, *arguments: Any) -> FastPath | None:
    """The way to launch a kernel with these arguments."""
    return fast_path(compiled_with(run), arguments, INDEX)


def launch(path: FastPath, *arguments: Any) -> None:
    head, values = path.head.copy(), list[Any]()
    head[path.stream_place], head[path.programs_place] = path.stream_of(INDEX), FIXED[0]
    for place, value in enumerate(arguments):
        if place in path.encoders:
            values += path.encoders[place](value)
        else:
            values.append(value.data_ptr() if isinstance(value, Tensor) else value)
    path.function(*head, *(values if path.is_flat else [values]))


class OtherOrder(FlatLauncher):
    """A launcher whose stream does not come where it is handed over."""

    def __call__(self, stream: int, x: int, y: int, z: int, *rest: Any) -> None:  # type: ignore[override]
        self.launch(x, y, z, stream, *rest)


class LongerHead(FlatLauncher):
    """A launcher that takes one thing more before a kernel's arguments."""

    def __call__(self, x: int, y: int, z: int, s: int, f: Any, a: Any, b: Any, c: Any, d: Any, e: Any, *r: Any) -> None:
        self.launch(x, y, z, s, f, a, b, c, d, e, *r)


class OneArgument(FlatLauncher):
    """A launcher that takes a kernel's arguments as one."""

    def __call__(self, x: int, y: int, z: int, stream: int, function: Any, arguments: Any) -> None:  # type: ignore[override]
        self.launch(x, y, z, stream, function, arguments)


class Asking(FlatLauncher):
    """A launcher that can't do without a keyword."""

    def __call__(self, *arguments: Any, cluster: Any) -> None:
        self.launch(*arguments, cluster)


class Merging(FlatLauncher):
    """A launcher that hands a kernel's arguments on in a form that is not known."""

    def __call__(self, x: int, y: int, z: int, stream: int, function: Any, *rest: Any) -> None:
        self.launch({"grid": (x, y, z), "stream": stream, "function": function}, rest)


class Failing(FlatLauncher):
    """A launcher that looks its stream up, which fails for what is no stream."""

    def __call__(self, x: int, y: int, z: int, stream: int, function: Any, *rest: Any) -> None:
        self.launch(x, y, z, int(stream), function, "cooperative", None, *rest)


class DriverWithoutTorch:
    """Triton 3.9's, made before torch was imported: it knows the default stream only."""

    def __init__(self) -> None:
        self.get_current_stream = self._get_current_stream

    def _get_current_stream(self, index: int) -> int:
        return 0


class TestALauncher:
    @pytest.mark.parametrize(
        ("kind", "form"),
        [
            (FlatLauncher, LaunchForm.ONE_BY_ONE),
            (NestedLauncher, LaunchForm.SEQUENCE),
            (ScratchLauncher, LaunchForm.LAUNCHER),
            (Launcher, LaunchForm.LAUNCHER),
            (Merging, LaunchForm.LAUNCHER),
            (Failing, LaunchForm.LAUNCHER),
        ],
    )
    def test_of_a_known_form_is_gone_past_as_far_as_it_is_known(self, kind: type[Launcher], form: LaunchForm) -> None:
        launched, q, out = Recorder(), torch.ones(2), torch.ones(2)
        run = kind(launched)
        path = path_of(run, q, 0.5, out, 7)
        assert path is not None
        assert (path.form, launch_form(compiled_with(run), has_descriptors=False)) == (form, form)
        assert launched == []  # nothing runs while its form is looked at
        launch(path, q, 0.5, out, 7)
        run(*FIXED, q.data_ptr(), 0.5, out.data_ptr(), 7)  # what Triton's own way hands over
        assert launched[0] == launched[1]

    @pytest.mark.parametrize("kind", [OtherOrder, LongerHead, OneArgument, Asking])
    def test_that_takes_something_else_is_not_called(self, kind: type[Launcher]) -> None:
        launched = Recorder()
        assert path_of(kind(launched), torch.ones(2), 0.5) is None
        assert launch_form(compiled_with(kind(launched)), has_descriptors=False) is LaunchForm.PUBLIC
        assert launched == []

    @pytest.mark.parametrize("missing", ["run", "function"])
    def test_is_not_looked_for_where_triton_keeps_it_elsewhere(self, missing: str) -> None:
        compiled = compiled_with(FlatLauncher(Recorder()))
        delattr(compiled, missing)
        assert fast_path(compiled, [torch.ones(2)], INDEX) is None
        assert launch_form(compiled, has_descriptors=False) is LaunchForm.PUBLIC

    @pytest.mark.parametrize("missing", ["launch_enter_hook", "launch_exit_hook"])
    def test_is_not_gone_past_where_profilers_could_not_be_served(
        self, missing: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import triton

        settings = SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None)
        delattr(settings, missing)
        monkeypatch.setattr(triton.knobs, "runtime", settings)
        run = FlatLauncher(Recorder())
        assert path_of(run, torch.ones(2)) is None
        assert launch_form(compiled_with(run), has_descriptors=False) is LaunchForm.PUBLIC

    @pytest.mark.parametrize("active", [SimpleNamespace(), DriverWithoutTorch()], ids=["hidden", "not torch's"])
    def test_is_given_the_current_stream_also_where_triton_does_not_tell_it(
        self, active: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from triton.runtime import driver

        monkeypatch.setattr(driver, "_active", active)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=100 + index))
        path = path_of(FlatLauncher(Recorder()), torch.ones(2))
        assert path is not None
        assert path.stream_of(INDEX) == 100 + INDEX


@pytest.mark.parametrize(
    ("hook", "is_seen"),
    [
        (None, False),
        (lambda metadata: None, True),
        (SimpleNamespace(calls=[]), False),
        (SimpleNamespace(calls=[1]), True),
    ],
    ids=["none", "a function", "an empty chain", "a chain"],
)
@pytest.mark.parametrize("place", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profilers_hook_is_seen(place: str, hook: Any, is_seen: bool) -> None:
    hooks = SimpleNamespace(**{"launch_enter_hook": None, "launch_exit_hook": None, place: hook})
    assert triton_private.is_hooked(hooks) is is_seen


def handed_to_wrapper(launcher: Callable[..., None], tensordesc_meta: list[Any]) -> Callable[..., None]:
    """As Triton 3.8 and 3.9 wrap it: the encoding is handed over, and takes the launch's other arguments too."""

    def make_tensordesc_arg(descriptor: Any, layout: Any, others: tuple[Any, ...]) -> list[Any]:
        return [("map of three", descriptor.base.data_ptr(), layout), *descriptor.shape, *descriptor.strides, *others]

    def inner(*arguments: Any) -> None:
        encoded = [make_tensordesc_arg(argument, tensordesc_meta[0], ()) for argument in arguments[len(FIXED) :]]
        launcher(*arguments[: len(FIXED)], *(value for values in encoded for value in values))

    return inner


class TestADescriptor:
    @pytest.mark.parametrize("wrap", [wrapped, handed_to_wrapper], ids=["of Triton 3.6 and 3.7", "since Triton 3.8"])
    def test_is_encoded_as_triton_does_it(self, wrap: Callable[..., Any]) -> None:
        launched, descriptor = Recorder(), describe(torch.ones(2, 3))
        run = Launcher(wrap(launched, ["layout"]))
        path = path_of(run, descriptor)
        assert path is not None
        assert launch_form(compiled_with(run), has_descriptors=True) is LaunchForm.LAUNCHER
        assert launched == []
        launch(path, descriptor)
        run(*FIXED, descriptor)
        assert launched[0] == launched[1]

    def test_is_encoded_by_an_address_and_numbers_as_by_its_tensor(self) -> None:
        """Of a place that was met with another tensor, which is not kept."""
        first, other = torch.ones(2, 3), torch.ones(7, 5)[:, :4]
        path = path_of(Launcher(wrapped(Recorder(), ["layout"])), describe(first))
        assert path is not None
        watched, (encoder,) = weakref.ref(first), path.encoders.values()
        assert encoder.count == 5
        expected = encoder(describe(other))
        assert [encoder.of_address(other.data_ptr(), [7, 4, 5, 1]), 7, 4, 5, 1] == expected
        assert encoder.described(other, [7, 4, 5, 1]) == describe(other)
        del first
        assert watched() is None

    @pytest.mark.parametrize(
        "inner", [None, print, lambda *arguments: None], ids=["none", "builtin", "another wrapper"]
    )
    def test_of_an_unknown_wrapper_is_left_to_triton(self, inner: Any) -> None:
        assert path_of(Launcher(inner), describe(torch.ones(2))) is None
        assert launch_form(compiled_with(Launcher(inner)), has_descriptors=True) is LaunchForm.PUBLIC

    def test_whose_data_are_of_another_number_is_left_to_triton(self) -> None:
        assert path_of(Launcher(wrapped(Recorder(), ["layout", "another"])), describe(torch.ones(2))) is None

    def test_that_is_lowered_to_a_pointer_is_left_to_triton(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kit.launchers.make_tensordesc_arg", lambda descriptor, layout: [descriptor.base])
        assert path_of(Launcher(wrapped(Recorder(), ["layout"])), describe(torch.ones(2))) is None

    @pytest.mark.parametrize("expand", [lambda shape: [*shape[:-1], 2 * shape[-1]], tuple], ids=["other", "copied"])
    def test_whose_shape_is_not_handed_on_is_encoded_by_triton(self, expand: Callable[[Any], Any]) -> None:
        encoder = triton_private.Encoder(encoding_with(expand), describe(torch.ones(2, 3)), "layout", INDEX)
        assert encoder._fill is None
        assert encoder.of_address(48, [7, 4, 5, 1]) == (48, expand([7, 4]), [5, 1])

    def test_gets_its_thread_a_context_where_there_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        given: list[int] = []

        def encode(descriptor: Any, layout: Any) -> list[Any]:
            if not given:
                raise RuntimeError("Failed to create tensor map descriptor: invalid device context")
            return ["map"]

        descriptor = describe(torch.ones(2))
        path = path_of(Launcher(wrapped(launched := Recorder(), ["layout"])), descriptor)
        assert path is not None
        path.encoders[0]._encode = encode
        monkeypatch.setattr("fa_autotune.kernels.gpu.make_context_current", given.append)
        launch(path, descriptor)
        assert (given, launched[0][9]) == ([INDEX], "map")


class TestCompiling:
    @pytest.mark.parametrize(
        ("is_gluon", "module", "name"),
        [
            (False, "triton.compiler", "ASTSource"),
            (True, "triton.experimental.gluon._runtime", "GluonASTSource"),
            (False, "triton.backends.compiler", "GPUTarget"),
        ],
    )
    def test_says_what_triton_lacks(
        self, is_gluon: bool, module: str, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("triton.compiler.ASTSource", lambda **settings: None)
        monkeypatch.delattr(f"{module}.{name}")
        kernel = SimpleNamespace(is_gluon=lambda: is_gluon, arg_names=["q"])
        with pytest.raises(CompileError, match=rf"^Triton \S+ has no {module}.{name}, .*install a release"):
            compile_kernel(kernel, signature={"q": "*bf16"}, alignment={"q": 16}, options={}, arch="sm_90")

    @pytest.mark.parametrize("missing", ["is_gluon", "arg_names"])
    def test_says_what_a_function_lacks(self, missing: str) -> None:
        kernel = SimpleNamespace(is_gluon=lambda: False, arg_names=["q"])
        delattr(kernel, missing)
        with pytest.raises(CompileError, match=f"has no {missing} of a function, "):
            compile_kernel(kernel, signature={"q": "*bf16"}, alignment={}, options={}, arch="sm_90")

    @pytest.mark.parametrize(
        ("arch", "expected"),
        [
            ("sm_80", ("cuda", 80, 32)),
            ("sm_120", ("cuda", 120, 32)),
            (INTERPRETER_ARCH, ("cuda", 90, 32)),
            ("gfx942", ("hip", "gfx942", 64)),
        ],
    )
    def test_tells_triton_which_gpu_is_meant(
        self, arch: str, expected: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("triton.compiler.ASTSource", lambda **settings: settings)
        monkeypatch.setattr("triton.compile", lambda source, *, target, options: (source, target, options))
        kernel = SimpleNamespace(is_gluon=lambda: False, arg_names=["q", "k"])
        source, target, options = compile_kernel(
            kernel, signature={"q": "*bf16", "k": "*bf16"}, alignment={"k": 16}, options={"num_warps": 4}, arch=arch
        )
        assert (target.backend, target.arch, target.warp_size) == expected
        assert source["attrs"] == {(1,): [["tt.divisibility", 16]]}
        assert options == {"num_warps": 4}


def compiled_for(backend: str, **asm: str | bytes) -> SimpleNamespace:
    target = SimpleNamespace(backend=backend, warp_size=32 if backend == "cuda" else 64)
    return SimpleNamespace(metadata=SimpleNamespace(target=target, num_warps=4, shared=1024), asm=asm, hash="0" * 64)


class TestACompiledKernel:
    def test_of_nvidia_has_a_binary(self) -> None:
        parts = parts_of(compiled_for("cuda", ttgir="ir", ptx="ptx", cubin=b"sass"))
        assert (parts.assembly, parts.binary, parts.threads, parts.is_nvidia) == ("ptx", b"sass", 128, True)

    def test_of_amd_has_assembly(self) -> None:
        parts = parts_of(compiled_for("hip", ttgir="ir", amdgcn="gcn"))
        assert (parts.assembly, parts.binary, parts.threads, parts.is_nvidia) == ("gcn", b"", 256, False)

    @pytest.mark.parametrize(("backend", "missing"), [("cuda", "ptx"), ("cuda", "cubin"), ("hip", "amdgcn")])
    def test_whose_text_is_elsewhere_is_refused_by_name(self, backend: str, missing: str) -> None:
        texts = {"ttgir": "ir", "ptx": "ptx", "cubin": b"sass", "amdgcn": "gcn"}
        del texts[missing]
        with pytest.raises(CompileError, match=f"has no {missing} of a compiled kernel"):
            parts_of(compiled_for(backend, **texts))

    def test_without_metadata_is_refused_by_name(self) -> None:
        with pytest.raises(CompileError, match="has no metadata of a compiled kernel"):
            parts_of(SimpleNamespace(asm={}))

    def test_keeps_texts_beside_itself(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FA_AUTOTUNE_CACHE", str(tmp_path))
        compiled = compiled_for("cuda")
        assert kept_beside(compiled, "log.json") is None
        keep_beside(compiled, "log.json", "[1]")
        assert kept_beside(compiled, "log.json") == "[1]"

    def test_keeps_nothing_where_triton_has_no_such_cache(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr("triton.runtime.cache.get_cache_manager")
        compiled = compiled_for("cuda")
        keep_beside(compiled, "log.json", "[1]")
        assert kept_beside(compiled, "log.json") is None


class TestCheckedFiles:
    def test_are_where_triton_keeps_kernels_meanwhile(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton import knobs
        from triton.runtime.cache import get_cache_manager

        monkeypatch.setenv("FA_AUTOTUNE_CACHE", str(tmp_path))
        with checked_files():
            path = get_cache_manager("0" * 64).put(b"binary", "kernel.cubin")
        assert Path(path).parent.parent == tmp_path / "triton"
        assert knobs.cache.manager_class is None

    def test_leave_the_way_to_keep_kernels_alone_that_a_user_chose(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton import knobs

        chosen = object()
        monkeypatch.setattr(knobs.cache, "manager_class", chosen)
        with checked_files():
            assert knobs.cache.manager_class is chosen

    def test_are_left_to_a_triton_that_has_no_such_way(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("triton.knobs.cache", SimpleNamespace())
        with checked_files():
            pass


class TestTheAssemblersLog:
    def test_is_what_is_printed_meanwhile_and_the_settings_are_put_back(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from triton import knobs

        before = knobs.nvidia.dump_ptxas_log, knobs.compilation.always_compile
        with kept_assembler_log(anew=True) as log:
            assert (knobs.nvidia.dump_ptxas_log, knobs.compilation.always_compile) == (True, True)
            print("Used 168 registers")
        assert (knobs.nvidia.dump_ptxas_log, knobs.compilation.always_compile) == before
        assert (log.getvalue(), capsys.readouterr().out) == ("Used 168 registers\n", "")

    def test_may_be_empty_where_the_kernel_may_be_cached(self) -> None:
        with kept_assembler_log() as log:
            pass
        assert log.getvalue() == ""

    def test_that_is_empty_although_it_compiled_anew_is_an_error(self) -> None:
        with pytest.raises(CompileError, match="has no log of its assembler"), kept_assembler_log(anew=True):
            pass

    @pytest.mark.parametrize(
        ("group", "knob"), [("nvidia", "dump_ptxas_log"), ("compilation", "always_compile")], ids=["log", "anew"]
    )
    def test_is_not_awaited_of_a_triton_without_the_knob(
        self, group: str, knob: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(f"triton.knobs.{group}", SimpleNamespace(scope=nullcontext))
        with pytest.raises(CompileError, match=f"has no knob {group}.{knob}"), kept_assembler_log(anew=True):
            pass


def no_disassembler() -> str:
    raise RuntimeError("Cannot find cuobjdump")


@pytest.mark.parametrize(
    "nvidia",
    [SimpleNamespace(), SimpleNamespace(cuobjdump=SimpleNamespace()), SimpleNamespace(cuobjdump=None)],
    ids=["no knob", "no path", "nothing"],
)
def test_a_disassembler_that_is_elsewhere_is_none(nvidia: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.knobs.nvidia", nvidia)
    assert disassembler() is None


def test_a_disassembler_that_triton_does_not_find_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Knob:
        path = property(lambda self: no_disassembler())

    monkeypatch.setattr("triton.knobs.nvidia", SimpleNamespace(cuobjdump=Knob()))
    assert disassembler() is None


@pytest.mark.parametrize("missing", ["TensorHandle", "InterpreterBuilder"])
def test_an_interpreter_of_another_build_is_left_alone_aloud(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(f"triton.runtime.interpreter.{missing}")
    with pytest.warns(RuntimeWarning, match="it may round bfloat16 wrongly"):
        install_interpreter_shim.__wrapped__()


@pytest.mark.parametrize("missing", ["create_dot", "cast_impl", "binary_op"])
def test_an_interpreter_with_another_builder_is_left_alone_aloud(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Builder:
        def create_dot(self) -> None: ...

        def cast_impl(self) -> None: ...

        def binary_op(self) -> None: ...

    delattr(Builder, missing)
    before = dict(vars(Builder))
    monkeypatch.setattr("triton.runtime.interpreter.InterpreterBuilder", Builder)
    with pytest.warns(RuntimeWarning, match="it may round bfloat16 wrongly"):
        install_interpreter_shim.__wrapped__()
    assert dict(vars(Builder)) == before


def test_a_kernel_that_loads_by_itself_only_is_put_on_the_gpu_at_its_first_launch() -> None:
    put_on_current_gpu(SimpleNamespace())
    asked: list[str] = []

    class Compiled:
        run = property(lambda self: asked.append("run"))

    put_on_current_gpu(Compiled())
    assert asked == ["run"]


class TestThisTriton:
    """What is known of the Triton that is installed, so that a new release that differs is noticed."""

    def launcher(self, launch: Any) -> Any:
        """A launcher of Triton's own class, as far as a launch reads it."""
        from triton.backends.nvidia import driver

        class Built(driver.CudaLauncher):  # type: ignore[misc]
            def __init__(self) -> None:
                self.launch = launch
                self.global_scratch_size = self.profile_scratch_size = 0
                self.gsan_enabled = False  # of Triton 3.9: a sanitizer, which takes more arguments

            def __getattr__(self, name: str) -> str:
                if name.startswith("__"):
                    raise AttributeError(name)
                return ""  # handed on, or an ability that is not asked for

        return Built()

    @pytest.mark.parametrize("has_descriptors", [False, True])
    def test_has_a_launcher_that_is_gone_past(self, has_descriptors: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        import triton
        from triton.backends.nvidia import driver

        monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace())  # 3.9's asks for it

        def raw(*arguments: Any) -> None: ...

        signature = {0: "tensordesc<bf16[1, 1, 64, 64]>", 1: "fp32"}
        inner = driver.wrap_handle_tensordesc(raw, signature, ["layout"]) if has_descriptors else raw
        form = launch_form(compiled_with(self.launcher(inner)), has_descriptors=has_descriptors)
        assert form in (LaunchForm.SEQUENCE, LaunchForm.ONE_BY_ONE)

    def test_encodes_descriptors_in_a_way_that_is_known(self) -> None:
        from triton.backends.nvidia import driver

        def raw(*arguments: Any) -> None: ...

        signature = {0: "tensordesc<bf16[1, 1, 64, 64]>", 1: "fp32"}
        opened = triton_private._opened(Launcher(driver.wrap_handle_tensordesc(raw, signature, ["layout"])))
        assert opened is not None
        launcher, encode, layouts = opened
        assert launcher.launch is raw
        assert driver.make_tensordesc_arg in (encode, getattr(encode, "args", [None])[0])
        assert layouts == ["layout"]

    @pytest.mark.parametrize("fails", [False, True])
    def test_fills_a_descriptor_by_one_call(self, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """With what Triton's own function would hand over; that one is asked where the call fails."""
        import triton
        from triton.backends.nvidia import driver
        from triton.tools.tensor_descriptor import TensorDescriptor

        filled: list[tuple[Any, ...]] = []

        def fill(*values: Any) -> str:
            filled.append(tuple(tuple(value) if isinstance(value, list) else value for value in values))
            if fails and len(filled) == 1:
                raise RuntimeError("no context")
            return "map"

        utils = SimpleNamespace(fill_tma_descriptor=fill, fill_tma_descriptor_tiled=fill)
        monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=utils))
        monkeypatch.setattr("fa_autotune.kernels.gpu.make_context_current", lambda index: None)
        layout = {"swizzle": 3, "elem_size": 2, "elem_type": 1, "block_size": [1, 64], "fp4_padded": False}
        tensor = torch.zeros(8, 64, dtype=torch.bfloat16)
        other = tensor.new_zeros(5, 128)[:, :64]
        run = Launcher(driver.wrap_handle_tensordesc(print, {0: "tensordesc<bf16[1, 64]>"}, [layout]))
        opened = triton_private._opened(run)
        assert opened is not None
        _, encode, _ = opened
        encoder = triton_private.Encoder(encode, TensorDescriptor.from_tensor(tensor, [1, 64]), layout, INDEX)
        assert filled == []
        assert encoder._fill is not None
        assert encoder.of_address(other.data_ptr(), [5, 64, 128, 1]) == "map"
        assert len(filled) == 1 + fails
        assert encoder(TensorDescriptor.from_tensor(other, [1, 64])) == ["map", 5, 64, 128, 1]
        assert len(set(filled)) == 1
