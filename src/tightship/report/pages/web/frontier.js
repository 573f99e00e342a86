// Time against memory: plans as a line, other policies as points. A click or Enter chooses the plan that is shown below.
PARTS.frontier = (s, host) => {
  const all = [...s.points.map(p => ({
      ...p,
      ours: true
    })), ...s.peers],
    left = 60,
    most = Math.max(...s.points.map(p => p.peak));
  const shown = all.filter(p => p.ours || p.peak <= 2 * most),
    far = Math.max(...shown.map(p => p.peak)) * 1.04,
    tall = Math.max(.02, ...shown.map(p => p.extra)) * 1.12;
  const o = {
    height: 360,
    left,
    view: view("peak", 0, far),
    count: () => shown.length,
    choose: i => {
      if (shown[i].ours) {
        chosen = i;
        dispatchEvent(new CustomEvent("choose", {
          detail: i
        }));
        later(made.draw);
        $("said").textContent = "shown below: " + o.words(i);
      }
    }
  };
  let chosen = 0;
  const spot = (p, w, h) => [left + (w - left - 8) * (p.peak - o.view.a) / (o.view.b - o.view.a), h - 34 - (h - 50) * Math.max(0, p.extra) / tall];
  o.draw = (g, w, h) => {
    g.strokeStyle = colour("line");
    g.fillStyle = colour("soft");
    g.textAlign = "right";
    for (let f = 0; f <= 4; f++) {
      const y = h - 34 - (h - 50) * f / 4;
      g.beginPath();
      g.moveTo(left, y);
      g.lineTo(w - 8, y);
      g.stroke();
      g.fillText(`+${(100 * tall * f / 4).toFixed(1)} %`, left - 6, y + 4);
    }
    g.textAlign = "center";
    for (let f = 0; f <= 4; f++) {
      const x = left + (w - left - 8) * f / 4;
      g.textAlign = f === 4 ? "right" : f ? "center" : "left";
      g.fillText(size(Math.round(o.view.a + (o.view.b - o.view.a) * f / 4)), x, h - 18);
    }
    g.textAlign = "left";
    g.fillText("extra time of one step, by peak", left, h - 3);
    const bound = spot({
      peak: s.bound,
      extra: 0
    }, w, h)[0];
    g.strokeStyle = g.fillStyle = colour("bound");
    g.setLineDash([2, 3]);
    g.beginPath();
    g.moveTo(bound, 12);
    g.lineTo(bound, h - 34);
    g.stroke();
    g.beginPath();
    s.points.forEach((p, k) => {
      const [x, y] = spot({
        peak: p.budget,
        extra: p.least
      }, w, h);
      k ? g.lineTo(x, y) : g.moveTo(x, y);
    });
    g.stroke();
    g.setLineDash([]);
    g.fillText("lower bound " + size(s.bound), bound + 5, 22);
    g.strokeStyle = colour("activation");
    g.lineWidth = 2;
    g.beginPath();
    s.points.forEach((p, k) => {
      const [x, y] = spot(p, w, h);
      k ? g.lineTo(x, y) : g.moveTo(x, y);
    });
    g.stroke();
    g.lineWidth = 1;
    const ends = []; // names of others, kept apart
    shown.forEach((p, i) => {
      const [x, y] = spot(p, w, h);
      g.fillStyle = colour(p.ours ? "activation" : "gradient");
      g.beginPath();
      p.ours ? g.arc(x, y, i === chosen ? 6 : 4, 0, 7) : g.rect(x - 4, y - 4, 8, 8);
      g.fill();
      if (!p.ours) {
        g.fillStyle = colour("ink");
        const wide = g.measureText(p.name).width,
          at = x + 9 + wide > w ? x - 9 - wide : x + 9;
        let up = y + 4;
        while (ends.some(e => Math.abs(e[1] - up) < 13 && e[0] < at + wide && at < e[2])) up += 13;
        ends.push([at, up, at + wide]);
        g.fillText(p.name, at, up);
      }
    });
  };
  o.mark = (g, w, h, i) => {
    const [x, y] = spot(shown[i], w, h);
    g.strokeStyle = colour("ink");
    g.lineWidth = 2;
    g.beginPath();
    g.arc(x, y, 9, 0, 7);
    g.stroke();
  };
  o.hit = (px, py) => {
    const w = made.canvas.clientWidth;
    let best = -1,
      near = 14;
    shown.forEach((p, i) => {
      const [x, y] = spot(p, w, 360), d = Math.hypot(px - x, py - y);
      if (d < near) {
        near = d;
        best = i;
      }
    });
    return best;
  };
  o.words = i => {
    const p = shown[i];
    return `${p.name}\npeak ${size(p.peak)}\ntime ${secs(p.time)} (${WORDS.percent(p.extra)})` + (p.said ? "\n" + p.said : "");
  };
  o.caption = [
    key("activation", "plans (choose one to see it below)"),
    key("gradient", "other policies, simulated"),
    key("bound", "no plan is below")
  ];
  o.label = `Time against memory: ${s.points.length} plans, ${s.peers.length} other policies. Arrow keys read them, Enter shows a plan below.`;
  const made = stage(host, o);
  return [made.draw];
};