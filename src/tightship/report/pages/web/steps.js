// Evictions as arcs from leaving to return, and what runs on which stream.
PARTS.arcs = (s, host) => {
  const all = s.arcs,
    left = 8,
    o = {
      height: 160,
      left,
      view: view(s.view, 0, Math.max(1, s.steps)),
      count: () => all.length
    };
  const bytes = all.reduce((p, a) => p + a.bytes, 0),
    cost = all.reduce((p, a) => p + a.cost, 0),
    most = Math.max(1, ...all.map(a => a.to - a.from));
  const kinds = ["recompute", "offload", "compress"];
  o.caption = [...kinds.map(k => key(k, `${k} ${all.filter(a => a.kind === k).length}`)), `${size(bytes)} away in all, ${secs(cost)} to bring back`];
  o.label = `${all.length} evictions, from leaving to return: ${size(bytes)}, ${secs(cost)}. Arrow keys read them one by one.`;
  const x = (i, w) => left + (w - left - 4) * (i - o.view.a) / (o.view.b - o.view.a);
  const rise = (a, h) => 10 + (h - 40) * Math.sqrt((a.to - a.from) / most);
  const one = (g, w, h, a) => {
    const p = x(a.from, w),
      q = x(a.to, w);
    g.strokeStyle = color(a.kind);
    g.beginPath();
    g.ellipse((p + q) / 2, h - 18, Math.max(1, (q - p) / 2), rise(a, h), 0, Math.PI, 2 * Math.PI);
    g.stroke();
  };
  o.draw = (g, w, h) => {
    const low = h - 18;
    g.strokeStyle = color("line");
    g.beginPath();
    g.moveTo(left, low);
    g.lineTo(w - 4, low);
    g.stroke();
    ends(g, w, h, left, o.view, "step");
    const seen = new Set();
    g.globalAlpha = .7;
    for (const a of all) {
      const p = x(a.from, w),
        q = x(a.to, w),
        spot = `${a.kind}${Math.round(p)},${Math.round(q)}`;
      if (q >= 0 && p <= w && !seen.has(spot)) {
        seen.add(spot);
        one(g, w, h, a);
      }
    }
    g.globalAlpha = 1;
  };
  o.mark = (g, w, h, i) => {
    g.lineWidth = 3;
    one(g, w, h, all[i]);
  };
  o.hit = (px, py) => {
    let best = -1,
      near = 9;
    const w = made.canvas.clientWidth,
      h = 160,
      low = h - 18;
    all.forEach((a, i) => {
      const p = x(a.from, w),
        q = x(a.to, w),
        r = Math.max(1, (q - p) / 2),
        u = (px - (p + q) / 2) / r,
        ry = rise(a, h);
      const d = Math.abs(u) <= 1 ?
        Math.abs(low - py - ry * Math.sqrt(1 - u * u)) :
        Math.min(Math.hypot(px - p, py - low), Math.hypot(px - q, py - low));
      if (d < near) {
        near = d;
        best = i;
      }
    });
    return best;
  };
  o.words = i => {
    const a = all[i];
    return `${a.kind} ${a.name}\n${size(a.bytes)}, ${secs(a.cost)} to bring back\nsteps ${a.from} to ${a.to}`;
  };
  const made = stage(host, o);
  return [made.draw];
};
PARTS.streams = (s, host) => {
  const rows = s.slices,
    tracks = s.tracks,
    left = 90,
    end = Math.max(1e-9, ...rows.map(r => r[1])),
    tint = {
      compute: "activation",
      fetch: "offload",
      decompress: "compress"
    };
  const o = {
    height: () => 30 + 34 * Math.max(1, tracks.length),
    left,
    view: view("seconds", 0, end),
    count: () => rows.length,
    caption: "time across; each track a stream"
  };
  o.label = `${tracks.map(t => t[1]).join(", ")}: ${secs(end)}. Arrow keys read step by step.`;
  const track = new Map(tracks.map((t, k) => [t[0], k]));
  o.draw = (g, w, h) => {
    const x = t => left + (w - left - 4) * (t - o.view.a) / (o.view.b - o.view.a),
      past = tracks.map(() => [-1, ""]);
    tracks.forEach((t, k) => {
      g.fillStyle = color("soft");
      g.fillText(t[1], 6, 28 + 34 * k);
    });
    g.save();
    g.beginPath();
    g.rect(left, 0, w - left - 4, h);
    g.clip();
    rows.forEach(r => {
      const p = x(r[0]),
        q = x(r[1]);
      if (q < left || p > w) return;
      const k = track.get(r[2]),
        c = tint[r[3]] || r[3],
        f = Math.floor(q);
      if (past[k][0] === f && past[k][1] === c && q - p < 1) return;
      past[k] = [f, c];
      g.fillStyle = color(c);
      g.fillRect(p, 12 + 34 * k, Math.max(.5, q - p - (q - p > 3 ? .5 : 0)), 24);
    });
    g.restore();
    ends(g, w, h, left, o.view, "seconds");
  };
  o.mark = (g, w, h, i) => {
    const r = rows[i],
      x = t => left + (w - left - 4) * (t - o.view.a) / (o.view.b - o.view.a);
    g.fillStyle = color("ink");
    g.fillRect(Math.max(left, x(r[0])), 12 + 34 * track.get(r[2]), Math.max(1, x(r[1]) - x(r[0])), 24);
  };
  o.hit = (px, py, t) => {
    const k = Math.floor((py - 8) / 34);
    return k < 0 || k >= tracks.length || px < left ? -1 : rows.findIndex(r => r[2] === tracks[k][0] && r[0] <= t && t < r[1]);
  };
  o.words = i => {
    const [begin, end, stream, , step] = rows[i];
    return `${s.labels[step]}\n${secs(end - begin)} from ${secs(begin)}\n${tracks[track.get(stream)][1]}, step ${step}`;
  };
  return [stage(host, o).draw];
};