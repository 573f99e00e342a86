// Time against memory: plans as a line, other policies as points. A click or Enter chooses the plan that is shown below.
PARTS.frontier = (s, host) => {
  const most = Math.max(...s.points.map(p => p.peak)), left = 60, height = 360, base = height - 34;
  const all = [...s.points.map(p => ({ ...p, ours: true })), ...s.peers];
  const shown = all.filter(p => p.ours || p.peak <= 2 * most);
  const far = Math.max(...shown.map(p => p.peak)) * 1.04, tall = Math.max(.02, ...shown.map(p => p.extra)) * 1.12;
  const across = view("peak", 0, far);
  let chosen = 0;

  const x = (peak, w) => left + (w - left - 8) * (peak - across.a) / (across.b - across.a);
  const y = extra => base - (base - 16) * Math.max(0, extra) / tall;
  // Round shares of a step, four to eight of them.
  const step = [.005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 20, 50, 100].find(share => tall / share <= 8) || tall;

  function scale(g, w) {
    g.strokeStyle = color("line");
    g.fillStyle = color("soft");
    g.textAlign = "right";
    for (let share = 0; share <= tall; share += step) {
      line(g, [[left, y(share)], [w - 8, y(share)]]);
      g.fillText(`+${+(100 * share).toFixed(1)} %`, left - 6, y(share) + 4);
    }
    for (const bytes of levels(across.a, across.b)) {
      const at = x(bytes, w);
      g.textAlign = at < left + 20 ? "left" : at > w - 40 ? "right" : "center";
      g.fillText(short(bytes), at, height - 18);
    }
    g.textAlign = "left";
    g.fillText("extra time of one step, by peak", left, height - 3);
  }

  function line(g, points) {
    g.beginPath();
    points.forEach(([px, py], k) => k ? g.lineTo(px, py) : g.moveTo(px, py));
    g.stroke();
  }

  function bounds(g, w) {
    const least = x(s.bound, w);
    g.strokeStyle = g.fillStyle = color("bound");
    g.setLineDash([2, 3]);
    line(g, [[least, 12], [least, base]]);
    line(g, s.points.map(p => [x(p.budget, w), y(p.least)]));
    g.setLineDash([]);
    g.fillText("lower bound " + size(s.bound), least + 5, 22);
  }

  // Names of other policies, kept apart where they are close to one another.
  function named(g, w, p, taken) {
    const wide = g.measureText(p.name).width, px = x(p.peak, w), at = px + 9 + wide > w ? px - 9 - wide : px + 9;
    let up = y(p.extra) + 4;
    while (taken.some(t => Math.abs(t.up - up) < 13 && t.from < at + wide && at < t.to)) up += 13;
    taken.push({ up, from: at, to: at + wide });
    g.fillStyle = color("ink");
    g.fillText(p.name, at, up);
  }

  function draw(g, w) {
    scale(g, w);
    bounds(g, w);
    g.strokeStyle = color("activation");
    g.lineWidth = 2;
    line(g, s.points.map(p => [x(p.peak, w), y(p.extra)]));
    const taken = [];
    shown.forEach((p, i) => {
      const px = x(p.peak, w), py = y(p.extra);
      g.fillStyle = color(p.ours ? "activation" : "gradient");
      g.beginPath();
      if (p.ours) g.arc(px, py, i === chosen ? 6 : 4, 0, 7);
      else g.rect(px - 4, py - 4, 8, 8);
      g.fill();
      if (p.changed) {
        g.strokeStyle = color("ink");
        g.stroke();
      }
      if (!p.ours) named(g, w, p, taken);
    });
  }

  function mark(g, w, h, i) {
    g.strokeStyle = color("ink");
    g.lineWidth = 2;
    g.beginPath();
    g.arc(x(shown[i].peak, w), y(shown[i].extra), 9, 0, 7);
    g.stroke();
  }

  function hit(px, py) {
    const w = made.canvas.clientWidth;
    const far = shown.map(p => Math.hypot(px - x(p.peak, w), py - y(p.extra))), near = Math.min(...far);
    return near < 14 ? far.indexOf(near) : -1;
  }

  function words(i) {
    const p = shown[i];
    return [p.name, `peak ${size(p.peak)}`, `time ${secs(p.time)} (${WORDS.percent(p.extra)})`, p.said]
      .filter(Boolean).join("\n");
  }

  function choose(i) {
    if (!shown[i].ours) return;
    dispatchEvent(new CustomEvent("choose", { detail: i }));
    $("said").textContent = "shown below: " + words(i);
  }

  const caption = [
    key("activation", "plans (choose one to see it below)"),
    key("gradient", "other policies, simulated"),
    key("bound", "no plan is below")
  ];
  if (s.points.some(p => p.changed)) caption.push(key("ink", "ringed: ops in slices, or a static set that streams"));
  const label = `Time against memory: ${s.points.length} plans, ${s.peers.length} other policies. ` +
    "Arrow keys read them, Enter shows a plan below.";
  const count = () => shown.length;
  const made = stage(host, { height, label, caption, left, view: across, draw, mark, hit, words, choose, count });
  addEventListener("choose", e => {
    chosen = e.detail;
    later(made.draw);
  });
  return [made.draw];
};
