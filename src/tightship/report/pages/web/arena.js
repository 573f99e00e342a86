// The arena: time across, offset up, one rectangle for each stay.
// A stay is [start, end, offset, size, band, name, where, pale].
PARTS.arena = (s, host) => {
  let space = null,
    wanted = "",
    hits = [];
  const lower = s.names.map(n => n.toLowerCase()),
    left = 78,
    rise = {
      low: 0,
      high: 1,
      bottom: 0,
      top: 1
    };
  const o = {
    height: 420,
    left,
    rise,
    view: view(s.view, s.start, s.end),
    count: () => wanted ? hits.length : space.n
  };

  function take(k) {
    const rows = s.spaces[k].stays.slice().sort((p, q) => p[4] - q[4] || q[3] - p[3]),
      n = rows.length,
      col = j => Float64Array.from(rows, r => r[j] || 0);
    space = {
      rows,
      n,
      since: col(0),
      until: col(1),
      low: col(2),
      size: col(3),
      band: Int32Array.from(rows, r => r[4]),
      pale: Int8Array.from(rows, r => r[7] || 0)
    };
    rise.bottom = rise.low = 0;
    rise.top = rise.high = Math.max(1, s.spaces[k].size);
    find();
  }

  function find() {
    hits = [];
    if (wanted)
      for (let i = 0; i < space.n; i++) {
        const r = space.rows[i];
        if (lower[r[5]].includes(wanted) || lower[r[6]].includes(wanted)) hits.push(i);
      }
    const f = space.found = new Uint8Array(space.n);
    hits.forEach(i => {
      f[i] = 1;
    });
  }
  // Rectangles are written to pixels directly: tens of thousands of them in a few milliseconds, however small.
  o.draw = (g, w, h) => {
    const v = o.view,
      low = h - 18,
      sx = (w - left - 4) / (v.b - v.a),
      sy = (low - 10) / (rise.high - rise.low),
      y0 = low,
      r = g.canvas.width / w;
    frame(g, w, h, left, rise.low, rise.high, v, s.across);
    const {
      since,
      until,
      low: at,
      size: nbytes,
      band,
      pale,
      found,
      n
    } = space, names = [];
    const W = Math.max(1, Math.round((w - left - 4) * r)),
      H = Math.max(1, Math.round((low - 10) * r)),
      sheet = paper(W, H),
      px = sheet.pixels,
      kx = W / (v.b - v.a),
      ky = H / (rise.high - rise.low);
    const ink = s.bands.map(b => packed(g, color(b[0])));
    for (let i = 0; i < n; i++) {
      if (until[i] <= v.a || since[i] >= v.b || at[i] + nbytes[i] <= rise.low || at[i] >= rise.high) continue;
      let p = (since[i] - v.a) * kx,
        q = (until[i] - v.a) * kx,
        t = (rise.high - at[i] - nbytes[i]) * ky,
        u = (rise.high - at[i]) * ky;
      if (q - p > 70 * r && u - t > 13 * r && names.length < 300) names.push(i);
      const gap = q - p > 3 * r && u - t > 3 * r ? 1 : 0;
      p = Math.max(0, Math.min(W - 1, Math.round(p)));
      t = Math.max(0, Math.min(H - 1, Math.round(t)));
      q = Math.max(p + 1, Math.min(W, Math.round(q) - gap));
      u = Math.max(t + 1, Math.min(H, Math.round(u) - gap));
      const solid = wanted && !found[i] ? 46 : pale[i] ? 64 : 255,
        paint = (ink[band[i]] & 0xffffff | solid << 24) >>> 0;
      if (solid < 255 && q - p === 1 && px[t * W + p]) continue; // what is faint hides nothing
      if (q - p === 1)
        for (let y = t * W + p, e = u * W; y < e; y += W) px[y] = paint;
      else
        for (let y = t; y < u; y++) px.fill(paint, y * W + p, y * W + q);
    }
    sheet.put(g, left, 10, w - left - 4, low - 10);
    g.save();
    g.beginPath();
    g.rect(left, 10, w - left - 4, low - 10);
    g.clip();
    g.globalAlpha = 1;
    g.textAlign = "left";
    for (const i of names) {
      const x = Math.max(left, left + (since[i] - v.a) * sx),
        right = Math.min(w - 4, left + (until[i] - v.a) * sx),
        top = Math.max(10, y0 - (at[i] + nbytes[i] - rise.low) * sy),
        base = Math.min(low, y0 - (at[i] - rise.low) * sy);
      if (right - x < 60 || base - top < 13) continue;
      const room = Math.floor((right - x - 8) / 7),
        name = s.names[space.rows[i][5]];
      g.fillStyle = "#fff";
      g.strokeStyle = "rgba(15,23,42,.75)";
      g.lineWidth = 2.5;
      g.lineJoin = "round";
      const text = name.length > room ? name.slice(0, room - 1) + "…" : name,
        y = (top + base) / 2 + 4;
      g.strokeText(text, x + 4, y);
      g.fillText(text, x + 4, y);
      g.lineWidth = 1;
    }
    const beside = [];
    (s.lines || []).forEach(([name, value, tint]) => {
      if (value <= rise.high && value >= rise.low) across(g, w, left, y0 - (value - rise.low) * sy, `${name} ${size(value)}`, tint, [6, 4], beside);
    });
    g.restore();
  };
  o.mark = (g, w, h, mark) => {
    const i = item(mark),
      v = o.view,
      low = h - 18,
      sx = (w - left - 4) / (v.b - v.a),
      sy = (low - 10) / (rise.high - rise.low);
    if (i < 0) return;
    g.beginPath();
    g.rect(left, 10, w - left - 4, low - 10);
    g.clip();
    g.strokeStyle = color("ink");
    g.lineWidth = 2;
    const x = left + (space.since[i] - v.a) * sx,
      y = low - (space.low[i] + space.size[i] - rise.low) * sy;
    g.strokeRect(x, y, Math.max(1, (space.until[i] - space.since[i]) * sx), Math.max(1, space.size[i] * sy));
  };
  const item = k => k < 0 ? -1 : wanted ? hits[k] ?? -1 : k;
  o.hit = (px, py, t) => {
    const h = o.height,
      b = rise.low + (rise.high - rise.low) * (h - 18 - py) / (h - 28);
    let best = -1;
    for (let i = 0; i < space.n; i++)
      if (space.since[i] <= t && t < space.until[i] && space.low[i] <= b && b < space.low[i] + space.size[i] && (!wanted || space.found[i])) {
        if (best < 0 || !space.pale[i]) best = i;
      }
    return wanted ? hits.indexOf(best) : best;
  };
  o.words = k => {
    const r = space.rows[item(k)];
    return `${s.names[r[5]]} (${s.bands[r[4]][1]})\n${size(r[3])} at offset ${r[2]}\n${s.across} ${r[0]} to ${r[1]}\n${s.names[r[6]]}`;
  };
  // What the keyboard reads is brought into view.
  o.reveal = k => {
    const r = space.rows[item(k)],
      v = o.view;
    if (r[0] < v.a || r[1] > v.b) {
      const c = (r[0] + r[1]) / 2,
        half = Math.max(v.b - v.a, (r[1] - r[0]) * 1.1) / 2;
      reframe(v, c - half, c + half);
    }
    const tall = rise.high - rise.low;
    if (r[2] < rise.low || r[2] + r[3] > rise.high) {
      rise.low = Math.max(0, Math.min(rise.top - tall, r[2] + r[3] / 2 - tall / 2));
      rise.high = rise.low + tall;
    }
  };
  const search = make("input", {
      type: "search",
      placeholder: "find a tensor, module or line",
      "aria-label": "Find in the arena; Enter reads the next one"
    }),
    found = make("span", {
      role: "status"
    });
  const pick = make("select", {
    "aria-label": "which memory"
  }, ...s.spaces.map((p, k) => make("option", {
    value: k
  }, `${p.name}: ${size(p.size)}`)));
  const plus = make("button", {
      type: "button",
      "aria-label": "zoom in"
    }, "+"),
    minus = make("button", {
      type: "button",
      "aria-label": "zoom out"
    }, "−"),
    whole = make("button", {
      type: "button"
    }, "show all");
  host.append(make("div", {
    className: "tools"
  }, ...(s.spaces.length > 1 ? [pick] : []), search, found, plus, minus, whole));
  const there = new Set(s.spaces.flatMap(p => p.stays.map(r => r[4])));
  o.caption = [...s.bands.filter((b, k) => there.has(k)).map(b => key(b[0], b[1])), make("span", {
    className: "help"
  }, "click, then the wheel zooms; drag or arrows pan; n and p read stay by stay")];
  o.label = `Arena: ${s.across}s across, offsets up. Arrow keys pan, plus and minus zoom, 0 shows all, n and p read stay by stay.`;
  take(0);
  const made = stage(host, o);
  let next = -1;
  search.oninput = () => {
    wanted = search.value.trim().toLowerCase();
    next = -1;
    find();
    found.textContent = wanted ? hits.length + " found" : "";
    later(made.draw);
  };
  search.onblur = () => tip("");
  search.onkeydown = e => {
    if (e.key === "Enter" && hits.length) {
      next = (next + 1) % hits.length;
      made.read(next);
    }
  };
  pick.onchange = () => {
    take(+pick.value);
    later(made.draw);
  };
  plus.onclick = () => made.zoom(1 / 1.4);
  minus.onclick = () => made.zoom(1.4);
  whole.onclick = () => {
    wanted = search.value = "";
    find();
    found.textContent = "";
    made.all();
  };
  return [made.draw];
};