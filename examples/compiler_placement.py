"""Placement for compiler writers: buffers with live ranges in, offsets out, verified.

    python examples/compiler_placement.py        # a second; needs nothing but tightship

A compiler has buffers and knows when each is alive. Here are those of a small network for a device with 40 KiB.
"""

from tightship.plan import Buffer, Problem
from tightship.planners.packing import Search, pack
from tightship.verify.placement import check_solution

KIB = 1024


def buffers(layers: int = 6) -> tuple[Buffer, ...]:
    """Each layer reads what the one before made, and needs scratch while it runs; inputs of odd layers are needed
    again two layers later (a residual)."""
    made = []
    for k in range(layers):
        last = min(k + (4 if k % 2 else 2), layers + 1)
        made.append(Buffer(f"act{k}", lower=k, upper=last, size=(4 + 3 * (k % 3)) * KIB, alignment=64))
        made.append(Buffer(f"scratch{k}", lower=k, upper=k + 1, size=(2 + k) * KIB, alignment=64))
    return tuple(made)


def main() -> None:
    problem = Problem(buffers(), capacity=40 * KIB)
    solution = pack(problem, search=Search(seed=0))
    assert check_solution(problem, solution) == []  # the verifier shares no code with the planners
    apart = sum(b.size for b in problem.buffers)
    print(f"{len(problem.buffers)} buffers, {apart} B side by side")
    print(f"arena {solution.arena} B, lower bound {solution.lower_bound} B, optimal: {solution.optimal}")
    for buffer, offset in sorted(zip(problem.buffers, solution.offsets, strict=True), key=lambda p: p[1]):
        print(f"  {offset:6} .. {offset + buffer.size:6}  [{buffer.lower}, {buffer.upper})  {buffer.id}")


if __name__ == "__main__":
    main()
