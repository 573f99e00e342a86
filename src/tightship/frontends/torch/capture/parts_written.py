"""What the code of a step writes to parameters that are gathered from ranks' parts: it would be lost."""

from __future__ import annotations

from collections import Counter

from tightship.errors import Unsupported
from tightship.frontends.torch.capture.tape import Tape
from tightship.frontends.torch.collectives import Collective

__all__ = ["check_gathered", "refused"]


def check_gathered(tape: Tape, *, whole: bool) -> None:
    """Raises ``Unsupported`` where an op writes to what was gathered of a parameter: a copy, which ends with the
    step. In eager the parameter has it from then on if parameters are ``whole`` there; if they are gathered there,
    too, whoever reads the parameter while it is."""
    parts = {s for s, x in enumerate(tape.storages) if x.role == "parameter"}
    home = {s: s for s in parts}
    gathered: dict[int, int] = {}
    for r in tape.records:
        reads = [tape.storage(v) for v in r.reads]
        made = [tape.storage(v) for v in r.results if v >= 0]
        if not reads or any(s not in home for s in reads):
            continue
        if isinstance(r.fn, Collective):
            if r.fn.kind == "gather" and not r.stays and len(made) == len(reads):
                gathered |= {s: home[part] for s, part in zip(made, reads, strict=True)}
        elif len(made) == 1 and len(reads) == 1:  # a cast
            home[made[0]] = home[reads[0]]
    times = Counter(gathered.values())
    for r in tape.records:
        if any(s in gathered and (whole or times[gathered[s]] > 1) for s in r.writes):
            raise refused(f"{r.target} at {r.origin}")


def refused(what: str) -> Unsupported:
    """The error for code that writes to a parameter of which ranks have parts."""
    return Unsupported(
        f"{what}, which writes to a parameter of which each rank has a part, in the code of a step,",
        "it would write to a copy, and be lost",
        "do it between steps, where modules have whole parameters to write to (with torch.no_grad()), or give all "
        "ranks whole parameters: the plain model and DataParallel(shard=False)",
    )  # fmt: skip
