"""The compiler: every GPU that is supported, gates that fire on kernels made to fail them, and a pool that survives."""

import re
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path

import pytest

from fa_autotune.errors import MachineError, WorkerError
from fa_autotune.kernels.compiler import CompilePool, CompileResult, available_cpus, compile_environ, resource_report
from fa_autotune.kernels.gates import CompiledText, CompileRequest, wgmma_serialized
from fa_autotune.kernels.modules import ModuleFile, write_module
from fa_autotune.kernels.render import render
from fa_autotune.problem.device import INTERPRETER_ARCH
from fa_autotune.problem.family import Access, AttentionFamily, DType
from fa_autotune.problem.passes import Pass
from fa_autotune.records import TrialStatus
from fa_autotune.space.candidate import Candidate, CompileForm, Variant
from fa_autotune.space.config import PortableFwdConfig, TmaFwdConfig
from fa_autotune.space.registry import variant_spec
from kit.combinations import rest
from kit.compile_candidates import PATIENCE_S

pytestmark = pytest.mark.kernel

H100_SMEM_BYTES = 227 * 1024
Build = Callable[..., CompileRequest]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module")
def build(folder: Path) -> Build:
    """Write a causal forward kernel and give the request that compiles it."""

    def build(
        arch: str = "sm_90",
        variant: Variant = Variant.PORTABLE,
        *,
        dtype: DType = DType.BFLOAT16,
        head_dim: int = 64,
        access: Access = Access.TMA,
        tile: tuple[int, int] = (64, 64),
        num_warps: int = 4,
        num_stages: int = 2,
    ) -> CompileRequest:
        family = AttentionFamily(dtype=dtype, head_dim=head_dim, head_dim_v=head_dim, bounded_right=True, access=access)
        config_type = TmaFwdConfig if variant is Variant.TMA else PortableFwdConfig
        config = config_type(BLOCK_M=tile[0], BLOCK_N=tile[1], num_warps=num_warps, num_stages=num_stages)
        source = render(Candidate(family=family, variant=variant, config=config))
        form = CompileForm.GENERAL if access is Access.ANY else CompileForm.ALIGNED
        return request_for(write_module(source, folder), arch=arch, form=form, variant=variant)

    return build


def backward(kernel_pass: Pass, *, access: Access = Access.TMA, head_dim: int = 32, num_warps: int = 2) -> Candidate:
    """A small full backward kernel through pointers."""
    family = AttentionFamily(
        kernel_pass=kernel_pass,
        dtype=DType.BFLOAT16,
        head_dim=head_dim,
        head_dim_v=head_dim,
        bounded_right=False,
        access=access,
    )
    spec = variant_spec(kernel_pass, Variant.PORTABLE)
    tile = {} if kernel_pass is Pass.BWD_DELTA else {"BLOCK_N": 32, "num_stages": 1}
    config = spec.config(BLOCK_M=32, num_warps=num_warps, **tile)
    return Candidate(family=family, variant=Variant.PORTABLE, config=config)


def request_for(
    file: ModuleFile,
    *,
    arch: str = "sm_90",
    form: CompileForm = CompileForm.ALIGNED,
    variant: Variant = Variant.PORTABLE,
    smem_limit_bytes: int = H100_SMEM_BYTES,
) -> CompileRequest:
    return CompileRequest(module=file, arch=arch, form=form, variant=variant, smem_limit_bytes=smem_limit_bytes)


def request_for_source(folder: Path, name: str, source: str) -> CompileRequest:
    return request_for(ModuleFile(folder / f"{name}.py", source))


def compiled_text(
    *, assembly: str = "", log: str = "", tensor_memory_columns: int = 0, is_nvidia: bool = True, binary: bytes = b""
) -> CompiledText:
    return CompiledText(
        ttgir="",
        assembly=assembly,
        log=log,
        threads=128,
        smem_bytes=0,
        tensor_memory_columns=tensor_memory_columns,
        is_nvidia=is_nvidia,
        binary=binary,
    )


def compiled(pool: CompilePool, request: CompileRequest) -> CompileResult:
    return pool.submit(request).result(timeout=PATIENCE_S)


class TestEveryArch:
    @pytest.mark.parametrize(
        "arch", ["sm_90", INTERPRETER_ARCH, *rest(["sm_80", "sm_86", "sm_89", "sm_100", "sm_120"])]
    )
    def test_of_nvidia_passes_all_gates_with_a_usual_config(
        self, arch: str, compile_pool: CompilePool, build: Build
    ) -> None:
        result = compiled(compile_pool, build(arch))
        assert (result.status, result.error) == (TrialStatus.OK, None)

    @pytest.mark.parametrize("arch", ["sm_90", *rest(["sm_100", "sm_120"])])
    def test_with_descriptors_passes_all_gates(self, arch: str, compile_pool: CompilePool, build: Build) -> None:
        result = compiled(compile_pool, build(arch, Variant.TMA))
        assert (result.status, result.error) == (TrialStatus.OK, None)

    @pytest.mark.parametrize("arch", ["gfx942", *rest(["gfx950"])])
    def test_of_amd_passes_all_gates_with_a_usual_config(
        self, arch: str, compile_pool: CompilePool, build: Build
    ) -> None:
        result = compiled(compile_pool, build(arch))
        assert (result.status, result.error) == (TrialStatus.OK, None)

    def test_down_to_turing_passes_all_gates_with_a_small_config(self, compile_pool: CompilePool, build: Build) -> None:
        result = compiled(compile_pool, build("sm_75", dtype=DType.FLOAT16, tile=(32, 32)))
        assert (result.status, result.error) == (TrialStatus.OK, None)

    @pytest.mark.parametrize("arch", ["sm_90", "gfx942", *rest(["sm_100"])])
    def test_tells_its_registers(self, arch: str, compile_pool: CompilePool, build: Build) -> None:
        resources = compiled(compile_pool, build(arch)).resources
        assert resources is not None
        assert resources.registers is not None
        assert 32 <= resources.registers <= 512

    def test_tells_its_shared_memory(self, compile_pool: CompilePool, build: Build) -> None:
        resources = compiled(compile_pool, build("sm_90")).resources
        assert resources is not None
        assert resources.smem_bytes >= 2 * 64 * 64 * 2  # one tile each of K and V

    def test_with_a_tile_of_few_bytes_for_each_thread_passes(self, compile_pool: CompilePool, build: Build) -> None:
        result = compiled(compile_pool, build("sm_90", head_dim=16, tile=(64, 16)))
        assert (result.status, result.error) == (TrialStatus.OK, None)


class TestGates:
    def test_a_tile_too_large_for_the_registers_is_stopped_for_its_spills(
        self, compile_pool: CompilePool, build: Build
    ) -> None:
        result = compiled(compile_pool, build(head_dim=128, tile=(128, 128)))
        assert (result.status, result.gate) == (TrialStatus.OVER_RESOURCES, "spills")

    def test_what_a_stopped_kernel_needed_is_still_reported(self, compile_pool: CompilePool, build: Build) -> None:
        resources = compiled(compile_pool, build(head_dim=128, tile=(128, 128))).resources
        assert resources is not None
        assert resources.spill_bytes > 500

    def test_the_assemblers_warning_is_reported(self, compile_pool: CompilePool, build: Build) -> None:
        resources = compiled(compile_pool, build(head_dim=128, tile=(128, 128))).resources
        assert resources is not None
        assert any("(C7511)" in warning for warning in resources.warnings)

    def test_serialized_wgmma_is_stopped(self, compile_pool: CompilePool, build: Build) -> None:
        request = build(head_dim=128, tile=(128, 128))
        resources = compiled(compile_pool, request).resources
        assert resources is not None
        text = compiled_text(log="\n".join(resources.warnings))
        assert wgmma_serialized(request, text, resources) == "the assembler serialized wgmma (C7511)"

    def test_more_shared_memory_than_the_device_has_is_stopped(self, compile_pool: CompilePool, build: Build) -> None:
        result = compiled(compile_pool, replace(build("sm_90"), smem_limit_bytes=16 * 1024))
        assert (result.status, result.gate) == (TrialStatus.OVER_RESOURCES, "shared_memory")

    @pytest.mark.parametrize(("arch", "tile", "num_warps"), [("sm_90", (32, 32), 2), ("sm_100", (64, 64), 8)])
    def test_warps_that_share_a_row_of_scores_are_stopped(
        self, arch: str, tile: tuple[int, int], num_warps: int, compile_pool: CompilePool, build: Build
    ) -> None:
        result = compiled(compile_pool, build(arch, tile=tile, num_warps=num_warps))
        assert (result.status, result.gate) == (TrialStatus.OVER_RESOURCES, "score_layout")

    @pytest.mark.parametrize("num_stages", [1, 2])
    def test_narrow_loads_of_an_aligned_form_are_stopped(
        self, num_stages: int, compile_pool: CompilePool, build: Build
    ) -> None:
        general = build(access=Access.ANY, head_dim=32, tile=(64, 32), num_stages=num_stages)
        result = compiled(compile_pool, replace(general, form=CompileForm.ALIGNED))
        assert (result.gate, result.error) == ("vector_access", "reads global memory in units of 2 bytes, not 16")

    def test_narrow_loads_of_the_general_form_pass(self, compile_pool: CompilePool, build: Build) -> None:
        result = compiled(compile_pool, build(access=Access.ANY, head_dim=32, tile=(64, 32)))
        assert (result.status, result.error) == (TrialStatus.OK, None)

    def test_a_tma_kernel_without_descriptor_loads_is_stopped(self, compile_pool: CompilePool, build: Build) -> None:
        result = compiled(compile_pool, replace(build("sm_90"), variant=Variant.TMA))
        assert (result.status, result.gate) == (TrialStatus.OVER_RESOURCES, "vector_access")

    def test_a_backward_may_read_its_rows_statistics_value_by_value(
        self, compile_pool: CompilePool, folder: Path
    ) -> None:
        request = request_for(write_module(render(backward(Pass.BWD_DQ)), folder))
        assert compiled(compile_pool, request).status is TrialStatus.OK

    @pytest.mark.parametrize("kernel_pass", [Pass.BWD_DKDV, Pass.BWD_DQ])
    def test_narrow_loads_of_an_aligned_backward_are_stopped(
        self, kernel_pass: Pass, compile_pool: CompilePool, folder: Path
    ) -> None:
        module = write_module(render(backward(kernel_pass, access=Access.ANY)), folder)
        result = compiled(compile_pool, request_for(module))
        assert (result.gate, result.error) == ("vector_access", "reads global memory in units of 2 bytes, not 16")

    def test_warps_may_share_a_row_that_is_no_row_of_scores(self, compile_pool: CompilePool, folder: Path) -> None:
        """delta has a sum along rows, and no softmax that a second warp would have to merge."""
        candidate = backward(Pass.BWD_DELTA, access=Access.ANY, num_warps=4)
        request = request_for(write_module(render(candidate), folder), form=CompileForm.GENERAL)
        assert (compiled(compile_pool, request).status, compiled(compile_pool, request).gate) == (TrialStatus.OK, None)

    def test_scratch_memory_of_an_amd_kernel_counts_as_spills(self) -> None:
        assembly = "    .private_segment_fixed_size: 132\n    .vgpr_count:     256\n"
        text = compiled_text(assembly=assembly, is_nvidia=False)
        assert resource_report(text, 0.0).spill_bytes == 132


KERNEL_MODULE = """
import triton
import triton.language as tl

@triton.jit
def kernel(x_ptr):
    {body}

KERNEL = kernel
SIGNATURE = {{"x_ptr": "*fp32"}}
ALIGNMENT = {{}}
OPTIONS = {{"num_warps": 4}}
"""


class TestABadModule:
    def test_that_is_no_python_is_a_failed_compile(self, compile_pool: CompilePool, folder: Path) -> None:
        result = compiled(compile_pool, request_for_source(folder, "no_python", "def kernel(:\n"))
        assert (result.status, "SyntaxError" in (result.error or "")) == (TrialStatus.COMPILE_FAILED, True)

    def test_that_the_frontend_refuses_says_why(self, compile_pool: CompilePool, folder: Path) -> None:
        source = KERNEL_MODULE.format(body="tl.store(x_ptr, nowhere_defined)")
        result = compiled(compile_pool, request_for_source(folder, "undefined_name", source))
        assert result.status is TrialStatus.COMPILE_FAILED
        assert "nowhere_defined is not defined" in (result.error or "")

    def test_that_the_assembler_refuses_is_a_failed_compile(self, compile_pool: CompilePool, folder: Path) -> None:
        inline = "tl.inline_asm_elementwise('gibberish $0, $1;', '=f,f', [tl.load(x_ptr)], tl.float32, True, 1)"
        body = f"tl.store(x_ptr, {inline})"
        result = compiled(compile_pool, request_for_source(folder, "gibberish", KERNEL_MODULE.format(body=body)))
        assert result.status is TrialStatus.COMPILE_FAILED
        # Triton 3.9's assembler calls itself by another name.
        assert re.search(r"ptxas(-blackwell)? fatal   : Ptx assembly aborted due to errors$", result.error or "")

    def test_gives_a_short_text(self, compile_pool: CompilePool, folder: Path) -> None:
        source = KERNEL_MODULE.format(body="tl.store(x_ptr, 0.0)\n    " * 2000 + "tl.store(x_ptr, nowhere_defined)")
        result = compiled(compile_pool, request_for_source(folder, "long_kernel", source))
        assert result.error is not None
        assert len(result.error) < 1100


class TestPool:
    def test_compiles_equal_requests_once(self, compile_pool: CompilePool, build: Build) -> None:
        assert compile_pool.submit(build("sm_90")) is compile_pool.submit(build("sm_90"))

    def test_goes_on_after_a_compile_that_hangs(self, folder: Path) -> None:
        hanging = request_for_source(folder, "hanging", "import time\ntime.sleep(300)\n")
        after = request_for_source(folder, "after_hanging", "not python")
        with CompilePool(1, deadline_s=3.0) as pool:
            results = [pool.submit(request) for request in (hanging, after)]
            assert [result.result().status for result in results] == [TrialStatus.TIMED_OUT, TrialStatus.COMPILE_FAILED]

    def test_blames_no_kernel_where_its_compiler_was_killed_and_goes_on(self, folder: Path) -> None:
        killed = request_for_source(folder, "killed", "import os\nos.kill(os.getpid(), 9)\n")
        after = request_for_source(folder, "after_killed", KERNEL_MODULE.format(body="tl.store(x_ptr, 0.0)"))
        with CompilePool(1, deadline_s=PATIENCE_S) as pool:
            first, second = [pool.submit(request) for request in (killed, after)]
            with pytest.raises(MachineError, match="was killed by SIGKILL"):
                first.result()
            assert second.result().status is TrialStatus.OK
            assert pool.submit(killed) is not first  # it may go better now

    def test_says_what_a_crashing_compiler_printed(self, compile_pool: CompilePool, folder: Path) -> None:
        source = "import os, sys\nprint('Assertion `rank > 0` failed', file=sys.stderr)\nos.abort()\n"
        result = compiled(compile_pool, request_for_source(folder, "aborting", source))
        assert result.status is TrialStatus.CRASHED
        assert "Assertion `rank > 0` failed" in (result.error or "")

    def test_compiles_although_this_process_interprets(
        self, folder: Path, build: Build, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        with CompilePool(1, deadline_s=PATIENCE_S) as pool:
            assert compiled(pool, build("sm_90")).status is TrialStatus.OK

    def test_a_later_one_finds_the_same_resources_in_the_cache(self, compile_pool: CompilePool, build: Build) -> None:
        first = compiled(compile_pool, build("sm_90"))
        with CompilePool(1, deadline_s=PATIENCE_S) as later:
            assert compiled(later, build("sm_90")) == first

    def test_knows_the_registers_of_a_kernel_cached_without_a_log(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FA_AUTOTUNE_CACHE", str(tmp_path))  # of its own: others may be reading the logs elsewhere
        request = request_for_source(folder, "unlogged", KERNEL_MODULE.format(body="tl.store(x_ptr, 1.0)"))
        with CompilePool(1, deadline_s=PATIENCE_S) as first:
            known = compiled(first, request).resources
        for log in (tmp_path / "triton").glob("*/assembler_log.json"):
            log.unlink()
        with CompilePool(1, deadline_s=PATIENCE_S) as later:
            resources = compiled(later, request).resources
        assert known is not None
        assert resources is not None
        assert resources.registers == known.registers

    def test_compiles_anew_what_is_damaged_in_the_cache(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """… whatever file it is, and with the same result."""
        monkeypatch.setenv("FA_AUTOTUNE_CACHE", str(tmp_path))
        request = request_for_source(folder, "damaged", KERNEL_MODULE.format(body="tl.store(x_ptr, 2.0)"))
        with CompilePool(1, deadline_s=PATIENCE_S) as pool:
            known = compiled(pool, request).resources
            assert known is not None
            (kernel,) = (tmp_path / "triton").iterdir()
            damages = {
                "assembler_log.json": ["", "[", "[1]", "[null, null]", "\udcff"],
                "kernel.json": ["{", "{}", "[]"],
                "kernel.cubin": ["", "\udc80" * 50],
                "kernel.ptx": ["\udcff"],
                "__grp__kernel.json": ["", '{"child_paths": 1}'],
                "checksums.json": ["", "[]"],
            }
            cases = [(name, text) for name, texts in damages.items() for text in texts]
            for limit, (name, text) in enumerate(cases, start=H100_SMEM_BYTES + 1):  # or the pool knew the answer
                assert (kernel / name).is_file()
                (kernel / name).write_bytes(text.encode(errors="surrogateescape"))
                result = compiled(pool, replace(request, smem_limit_bytes=limit))
                assert (result.status, result.error) == (TrialStatus.OK, None)
                assert result.resources is not None
                assert result.resources.registers == known.registers

    def test_raises_what_is_no_fault_of_the_kernel(self, compile_pool: CompilePool, folder: Path) -> None:
        request = request_for_source(folder, "without_memory", "raise MemoryError('planted')\n")
        with pytest.raises(MachineError, match="planted"):
            compiled(compile_pool, request)

    def test_closes_at_once_in_the_middle_of_a_compile(self, folder: Path) -> None:
        hanging = request_for_source(folder, "hanging_too", "import time\ntime.sleep(300)\n")
        pool = CompilePool(1, deadline_s=PATIENCE_S)
        future = pool.submit(hanging)
        pool.close()
        assert future.cancelled() or isinstance(future.exception(), WorkerError)

    def test_cancels_what_had_not_started_when_it_closes(self, folder: Path) -> None:
        names = ("hanging_first", "hanging_second", "hanging_third")
        pool = CompilePool(1, deadline_s=PATIENCE_S)
        futures = [pool.submit(request_for_source(folder, name, "import time\ntime.sleep(300)\n")) for name in names]
        pool.close()
        with pytest.raises(CancelledError):
            futures[-1].result()

    def test_raises_where_the_cache_folder_is_no_folder(
        self, tmp_path: Path, build: Build, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("FA_AUTOTUNE_CACHE", str(tmp_path / "file"))
        with CompilePool(1, deadline_s=PATIENCE_S) as pool, pytest.raises(OSError, match="Not a directory"):
            compiled(pool, build("sm_90"))


def test_compiling_processes_share_one_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA_AUTOTUNE_CACHE", "/a/cache")
    assert compile_environ()["TRITON_CACHE_DIR"] == "/a/cache/triton"


def test_there_is_a_cpu_to_compile_on() -> None:
    assert available_cpus() >= 1
