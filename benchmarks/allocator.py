"""What a request and a `Replay.seek` cost, served by torch's allocator and by tightship's, in nanoseconds."""

from collections.abc import Callable
from timeit import repeat

import torch

from tightship.execute.allocator import Arena, Script, load, replay


def main() -> None:
    def measure(what: str, run: Callable[[], object], count: int = 50_000) -> None:
        print(f"{what:44} {min(repeat(run, number=count, repeat=7)) / count * 1e9:7.0f} ns")

    def request() -> object:
        return torch.empty(256)

    measure("request + free, torch's own allocator", request)
    native = load()
    measure("request + free, passive", request)
    arena = Arena(1 << 20)
    measure("request + free, passive, an arena exists", request)
    with replay(arena, Script([1024], [0], [0, 1])) as one:
        measure("seek", lambda: one.seek(0))
        measure("seek + request + free, served", lambda: (one.seek(0), request()))
    with replay(arena, Script([1024] * 512, range(0, 512 * 1024, 1024), range(513))) as many:
        kept = [(many.seek(k), torch.empty(256))[1] for k in range(511)]
        measure("the same among 511 live blocks", lambda: (many.seek(511), request()))
        kept.clear()
    native.record_begin()
    measure("request + free, recorded", request)
    native.record_end()


if __name__ == "__main__":
    main()
