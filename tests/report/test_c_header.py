"""C headers of placements: compiled, checked by the compiler, and read back by a program."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from support.chains import chain
from support.commands import as_json, run
from tightship import api
from tightship.errors import BadInput
from tightship.plan import Buffer, Pool, Problem, Solution
from tightship.report.c_header import Place, c_header, header_of_packing
from tightship.serde import save_graph

COMPILERS = [name for name in ("cc", "c++") if shutil.which(name)]
HOSTILE = [
    "x", "X", "x_2", "x 2", "*/ int evil; /*", "int", "0", "", "a\nb", "\\", "é", "_", "__COUNTER__", "arena",
    "arena_size", "check", "at", "\u202e", "x_SIZE", "x_OFFSET", "//", "??/", '"',
]  # fmt: skip


def constants(text: str) -> dict[str, int]:
    return {n: int(v) for n, v in re.findall(r"^#define (\w+) (\d+)u(?:ll)?$", text, re.MULTILINE)}


def compiled(folder: Path, header: str, code: str, compiler: str) -> str:
    (folder / "arena.h").write_text(header, encoding="utf-8")
    source = folder / ("main.c" if compiler == "cc" else "main.cpp")
    source.write_text(f'#include <stdio.h>\n#include "arena.h"\n#include "arena.h"\n{code}', encoding="utf-8")
    command = [
        compiler,
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-trigraphs",
        str(source),
        "-o",
        str(folder / "main"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return subprocess.run([folder / "main"], check=True, capture_output=True, text=True).stdout


@pytest.mark.skipif(not COMPILERS, reason="no C compiler")
@pytest.mark.parametrize("compiler", COMPILERS)
def test_any_names_compile_and_stay_apart(tmp_path, compiler):
    places = [Place(name, "arena", 64 * k, 64, k, k + 1) for k, name in enumerate(HOSTILE)]
    text = c_header("my net", {"arena": 64 * len(HOSTILE)}, 64, places)
    found = constants(text)
    assert len(found) == 2 + 2 * len(HOSTILE)
    assert sorted(v for n, v in found.items() if n.endswith("_OFFSET")) == [
        64 * k for k in range(len(HOSTILE))
    ]
    code = """int main(void) { static unsigned char memory[MY_NET_ARENA_SIZE];
      printf("%d %d\\n", (int)((unsigned char *)MY_NET_AT(memory, X_2) - memory), (int)MY_NET_ARENA_SIZE);
      return 0; }"""
    assert compiled(tmp_path, text, code, compiler) == f"64 {64 * len(HOSTILE)}\n"


@pytest.mark.skipif(not COMPILERS, reason="no C compiler")
def test_the_compiler_notices_a_tensor_outside_of_its_arena(tmp_path):
    text = c_header("n", {"arena": 128}, 64, [Place("x", "arena", 64, 64, 0, 1)])
    compiled(tmp_path, text, "int main(void) { return 0; }", COMPILERS[0])
    with pytest.raises(subprocess.CalledProcessError):
        compiled(
            tmp_path,
            text.replace("X_OFFSET 64u", "X_OFFSET 65u"),
            "int main(void) { return 0; }",
            COMPILERS[0],
        )
    with pytest.raises(BadInput, match="outside of its arena"):
        c_header("n", {"arena": 128}, 64, [Place("x", "arena", 65, 64, 0, 1)])


def test_a_plan_has_every_stay_where_it_lies(tmp_path):
    answer = api.plan(chain(6), budget="60%")
    answer.arena_header(tmp_path / "plan.h", title="6 ops")
    text = (tmp_path / "plan.h").read_text(encoding="utf-8")
    found = constants(text)
    stays = [r for r in answer.residences if r.pool == "device" and r.size]
    assert found["MODEL_6_OPS_ARENA_SIZE"] == answer.arena
    assert sorted(v for n, v in found.items() if n.endswith("_OFFSET")) == sorted(r.offset for r in stays)
    assert "F0_2_OFFSET" in text  # made again
    unplaced = answer.changed(residences=())
    with pytest.raises(BadInput, match="this plan does not"):
        unplaced.arena_header(tmp_path / "other.h")
    assert not (tmp_path / "other.h").exists()


def test_pools_are_arenas_of_their_own():
    buffers = (Buffer("a", 0, 2, 96, alignment=32), Buffer("b", 0, 2, 64), Buffer("c", 1, 2, 32))
    problem = Problem(buffers, pools=(Pool("sram"), Pool("dram")))
    solution = Solution((0, 0, 96), 192, homes=(("sram", 0), ("dram", 0), ("sram", 0)))
    found = constants(header_of_packing(problem, solution, "net"))
    assert found["NET_SRAM_SIZE"] == 128 and found["NET_DRAM_SIZE"] == 64
    assert found["NET_SRAM_ALIGNMENT"] == 32 and found["NET_C_OFFSET"] == 96
    one = header_of_packing(replace(problem, pools=()), Solution((0, 96, 160), 192), "net")
    assert constants(one)["NET_ARENA_SIZE"] == 192


def test_the_command_line_writes_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_graph(chain(6), "graph.json")
    status, rows = as_json("plan", "graph.json", "--budget", "90%", "--arena-header", "plan.h", capsys=capsys)
    assert status == 0 and rows["arena_header"] == "plan.h"
    assert rows["arena"] in constants(Path("plan.h").read_text(encoding="utf-8")).values()
    Path("p.csv").write_text("id,lower,upper,size\na,0,2,3\nb,1,3,4\n", encoding="utf-8")
    status, rows = as_json("pack", "p.csv", "--arena-header", "p.h", capsys=capsys)
    assert status == 0 and constants(Path("p.h").read_text(encoding="utf-8"))["P_ARENA_SIZE"] == 7
    status, _, _ = run("pack", "p.csv", "--capacity", "5", "--arena-header", "q.h", capsys=capsys)
    assert status == 1 and not Path("q.h").exists()
    status, _, err = run("pack", "p.csv", "--arena-header", "no/q.h", capsys=capsys)
    assert status == 2 and "--arena-header" in err
