"""The extension builds once, works across its install, and says what is wrong with its arguments."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from support.blocks import KB
from tightship.errors import BadInput, Unsupported
from tightship.execute import allocator
from tightship.execute.allocator import Arena, Script, replay


def python(code: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


class TestProcesses:
    def test_onednn_works_across_the_install(self) -> None:
        code = """if True:
            import gc, torch
            from tightship.execute import allocator
            x, w = torch.randn(4, 16, 32, 32), torch.randn(24, 16, 3, 3)
            kept = [torch.conv2d(x, w, padding=1) for _ in range(3)]
            allocator.load()
            assert torch.equal(torch.conv2d(x, w, padding=1), kept[0])
            del kept
            gc.collect()
            m = torch.nn.Conv2d(16, 24, 3)
            m(x).sum().backward()
            x.resize_(100_000)
            del x, w, m
            gc.collect()
            print("done")
        """
        process = python(code)
        assert process.communicate()[0] == "done\n"
        assert process.returncode == 0

    def test_processes_that_start_together_share_one_build(self, tmp_path: Path) -> None:
        code = "from tightship.execute.allocator import load; print(load().meter_current())"
        processes = [python(code, XDG_CACHE_HOME=str(tmp_path)) for _ in range(2)]
        assert [process.communicate()[0] for process in processes] == ["0\n", "0\n"]
        names = sorted(path.suffix for path in (tmp_path / "tightship" / "allocator").iterdir())
        assert names == [".lock", ".so"]

    def test_the_alignment_of_graphs_is_that_of_the_build(self) -> None:
        code = """if True:
            from tightship import graph
            graph.ALIGNMENT = 128
            from tightship.execute.allocator import Script
            try:
                Script([64], [64], [0, 1])
            except Exception as error:
                print(error)
        """
        assert "multiple of 128" in python(code).communicate()[0]

    @pytest.mark.parametrize("compiler", ["", "false", "/no/such/compiler"])
    def test_without_a_compiler_it_says_so(self, tmp_path: Path, compiler: str) -> None:
        code = """if True:
            from tightship.execute.allocator import NoCompiler, available, load
            from tightship.execute.allocator import Meter
            assert not available()
            for make in (load, Meter):
                try:
                    make()
                except NoCompiler as error:
                    print(error)
        """
        process = python(code, XDG_CACHE_HOME=str(tmp_path), PATH="", CXX=compiler and f"/bin/{compiler}")
        lines = process.communicate()[0].splitlines()
        assert len(lines) == 2 and lines[0] == lines[1], lines
        assert "serving a step from an arena is not supported" in lines[0]

    def test_it_is_one_of_the_errors_of_the_family(self) -> None:
        assert issubclass(allocator.NoCompiler, Unsupported)


class TestArguments:
    @pytest.mark.parametrize("size", [-1, 2**70])
    def test_arena(self, size: int) -> None:
        with pytest.raises(BadInput, match="arena"):
            Arena(size)

    def test_too_large_an_arena(self) -> None:
        with pytest.raises(MemoryError):
            Arena(2**60)

    @pytest.mark.parametrize(
        ("sizes", "offsets", "starts", "message"),
        [
            ([64], [0, 64], [0, 1], "differ in length"),
            ([64], [0], [], "step_start"),
            ([64], [0], [0, 2], "step_start"),
            ([64], [0], [1, 1], "step_start"),
            ([64, 64], [0, 64], [0, 2, 1, 2], "decreases"),
            ([0], [0], [0, 1], "not positive"),
            ([64], [32], [0, 1], "multiple of 64"),
            ([64], [-64], [0, 1], "multiple of 64"),
        ],
    )
    def test_script(self, sizes: list[int], offsets: list[int], starts: list[int], message: str) -> None:
        with pytest.raises(BadInput, match=message):
            Script(sizes, offsets, starts)

    def test_script_must_fit_the_arena(self) -> None:
        with pytest.raises(BadInput, match="does not fit"), replay(Arena(KB), Script([64], [KB], [0, 1])):
            pass

    def test_steps_must_exist(self) -> None:
        with replay(Arena(KB), Script([64], [0], [0, 1])) as session:
            for step in (-1, 1):
                with pytest.raises(ValueError, match="no such step"):
                    session.seek(step)
            with pytest.raises(RuntimeError, match="not ended"):
                _ = session.stats
