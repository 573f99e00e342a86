// Memory, stacked by kind: each pixel across shows the highest of the columns that fall into it.
PARTS.memory = (s, host) => {
  const most = Math.max(...s.panels.map(p => p.peak));
  // A line far above everything would leave the chart empty: it is left out.
  const top = 1.05 * Math.max(most, ...s.lines.map(l => l[1]).filter(bytes => bytes <= 1.5 * most));
  const pair = make("div", {
    className: s.panels.length > 1 ? "pair" : ""
  });
  host.append(pair);
  host.append(make("div", {
    className: "legend"
  }, ...s.bands.map(b => key(b[0], b[1]))));
  return s.panels.map((panel, k) => {
    const left = 78;
    let data = read(panel);
    const draw = (g, w, h) => {
      const low = h - 18,
        v = o.view,
        y = b => low - (low - 10) * b / top,
        per = (v.b - v.a) / (w - 4 - left);
      frame(g, w, h, left, 0, top, v, s.across);
      for (let x = left; x < w - 4; x++) {
        const best = highest(data, v.a + (x - left) * per, v.a + (x + 1 - left) * per);
        if (best < 0) continue;
        let at = 0;
        data.bands.forEach((row, b) => {
          if (row[best]) {
            g.fillStyle = color(s.bands[b][0]);
            g.fillRect(x, y(at + row[best]), 1, y(at) - y(at + row[best]));
            at += row[best];
          }
        });
      }
      const beside = [];
      s.lines.forEach(([name, value, tint], j) => {
        if (value <= top) across(g, w, left, y(value), `${name} ${size(value)}`, tint, j ? [2, 3] : [6, 4], beside);
      });
    };
    const mark = (g, w, h, i) => {
      const x = left + (data.at(i) - o.view.a) * (w - 4 - left) / (o.view.b - o.view.a);
      g.fillStyle = color("ink");
      if (x >= left) g.fillRect(Math.round(x), 8, 1, h - 26);
    };
    const words = i => {
      const bands = data.bands.map((row, b) => row[i] ? `${s.bands[b][1]} ${size(row[i])}` : "").filter(Boolean);
      return [`${s.across} ${data.at(i)}${data.label(i)}`, size(data.total[i]), ...bands.reverse()].join("\n");
    };
    const caption = p => `${p.caption}: peak ${size(p.peak)}`,
      said = make("span", {}, caption(panel));
    const o = {
      height: 260,
      left,
      view: view(panel.view, panel.start, panel.end),
      label: `${caption(panel)}. Arrow keys read, plus and minus zoom.`,
      caption: [said],
      draw,
      mark,
      words,
      count: () => data.total.length,
      hit: (x, y, t) => x < left ? -1 : data.index(t),
      stride: () => Math.max(1, Math.round(data.total.length / 100))
    };
    const made = stage(pair, o);
    if (panel.choices) addEventListener("choose", e => {
      const p = panel.choices[e.detail];
      data = read(p);
      said.textContent = caption(p);
      made.canvas.setAttribute("aria-label", caption(p));
      Object.assign(o.view, {
        start: p.start,
        end: p.end,
        a: p.start,
        b: p.end
      });
      later(made.draw);
    });
    return made.draw;
  });

  function read(p) {
    const bands = p.columns.map(row => Float64Array.from(row)),
      n = bands[0].length,
      total = new Float64Array(n),
      times = p.times;
    for (const row of bands)
      for (let i = 0; i < n; i++) total[i] += row[i];
    const index = t => {
      if (!times) return t >= 0 && t < n ? Math.floor(t) : -1;
      let a = 0,
        b = n;
      while (a < b) {
        const m = (a + b) >> 1;
        if (times[m] <= t) a = m + 1;
        else b = m;
      }
      return t < p.end ? a - 1 : -1;
    };
    return {
      bands,
      total,
      index,
      n,
      at: i => times ? times[i] : i,
      label: i => p.labels && p.labels[i] !== undefined ? ": " + p.labels[i] : ""
    };
  }

  function highest(data, from, to) {
    let a = data.index(from),
      best = -1,
      most = -1;
    if (a < 0) return -1;
    for (; a < data.n && (data.at(a) < to || best < 0); a++)
      if (data.total[a] > most) {
        most = data.total[a];
        best = a;
      }
    return best;
  }
};