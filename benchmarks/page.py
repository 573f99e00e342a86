"""How fluid a plan's page is: milliseconds that the script of one frame takes, in a real browser.

    python benchmarks/page.py [--steps N]

A made-up plan of 20,000 steps and 50,000 residences is drawn, then zoomed and panned; medians and the slowest of the
frames are printed, with the size of the file and the time until the page is ready. Needs Chromium and playwright.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
from pathlib import Path

from tightship.graph import Graph, Op, Storage, Value
from tightship.plan import Plan, Residence, Step
from tightship.report.pages.plan import plan_page

MOVE = """async ([kind, keys]) => {
  const canvas = document.querySelector("section[id^=arena] canvas"), box = canvas.getBoundingClientRect();
  const taken = [];
  canvas.focus();
  for (let k = 0; k < 60; k++) {
    const began = performance.now();
    if (kind === "hover") canvas.dispatchEvent(new PointerEvent("pointermove", {
      clientX: box.left + 100 + 9 * k, clientY: box.top + 60 + 4 * k }));
    else canvas.dispatchEvent(new KeyboardEvent("keydown", { key: keys[k % keys.length] }));
    await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
    canvas.getContext("2d").getImageData(0, 0, 1, 1);
    taken.push(performance.now() - began);
  }
  return taken;
}"""


def made_up(steps: int, extra: int) -> tuple[Graph, Plan]:
    """Ops that each make one storage of a random size, read again far or near; ``extra`` temporaries besides."""
    draw = random.Random(0)
    ops, values, storages = [], [Value("x", 0)], [Storage("x", 1 << 20, "input")]
    for k in range(steps):
        storages.append(Storage(f"blocks.{k // 40}.op{k}", draw.randrange(64, 1 << 22, 64)))
        values.append(Value(f"v{k}", k + 1, "float32", (draw.randrange(1, 512), 64)))
        read = max(0, k - draw.choice((1, 1, 2, 40, 400)))
        ops.append(
            Op(
                f"op{k}",
                "f",
                (read,),
                (k + 1,),
                time=1e-5,
                module=f"blocks.{k // 40}",
                source=f"m.py:{k % 90}",
            )
        )
    graph = Graph(tuple(ops), tuple(values), tuple(storages), (0,), (steps,), "made up")
    stays, top = [], 1 << 30
    for k in range(steps):
        end = min(steps, k + draw.choice((2, 5, 50, 2000)))
        stays.append(Residence(k + 1, k, end, storages[k + 1].size, draw.randrange(0, top, 64)))
    for _ in range(extra):
        k = draw.randrange(steps)
        stays.append(
            Residence(-1, k, k + 1, draw.randrange(64, 1 << 20, 64), draw.randrange(0, top, 64), request=0)
        )
    plan = Plan(
        graph.digest, tuple(Step("compute", op=k) for k in range(steps)), tuple(stays),
        peak=1 << 36, peak_before=1 << 36, arena=top, planner="made up",
    )  # fmt: skip
    return graph, plan


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=20_000)
    steps = parser.parse_args().steps
    graph, plan = made_up(steps, extra=steps * 3 // 2)
    text = plan_page(graph, plan)
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as p:
        file = Path(folder) / "plan.html"
        file.write_text(text)
        print(f"{steps} steps, {len(plan.residences)} residences: {len(text) / 1e6:.1f} MB")
        browser = p.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-ready=true]")
        print(f"ready after {page.evaluate('performance.now()'):.0f} ms")
        ways = {"zoom": ["+"] * 15 + ["-"] * 15, "pan": ["0", "ArrowLeft", "ArrowUp"], "hover": [""]}
        for kind, keys in ways.items():
            taken = page.evaluate(MOVE, [kind, keys])
            print(
                f"{kind:<6} median {statistics.median(taken):6.1f} ms a frame, slowest {max(taken):6.1f} ms"
            )
        browser.close()


if __name__ == "__main__":
    main()
